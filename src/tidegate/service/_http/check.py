"""`/v1/check`: a decision as a status code, for proxies that ask before they forward a request.

    /v1/check?policy=api&address=203.0.113.9             the proxy writes its client's address into the query
    /v1/check?policy=api&address_header=x-real-ip        ... or names the header field that holds it
    /v1/check?policy=api&key_header=x-api-key            a key that is not an address (`key`: in the query)
    /v1/check?policy=api&address=203.0.113.9&deny=403    for nginx, which treats a 429 of its subrequest as an error

200: forward the request; 429 (or `deny`): refuse it. An IPv6 client usually has a whole /64 network, so an IPv6 address
is counted by its /64. A value that a client chooses belongs in a header field: in the query, the client could append
parameters to it, so a duplicate parameter is refused.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import parse_qsl

from tidegate.headers import PROBLEM_TYPE, Style, problem, write
from tidegate.inbound._client.address import address_key, parse_address
from tidegate.service._api.fields import MAX_SHOWN_NAME, suggest
from tidegate.service._api.problems import HTTPReply, ProblemError
from tidegate.service._decisions.policy_limiters import ASK_STORE, Subject

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidegate.core._decision import Decision
    from tidegate.service._decisions.decider import Decider
    from tidegate.service._http.request_head import Running

REPEATABLE_PARAMETERS: Final = ("key", "key_header", "address", "address_header")  # parts of a key, in order
PARAMETERS: Final = ("policy", *REPEATABLE_PARAMETERS, "cost", "deny")
METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")  # a proxy may use its client's
DENIAL_STATUSES: Final = ("401", "403", "429", "503")
MAX_PARAMETERS: Final = 20  # parameters
FORWARDED_FOR: Final = b"x-forwarded-for"
MAX_COST_DIGITS: Final = 16


def read_query(query: bytes) -> list[tuple[str, str]]:
    """Read the query; refuse unknown and duplicate parameters."""
    try:
        text = query.decode("ascii")
        # Strict decoding: otherwise all keys that are not UTF-8 would become the same key.
        pairs = parse_qsl(
            text, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=MAX_PARAMETERS, errors="strict"
        )
    except ValueError as error:
        raise ProblemError("bad-request", f"invalid query: {error}") from None
    seen = set()
    for name, _ in pairs:
        if name not in PARAMETERS:
            raise ProblemError(
                "bad-request", f"unknown parameter {name[:MAX_SHOWN_NAME]!r}: {suggest(name, PARAMETERS)}"
            )
        if name in seen and name not in REPEATABLE_PARAMETERS:
            raise ProblemError("bad-request", f"duplicate parameter {name!r}")
        seen.add(name)
    return pairs


def read_key(pairs: list[tuple[str, str]], headers: Mapping[bytes, bytes]) -> tuple[str, ...]:
    """Build the key, in the order of the query; refuse a missing header field, which clients would share as a key."""
    parts = []
    for name, value in pairs:
        if name not in REPEATABLE_PARAMETERS:
            continue
        found = read_header(value, headers) if name.endswith("_header") else value
        if not found:
            empty = (
                f"the header field {value[:50]!r} is missing or empty"
                if name.endswith("_header")
                else "the value is empty"
            )
            raise ProblemError("bad-request", f"{name}: {empty}, so there is no key")
        if name.startswith("address"):
            if parse_address(found) is None:
                raise ProblemError("bad-request", f"{name}: expected an IP address, not {found[:50]!r}")
            found = address_key(found)
        parts.append(found)
    if not parts:
        raise ProblemError("bad-request", "missing key: expected key, key_header, address or address_header")
    return tuple(parts)


def read_header(name: str, headers: Mapping[bytes, bytes]) -> str:
    """Read a header field; of X-Forwarded-For, only the last address, which the proxy itself added."""
    field = name.lower().encode("latin-1", "replace")
    found = headers.get(field, b"")
    if field == FORWARDED_FOR:
        found = found.rpartition(b",")[2].strip()
    return found.decode("latin-1")


def check(decider: Decider, query: bytes, headers: Mapping[bytes, bytes], style: str) -> HTTPReply | Running:
    """Decide, and return the status and the header fields."""
    pairs = read_query(query)
    values = dict(pairs)
    if not values.get("policy"):
        raise ProblemError("bad-request", "missing parameter 'policy', as in ?policy=api&key=bob")
    cost, deny = values.get("cost", "1"), values.get("deny", "429")
    if not cost.isdecimal() or not cost.isascii() or len(cost) > MAX_COST_DIGITS:
        raise ProblemError("bad-request", f"cost: expected an integer of at least 0, not {cost[:50]!r}")
    if deny not in DENIAL_STATUSES:
        raise ProblemError("bad-request", f"deny: expected one of {', '.join(DENIAL_STATUSES)}, not {deny[:50]!r}")
    key = read_key(pairs, headers)
    subject = Subject(values["policy"], key if len(key) > 1 else key[0])
    decision: Any = decider.acquire_now(subject.policy, subject.key, int(cost))
    if decision is ASK_STORE:
        return check_later(decider, subject, int(cost), deny, style)
    return write_reply(decision, deny, style)


async def check_later(decider: Decider, subject: Subject, cost: int, deny: str, style: str) -> HTTPReply:
    """Decide with a store that has to be awaited."""
    return write_reply(await decider.acquire(subject, cost), deny, style)


def write_reply(decision: Decision | None, deny: str, style: str) -> HTTPReply:
    """Write a decision as a status and header fields."""
    if decision is None:  # pragma: no cover - a policy always decides
        return HTTPReply(200, b"")
    fields = tuple((name.lower().encode(), value.encode()) for name, value in write(decision, cast("Style", style)))
    if decision.allowed:
        return HTTPReply(200, b"", headers=fields)
    body = json.dumps({**problem(decision), "status": int(deny)}).encode()
    return HTTPReply(int(deny), body, PROBLEM_TYPE.encode(), fields)
