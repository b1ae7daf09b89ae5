"""`/v1/check`: a decision by status, for proxies that ask before they pass a request on.

    /v1/check?policy=api&address=203.0.113.9             the proxy writes its client's address into the query
    /v1/check?policy=api&address_header=x-real-ip        ... or names the header field that holds it
    /v1/check?policy=api&key_header=x-api-key            a key that is no address (`key`: written into the query)
    /v1/check?policy=api&address=203.0.113.9&deny=403    for nginx, which takes a 429 of its subrequest for an error

200: pass it on; 429 (or `deny`): refuse it. An IPv6 client has a whole network to itself, so an address is counted by
its /64. What a client may write goes by a header field only: a query in which it stands could be continued by the
client, so a parameter that comes twice is refused.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import parse_qsl

from tidegate.headers import PROBLEM_TYPE, Style, problem, write
from tidegate.inbound.client.address import address_key, parse_address
from tidegate.service.decisions.decider import Subject
from tidegate.service.http.problems import HTTPReply, ProblemError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidegate.service.decisions.decider import Decider

REPEATABLE_PARAMETERS: Final = ("key", "key_header", "address", "address_header")  # parts of a key, in order
PARAMETERS: Final = ("policy", *REPEATABLE_PARAMETERS, "cost", "deny")
METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")  # a proxy may ask with its client's
DENIAL_STATUSES: Final = ("401", "403", "429", "503")
MAX_PARAMETERS: Final = 20  # parameters
FORWARDED_FOR: Final = b"x-forwarded-for"
MAX_COST_DIGITS: Final = 16


def read_query(query: bytes) -> list[tuple[str, str]]:
    """Read a query whose parameters are known, and come once."""
    try:
        text = query.decode("ascii")
        # Strictly: keys that are no UTF-8 would all be the same one.
        pairs = parse_qsl(
            text, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=MAX_PARAMETERS, errors="strict"
        )
    except ValueError as error:
        raise ProblemError("bad-request", f"the query cannot be read: {error}") from None
    seen = set()
    for name, _ in pairs:
        if name not in PARAMETERS:
            raise ProblemError("bad-request", f"unknown parameter {name[:50]!r}: known are {', '.join(PARAMETERS)}")
        if name in seen and name not in REPEATABLE_PARAMETERS:
            raise ProblemError("bad-request", f"the parameter {name!r} comes twice")
        seen.add(name)
    return pairs


def key_of(pairs: list[tuple[str, str]], headers: Mapping[bytes, bytes]) -> tuple[str, ...]:
    """Put the key together, in the order of the query; a missing header field is no key that clients may share."""
    parts = []
    for name, value in pairs:
        if name not in REPEATABLE_PARAMETERS:
            continue
        found = field_of(value, headers) if name.endswith("_header") else value
        if not found:
            raise ProblemError("bad-request", f"{name} is empty or missing: whom is this about?")
        if name.startswith("address"):
            if parse_address(found) is None:
                raise ProblemError("bad-request", f"{name}: {found[:50]!r} is no address")
            found = address_key(found)
        parts.append(found)
    if not parts:
        raise ProblemError("bad-request", "needs a key: key, key_header, address or address_header")
    return tuple(parts)


def field_of(name: str, headers: Mapping[bytes, bytes]) -> str:
    """Read a header field; of the addresses that a request came by, the last is what the proxy itself has seen."""
    field = name.lower().encode("latin-1", "replace")
    found = headers.get(field, b"")
    if field == FORWARDED_FOR:
        found = found.rpartition(b",")[2].strip()
    return found.decode("latin-1")


async def check(decider: Decider, query: bytes, headers: Mapping[bytes, bytes], style: str) -> HTTPReply:
    """Decide, and answer by status and header fields."""
    pairs = read_query(query)
    values = dict(pairs)
    if not values.get("policy"):
        raise ProblemError("bad-request", "needs a policy")
    cost, deny = values.get("cost", "1"), values.get("deny", "429")
    if not cost.isdecimal() or not cost.isascii() or len(cost) > MAX_COST_DIGITS:
        raise ProblemError("bad-request", "cost has to be a whole number")
    if deny not in DENIAL_STATUSES:
        raise ProblemError("bad-request", f"deny has to be one of {', '.join(DENIAL_STATUSES)}")
    key = key_of(pairs, headers)
    decision = await decider.acquire(Subject(values["policy"], key if len(key) > 1 else key[0]), int(cost))
    if decision is None:  # pragma: no cover - a policy always decides
        return HTTPReply(200, b"")
    fields = tuple((name.lower().encode(), value.encode()) for name, value in write(decision, cast("Style", style)))
    if decision.allowed:
        return HTTPReply(200, b"", headers=fields)
    body = json.dumps({**problem(decision), "status": int(deny)}).encode()
    return HTTPReply(int(deny), body, PROBLEM_TYPE.encode(), fields)
