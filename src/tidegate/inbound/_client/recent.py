"""Recently seen clients of a category: their number, and the clients nearest to a limit.

Used for statistics only, never for decisions: the last decision about each client, for at most `max_entries` clients
(and some more, so that they are evicted several at a time). Clients whose windows have ended are evicted before others.
With a shared store it contains the clients that this process has seen.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate._policy import join_key
from tidegate.core._bounds import SECOND, ceil_div

if TYPE_CHECKING:
    from tidegate._policy import Key
    from tidegate.core._decision import Decision


CHECKED_PER_CLEANUP: Final = 50  # minimum number of clients checked at a time


class ClientNearLimit(NamedTuple):
    """The usage of a client at its tightest limit."""

    key: Key
    limit: str
    quota: int
    remaining: int
    reset: int  # seconds since 1970


class RecentClients:
    """The last decision about each client."""

    __slots__ = ("_last_scan", "_max_kept", "last_decisions", "max_clients")

    def __init__(self, max_clients: int) -> None:
        """Keep at most `max_clients` clients."""
        self.last_decisions: dict[Key, Decision] = {}
        self._last_scan = 0
        self.resize(max_clients)

    def resize(self, max_clients: int) -> None:
        """Change the maximum number of clients."""
        self.max_clients: int = max_clients
        self._max_kept = max_clients + max_clients // 16
        if len(self.last_decisions) > self._max_kept:
            self.evict(self._last_scan)

    def record(self, key: Key, decision: Decision) -> None:
        """Record a decision; evict clients if there are too many."""
        self.last_decisions[key] = decision
        if len(self.last_decisions) > self._max_kept:
            self.evict(decision.at)

    def evict(self, now: int) -> None:
        """Evict clients whose windows have ended, then the oldest: several at once, because finding them takes time."""
        if now - self._last_scan >= SECOND:  # in a flood of clients, not for each eviction
            self._last_scan = now
            self.remove_expired(now)
        for key, _ in self._items(max(0, len(self.last_decisions) - self.max_clients)):
            self.last_decisions.pop(key, None)

    def remove(self, key: Key) -> None:
        """Remove a client."""
        self.last_decisions.pop(key, None)

    def find_key(self, text: str | Key) -> Key:
        """Return the recorded key whose string form is `text`; `text` itself if there is none."""
        for key, _ in self._items():
            if not isinstance(key, str) and join_key(key) == text:
                return key
        return text

    def _items(self, max_clients: int | None = None) -> list[tuple[Key, Decision]]:
        while True:
            try:
                return list(islice(self.last_decisions.items(), max_clients))
            except RuntimeError:  # another thread changed the dictionary
                continue

    def remove_expired(self, now: int) -> int:
        """Remove clients whose windows have ended; return the number of the others."""
        for key, decision in self._items():
            if decision.at + _reset(decision) <= now:
                self.last_decisions.pop(key, None)
        return min(len(self.last_decisions), self.max_clients)

    def check_some(self, now: int, fraction: float) -> None:
        """Check a fraction of the clients, least recently checked first; remove those whose windows have ended."""
        for key, _ in self._items(max(CHECKED_PER_CLEANUP, math.ceil(len(self.last_decisions) * min(1.0, fraction)))):
            decision = self.last_decisions.pop(key, None)
            if decision is not None and decision.at + _reset(decision) > now:
                self.last_decisions.setdefault(key, decision)  # moved to the end, unless recorded again meanwhile

    def nearest_to_limit(self, now: int, max_clients: int) -> list[ClientNearLimit]:
        """Return the clients nearest to a limit, nearest first."""
        self.remove_expired(now)
        found = []
        for key, decision in self._items():
            pairs = zip(decision.policy_limits, decision.views, strict=True)
            limit, (remaining, _, reset) = min(pairs, key=lambda pair: pair[1][0] / max(1, pair[0].burst))
            found.append(
                ClientNearLimit(key, limit.name, limit.quota, max(0, remaining), ceil_div(decision.at + reset, SECOND))
            )
        found.sort(key=share_left)
        return found[:max_clients]


def share_left(near: ClientNearLimit) -> float:
    """Return the share of the limit that the client has left; 0 for a limit of 0."""
    return near.remaining / max(1, near.quota)


def _reset(decision: Decision) -> int:
    return max(view[2] for view in decision.views)
