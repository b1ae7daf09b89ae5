"""Who may call: a caller has a token, the providers that it may use, limits of its own and a highest priority.

The token is sent where the key of the provider would be, so that an SDK needs no further setting. It never leaves the
gateway: it is compared by its hash, and removed from what is sent.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote_plus

from tidegate._policy import Policy
from tidegate.agents._tokens import OWNER_PREFIX, PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from multidict import CIMultiDictProxy

    from tidegate.core import Limit
    from tidegate.outbound._providers.provider import Provider

LOCAL_CALLER: Final = "local"  # the name of every caller if none is configured
DEFAULT_CALLER_CONNECTIONS: Final = 1000
OWN_TOKEN: Final = "X-Tidegate-Token"  # noqa: S105 - the name of a header
PROXY_TOKEN: Final = "Proxy-Authorization"  # noqa: S105 - as above
RUN: Final = "X-Tidegate-Run"
RUN_PREFIXES: Final = (f"{PREFIX}.", f"{OWNER_PREFIX}.")
KEY_HEADERS: Final = ("Authorization", "X-Api-Key", "Api-Key", "X-Goog-Api-Key")
KEY_PARAMETER: Final = "key"  # of Google's APIs


@dataclass(frozen=True)
class EgressCaller:
    """A program, an agent or a team that calls through the gateway.

    `digests` are the hashes of its tokens. None as `providers` means all of them. `limits` are its own, in addition to
    those of the providers. `max_priority` is the highest priority that it may ask for. It may have `connections`
    requests at the same time. `token_file` is the file that its token was read from. `tags` are those that its calls
    may have; None: any. With `runs`, a request whose token is that of a run, and of no caller, is one of this caller.
    """

    name: str
    digests: tuple[bytes, ...] = ()
    providers: frozenset[str] | None = None
    limits: tuple[Limit, ...] = ()
    max_priority: float = 0.0
    connections: int = DEFAULT_CALLER_CONNECTIONS
    token_file: Path | None = None
    tags: frozenset[str] | None = frozenset()
    runs: bool = False

    @property
    def policy(self) -> Policy:
        """The policy of its own limits."""
        return Policy(f"caller:{self.name}", self.limits)

    def may_use(self, provider: str) -> bool:
        """Return whether it may call a provider."""
        return self.providers is None or provider in self.providers


LOCAL: Final = EgressCaller(LOCAL_CALLER, max_priority=float("inf"), tags=None)


class KeyPlaces(NamedTuple):
    """Header fields and query parameters that may hold a key, and so the token of a caller."""

    headers: tuple[str, ...]
    parameters: tuple[str, ...]


NO_PLACES: Final = KeyPlaces((), ())


class Identity(NamedTuple):
    """A caller, and the places of its request that hold tokens of callers or runs (none: it needs no token).

    `run` is the token of its run.
    """

    caller: EgressCaller
    tokens_in: KeyPlaces
    run: str = ""


class Callers:
    """All callers, found by token."""

    def __init__(self, callers: Iterable[EgressCaller]) -> None:
        """Index these callers by token; if there are none, every client that can connect is the caller `local`."""
        self.all: tuple[EgressCaller, ...] = tuple(callers)
        self._by_digest = {digest: caller for caller in self.all for digest in caller.digests}
        self._anybody = None if self.all else LOCAL
        self._of_runs = next((caller for caller in self.all if caller.runs), None)

    def identify(self, headers: CIMultiDictProxy[str], raw_path: str, places: KeyPlaces) -> Identity | None:
        """Return who sends a request; None: it has no valid token. The first place that holds a token decides."""
        # A lookup by hash takes as long for a token that is nearly right as for any other.
        run = headers.get(RUN, "")
        found: list[tuple[EgressCaller, str, str]] = []
        runs: list[tuple[str, str]] = []
        for kind, place, token in find_tokens(headers, raw_path.partition("?")[2], places):
            if is_of_run(token):
                runs.append((kind, place))
                run = run or token
            elif self._anybody is None and (caller := self._by_digest.get(digest_of(token))) is not None:
                found.append((caller, kind, place))
        caller = self._anybody or (found[0][0] if found else self._of_runs if runs else None)
        if caller is None:
            return None
        held = [(kind, place) for _, kind, place in found] + runs + places_of_runs(headers, raw_path.partition("?")[2])
        if not held and not run:
            return Identity(caller, NO_PLACES)
        fields = tuple(place for kind, place in held if kind == "header")
        return Identity(caller, KeyPlaces(fields, tuple(place for kind, place in held if kind == "query")), run)


def is_of_run(token: str) -> bool:
    """Return whether a token is that of a run, or the key of its creator; it was not verified."""
    return token.startswith(RUN_PREFIXES)


def places_of_runs(headers: CIMultiDictProxy[str], query: str) -> list[tuple[str, str]]:
    """Return all fields and parameters that contain what looks like a token of a run: none of them is sent."""
    found = [("header", name) for name, value in headers.items() if any(prefix in value for prefix in RUN_PREFIXES)]
    for name, _, value in (part.partition("=") for part in query.split("&") if part):
        if any(prefix in unquote_plus(value) for prefix in RUN_PREFIXES):
            found.append(("query", unquote_plus(name)))
    return found


def digest_of(token: str) -> bytes:
    """Return the hash that identifies a token."""
    return sha256(b"tidegate caller\0" + token.encode("utf-8", "surrogateescape")).digest()


def key_places(providers: Iterable[Provider]) -> KeyPlaces:
    """Return where clients of these providers send a key: the usual places, and those of the providers' own keys."""
    fields, parameters = dict.fromkeys(KEY_HEADERS), {KEY_PARAMETER: None}
    known = {name.lower() for name in KEY_HEADERS}
    for provider in providers:
        members = () if provider.pool is None else (member.provider for member in provider.pool.members)
        for location in (each.key_location for each in (provider, *members)):
            if location is None:
                continue
            if location.kind == "query":
                parameters[location.name] = None
            elif location.name.lower() not in known:
                known.add(location.name.lower())
                fields[location.name] = None
    return KeyPlaces(tuple(fields), tuple(parameters))


def find_tokens(headers: CIMultiDictProxy[str], query: str, places: KeyPlaces) -> Iterator[tuple[str, str, str]]:
    """Yield what may be the caller's token: `header` or `query`, the name of the field or parameter, and its value."""
    for own in headers.getall(OWN_TOKEN, ()):
        yield "header", OWN_TOKEN, own
    for proxy in headers.getall(PROXY_TOKEN, ()):
        for each in _credentials(proxy):
            yield "header", PROXY_TOKEN, each
    for name in places.headers:
        for value in headers.getall(name, ()):
            for each in _credentials(value):
                yield "header", name, each
    if query:
        for part in query.split("&"):
            name, _, value = part.partition("=")
            if (decoded := unquote_plus(name)) in places.parameters:
                yield "query", decoded, unquote_plus(value).strip()


def _credentials(value: str) -> tuple[str, ...]:
    """Return the tokens of a field: `TOKEN`, `Bearer TOKEN` (or another scheme), or `Basic` with password or user."""
    scheme, *words = value.split(maxsplit=1)[:2] or [""]
    if not words:
        return (scheme,)
    (rest,) = words
    if scheme.lower() != "basic":
        return (rest.strip(),)
    try:
        user, _, password = base64.b64decode(rest.strip(), validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return ()
    return tuple(each for each in (password, user) if each)


def without_parameters(query: str, names: Iterable[str]) -> str:
    """Return a query string without these parameters."""
    dropped = frozenset(names)
    return "&".join(part for part in query.split("&") if unquote_plus(part.partition("=")[0]) not in dropped)
