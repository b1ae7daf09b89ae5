"""Who may call: a caller has a token, the providers that it may use, limits of its own and a highest priority.

The token is sent where the key of the provider would be, so that an SDK needs no further setting. It never leaves the
gateway: it is compared by its hash, and removed from what is sent.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote_plus

from tidegate.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from tidegate.core import Limit

LOCAL_CALLER: Final = "local"  # the name of every caller if none is configured
DEFAULT_CALLER_CONNECTIONS: Final = 1000
OWN_TOKEN: Final = "X-Tidegate-Token"  # noqa: S105 - the name of a header
PROXY_TOKEN: Final = "Proxy-Authorization"  # noqa: S105 - as above
KEY_HEADERS: Final = ("Authorization", "X-Api-Key", "Api-Key", "X-Goog-Api-Key")
KEY_PARAMETER: Final = "key"  # of Google's APIs
QUERY_KEY = re.compile(r"(?:^|&)key=([^&]*)")


@dataclass(frozen=True)
class EgressCaller:
    """A program, an agent or a team that calls through the gateway.

    `digests` are the hashes of its tokens. None as `providers` means all of them. `limits` are its own, in addition to
    those of the providers. `max_priority` is the highest priority that it may ask for. It may have `connections`
    requests at the same time. `token_file` is the file that its token was read from.
    """

    name: str
    digests: tuple[bytes, ...] = ()
    providers: frozenset[str] | None = None
    limits: tuple[Limit, ...] = ()
    max_priority: float = 0.0
    connections: int = DEFAULT_CALLER_CONNECTIONS
    token_file: Path | None = None

    @property
    def policy(self) -> Policy:
        """The policy of its own limits."""
        return Policy(f"caller:{self.name}", self.limits)

    def may_use(self, provider: str) -> bool:
        """Return whether it may call a provider."""
        return self.providers is None or provider in self.providers


class Identity(NamedTuple):
    """A caller, and the header or parameter that carried its token (None: it needs no token)."""

    caller: EgressCaller
    token_in: str | None


class Callers:
    """All callers, found by token."""

    def __init__(self, callers: Iterable[EgressCaller]) -> None:
        """Index these callers by token; if there are none, every client that can connect is the caller `local`."""
        self.all: tuple[EgressCaller, ...] = tuple(callers)
        self._by_digest = {digest: caller for caller in self.all for digest in caller.digests}
        self._anybody = None if self.all else Identity(EgressCaller(LOCAL_CALLER, max_priority=float("inf")), None)

    def identify(self, headers: Mapping[str, str], raw_path: str) -> Identity | None:
        """Return who sends a request; None: it has no valid token."""
        if self._anybody is not None:
            return self._anybody
        for place, token in find_tokens(headers, raw_path.partition("?")[2]):
            # A lookup by hash takes as long for a token that is nearly right as for any other.
            caller = self._by_digest.get(digest_of(token))
            if caller is not None:
                return Identity(caller, place)
        return None


def digest_of(token: str) -> bytes:
    """Return the hash that identifies a token."""
    return sha256(b"tidegate caller\0" + token.encode("utf-8", "surrogateescape")).digest()


def find_tokens(headers: Mapping[str, str], query: str) -> Iterator[tuple[str, str]]:
    """Yield the places of a request that may hold the caller's token, and what they hold."""
    if (own := headers.get(OWN_TOKEN)) is not None:
        yield OWN_TOKEN, own
    if (proxy := headers.get(PROXY_TOKEN)) is not None:
        for each in _proxy_tokens(proxy):
            yield PROXY_TOKEN, each
    for name in KEY_HEADERS:
        value = headers.get(name)
        if value is not None:
            scheme, _, rest = value.partition(" ")
            yield name, rest.strip() if scheme.lower() == "bearer" else value
    if query and (found := QUERY_KEY.search(query)) is not None:
        yield KEY_PARAMETER, unquote_plus(found[1])


def _proxy_tokens(value: str) -> tuple[str, ...]:
    """Return the tokens of a Proxy-Authorization: `Bearer TOKEN`, or `Basic` with the token as password or user."""
    scheme, _, rest = value.partition(" ")
    if scheme.lower() == "bearer":
        return (rest.strip(),)
    try:
        user, _, password = base64.b64decode(rest.strip(), validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return ()
    return tuple(each for each in (password, user) if each) if scheme.lower() == "basic" else ()


def without_parameters(query: str, names: Iterable[str]) -> str:
    """Return a query string without these parameters."""
    dropped = frozenset(names)
    return "&".join(part for part in query.split("&") if unquote_plus(part.partition("=")[0]) not in dropped)
