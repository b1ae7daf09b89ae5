"""Who sent a request: the key it is limited by, remembered for clients that come again."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.inbound.client.address import UNKNOWN, TrustedProxies, address_group, address_key, client_address
from tidegate.policy.key import GroupedKey, normal_key

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from tidegate.inbound.client.address import Headers
    from tidegate.inbound.client.request import KeyOf, Request
    from tidegate.inbound.rules.model import Rules
    from tidegate.policy import Key

log = logging.getLogger("tidegate.inbound")

MAX_CACHED_CLIENTS: Final = 4096  # clients that are remembered, so as not to be worked out for each request


class RequestClient(NamedTuple):
    """Who asks: the key it is limited by, or None if it is not limited; its address."""

    key: Key | None
    address: str | None
    special: bool = False  # exempt or blocked: not the usual way
    blocked: bool = False


class ClientIdentifier:
    """Tells who the client is, by the peer's address or by what trusted proxies say."""

    def __init__(
        self,
        trusted_proxies: TrustedProxies | Iterable[str],
        rules: Rules,
        *,
        ipv6_prefix: int = 64,
        unknown: str = "allow",
        key: KeyOf | None = None,
    ) -> None:
        """Believe these proxies; `unknown` clients are let in (allow) or limited together; `key` chooses other keys."""
        if not isinstance(trusted_proxies, TrustedProxies):
            trusted_proxies = TrustedProxies(trusted_proxies)
        self.trusted = trusted_proxies
        self.ipv6_prefix = ipv6_prefix
        self.lets_unknown_in = unknown == "allow"
        self.own_key = key
        self._warned = False
        self.take_over(rules)

    def take_over(self, rules: Rules) -> None:
        """Go by these lists of clients from now on."""
        self._rules = rules
        # New dictionaries, not emptied ones: a thread that still works by the former rules must not fill these.
        self.known: dict[str | None, RequestClient] = {}
        # Clients by their peer's address, for whoever need not look at headers: nobody, where there are proxies.
        self.direct: dict[str | None, RequestClient] = {} if self.trusted else self.known

    def find(self, peer: str | None, headers: Headers) -> RequestClient:
        """Tell who the client is."""
        if self.trusted:
            peer = client_address(peer, headers, self.trusted)
        known = self.known
        found = known.get(peer)
        if found is None:
            found = self._meet(peer)
            if len(known) >= MAX_CACHED_CLIENTS:
                known.clear()
            known[peer] = found
        return found

    def _meet(self, peer: str | None) -> RequestClient:
        address = peer if self.trusted else client_address(peer)
        if address is None:
            self._warn_unknown()
            return RequestClient(UNKNOWN, None)
        key = address_key(address, self.ipv6_prefix)
        if address in self._rules.blocked_clients:
            return RequestClient(key, address, special=True, blocked=True)
        if address in self._rules.exempt_clients:
            return RequestClient(None, address, special=True)
        return RequestClient(key, address)

    def _warn_unknown(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "requests without a client's address are %s (key 'unknown'): if they come from a proxy over a Unix "
                "socket, trust it: trusted_proxies=['unix']",
                "let in without being limited" if self.lets_unknown_in else "limited together",
            )

    def key_of(self, request: Request, otherwise: Key) -> Key:
        """Tell the key that the application's function chooses; addresses and these never collide."""
        chosen = self.own_key(request) if self.own_key is not None else None
        if chosen is None:
            return otherwise
        return self.made_key(chosen, otherwise)

    def made_key(self, chosen: object, sender: Key) -> Key:
        """Give a key that an application's function has chosen, in the group of whoever has sent the request."""
        chosen = normal_key(chosen)
        key = ("key", chosen) if isinstance(chosen, str) else ("key", *chosen)
        return GroupedKey.of(key, self.group_of(sender))

    def group_of(self, key: Key) -> Hashable | None:
        """Tell the group of a key: the network of an address, or that of the sender of what was made up."""
        if isinstance(key, GroupedKey):
            return key.group
        return address_group(key, self.ipv6_prefix) if isinstance(key, str) else None
