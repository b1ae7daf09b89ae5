"""Clients that an administrator has blocked or exempted for a limited time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate._policy.key import show_key
from tidegate.errors import ConfigError
from tidegate.inbound._client.address import AddressSet, parse_address

if TYPE_CHECKING:
    from tidegate._policy import Key

MAX_CLIENTS: Final = 10_000
MAX_NETWORKS: Final = 100  # every request is compared with each of them


class TemporaryList:
    """A list of clients with expiry times: by address, by network, or by key as shown in the statistics."""

    __slots__ = ("_networks", "_until")

    def __init__(self) -> None:
        """Start empty."""
        self._until: dict[str, int] = {}
        self._networks: dict[str, AddressSet] = {}

    def add(self, name: str, until: int, now: int) -> None:
        """Add a client until a time; `name` is its key as a string, or a network."""
        self.remove_expired(now)
        if len(self._until) >= MAX_CLIENTS and name not in self._until:
            raise ConfigError(f"the list is full: it holds at most {MAX_CLIENTS} clients", field="key")
        if "/" in name and parse_address(name.partition("/")[0]):
            if len(self._networks) >= MAX_NETWORKS and name not in self._networks:
                raise ConfigError(
                    f"the list is full: it holds at most {MAX_NETWORKS} networks; use the file", field="key"
                )
            self._networks[name] = AddressSet([name], field="key")
        self._until[name] = until

    def remove(self, name: str) -> bool:
        """Remove a client; return whether it was listed."""
        self._networks.pop(name, None)
        return self._until.pop(name, None) is not None

    def expires_at(self, key: Key, address: str | None, now: int) -> int | None:
        """Return when the entry of a client expires; None if it is not listed."""
        name = show_key(key)
        ends = [self._until.get(name, 0)]
        ends += [
            self._until.get(name, 0)
            for name, network in tuple(self._networks.items())
            if address and address in network
        ]
        latest = max(ends)
        return latest if latest > now else None

    def remove_expired(self, now: int) -> None:
        """Remove expired entries."""
        for name, until in tuple(self._until.items()):
            if until <= now:
                self._until.pop(name, None)
                self._networks.pop(name, None)

    def expiry_times(self, now: int) -> dict[str, int]:
        """Return the expiry time of each entry, in seconds since 1970."""
        self.remove_expired(now)
        return {name: -(-until // 1_000_000) for name, until in self._until.items()}

    def clear(self) -> None:
        """Remove all entries."""
        self._until.clear()
        self._networks.clear()

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._until)
