"""Identifies the client of a request: its address and its rate limit key, cached by address."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from tidegate._policy.key import GroupedKey, normal_key
from tidegate.inbound._client.address import (
    UNKNOWN,
    TrustedProxies,
    address_group,
    address_key,
    client_address,
    forwarding_values,
    is_forwarded,
    parse_address,
)
from tidegate.inbound._client.request import is_async_callable
from tidegate.observe.logs import shown

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from tidegate._policy import Key
    from tidegate.inbound._client.address import Headers
    from tidegate.inbound._client.request import KeyOf, Request
    from tidegate.inbound._rules.model import Rules

log: logging.Logger = logging.getLogger("tidegate.inbound")

RESULTS_KEY: Final = "tidegate.keys"  # of the results of key functions, in the scope or environ of a request
MAX_CACHED_CLIENTS: Final = 4096  # the cache is cleared when it is full


@dataclass(frozen=True, slots=True)
class RequestClient:
    """The client of a request: its rate limit key (None if it is not limited) and its address."""

    key: Key | None
    address: str | None
    special: bool = False  # exempt, blocked or unknown: needs the slow path
    blocked: bool = False


class ClientIdentifier:
    """Identifies clients by the peer's address or by the headers of trusted proxies."""

    def __init__(
        self,
        trusted_proxies: TrustedProxies | Iterable[str],
        rules: Rules,
        *,
        ipv4_prefix: int | None = None,
        ipv6_prefix: int | None = None,
        unknown: str = "allow",
        key: KeyOf | None = None,
    ) -> None:
        """Trust these proxies. `unknown`: "allow" or "limit" clients without an address. `key` chooses custom keys.

        Prefix lengths that are given here take precedence over those of the rules.
        """
        if not isinstance(trusted_proxies, TrustedProxies):
            trusted_proxies = TrustedProxies(trusted_proxies)
        self.trusted = trusted_proxies
        self._ipv4_prefix, self._ipv6_prefix = ipv4_prefix, ipv6_prefix
        self.allows_unknown: bool = unknown == "allow"
        self.key_function = key
        self.awaits_key: bool = is_async_callable(key)
        self._warned = False
        self.watches_headers: bool = True  # until the warning about a forwarding header from an untrusted peer
        self.update_rules(rules)

    def update_rules(self, rules: Rules) -> None:
        """Use the client lists and prefix lengths of these rules from now on."""
        self._rules = rules
        self.ipv4_prefix: int = self._ipv4_prefix or rules.ipv4_prefix
        self.ipv6_prefix: int = self._ipv6_prefix or rules.ipv6_prefix
        # New dictionaries instead of clear(): a thread that still uses the previous rules must not fill the new cache.
        self.cache: dict[str | None, RequestClient] = {}
        # Clients that are not special, by peer address, for lookups without headers; none with trusted proxies.
        self.by_peer: dict[str, RequestClient] = {}
        # Peers that need no warning: trusted ones, and those whose forwarding header was examined.
        self.examined_peers: set[str] = set()

    def find(self, peer: str | None, headers: Headers) -> RequestClient:
        """Return the client of a request."""
        watches = self.watches_headers and peer and peer not in self.examined_peers
        if watches and (headers.__class__ is not list or is_forwarded(headers)):
            self._watch_header(peer, headers)  # type: ignore[arg-type]  # there is a peer
        if self.trusted:
            peer = client_address(peer, headers, self.trusted)
        cache, by_peer = self.cache, self.by_peer
        found = cache.get(peer)
        if found is None:
            found = self._identify(peer)
            if len(cache) >= MAX_CACHED_CLIENTS:
                cache.clear()
                by_peer.clear()
            cache[peer] = found
            if peer is not None and not self.trusted and not found.special:
                by_peer[peer] = found
        return found

    def _identify(self, peer: str | None) -> RequestClient:
        address = peer if self.trusted else client_address(peer)
        if address is None:
            self._warn_unknown()
            return RequestClient(UNKNOWN, None, special=True)
        key = self.key_of(address)
        if address in self._rules.blocked_clients:
            return RequestClient(key, address, special=True, blocked=True)
        if address in self._rules.exempt_clients:
            return RequestClient(None, address, special=True)
        return RequestClient(key, address)

    def _warn_unknown(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "requests without a client address are %s (key 'unknown'); if a proxy sends them over a Unix socket, "
                "set trusted_proxies=['unix']",
                "allowed without limits" if self.allows_unknown else "limited together",
            )

    def _watch_header(self, sender: str, headers: Headers) -> None:
        """Warn once if a peer that is not trusted forwards an address: it may be a proxy, whose clients share a limit.

        A server that has replaced the peer by the address in the header, as uvicorn does, leaves the header as it is.
        """
        found = {} if sender in self.trusted else forwarding_values(headers)
        if found and not any(found.values()):
            return  # a later request of this peer may have one
        if len(self.examined_peers) >= MAX_CACHED_CLIENTS:
            self.examined_peers.clear()
        self.examined_peers.add(sender)
        for name, values in found.items():
            if values and not any(sender in value for value in values):
                self.watches_headers = False
                log.warning(
                    "ignored the header %s from %s, which is not in trusted_proxies: if it is a proxy, all its clients "
                    "share one limit; list its address in trusted_proxies=[…]",
                    name,
                    shown(sender),
                )
                return

    def choose_key(self, request: Request, default: Key) -> Key:
        """Return the key that the application's `key` function chooses, or `default`. Both kinds never collide."""
        chosen = None if self.key_function is None else self._call_key_function(request)
        if chosen is None:
            return default
        return self.make_key(chosen, default)

    def _call_key_function(self, request: Request) -> object:
        """Return what the `key` function returns for a request, which is asked once."""
        results = key_results(request.mapping)
        if id(self) not in results:
            assert self.key_function is not None  # noqa: S101 - the caller checks it
            results[id(self)] = self.key_function(request)
        return results[id(self)]

    async def await_key_function(self, request: Request) -> None:
        """Call a `key` that is a coroutine function; `choose_key` then uses its result."""
        results = key_results(request.mapping)
        if id(self) not in results:
            assert self.key_function is not None  # noqa: S101 - the caller checks it
            results[id(self)] = await self.key_function(request)  # type: ignore[misc]  # a coroutine function

    def choose_client(self, request: Request, client: RequestClient) -> RequestClient:
        """Return a client with the key that `choose_key` returns."""
        if self.key_function is None or client.key is None:
            return client
        return replace(client, key=self.choose_key(request, client.key))

    def make_key(self, chosen: object, sender: Key) -> Key:
        """Build a custom key in the group of the sender's key; a number or UUID becomes a string."""
        if not isinstance(chosen, (str, GroupedKey)):
            chosen = tuple(map(key_text, chosen)) if isinstance(chosen, (tuple, list)) else key_text(chosen)
        chosen = normal_key(chosen)
        key = ("key", chosen) if isinstance(chosen, str) else ("key", *chosen)
        return GroupedKey.of(key, self.group_of(sender))

    def group_of(self, key: Key) -> Hashable | None:
        """Return the group of a key: the network of an address, or for custom keys the network of the sender."""
        if isinstance(key, GroupedKey):
            return key.group
        return address_group(key, self.ipv6_prefix, self.ipv4_prefix) if isinstance(key, str) else None

    def key_of(self, address: str | None) -> str:
        """Return the key of an address; `unknown` without one."""
        return address_key(address, self.ipv6_prefix, self.ipv4_prefix)

    def name_of(self, client: str) -> str:
        """Return the key of a client that an administrator names: of an address its key, otherwise the name itself."""
        return self.key_of(client) if parse_address(client) else client


def key_results(mapping: Any) -> dict[int, object]:  # noqa: ANN401 - a scope, an environ or a request
    """Return what the key functions have returned for a request, by the id of the limit or middleware.

    So each is called once per request, even if a first attempt to decide needs a second one.
    """
    found: dict[int, object] | None = mapping.get(RESULTS_KEY)
    if found is None:
        found = mapping[RESULTS_KEY] = {}
    return found


def key_text(part: object) -> object:
    """Return a part of a custom key; the id of a user, an integer or UUID, as a string."""
    return str(part) if isinstance(part, (int, UUID)) and not isinstance(part, bool) else part
