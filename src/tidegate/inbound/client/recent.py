"""Whom a category has met lately: how many clients, and who is near the limit.

A note, not a count that anything is decided by: the last decision about each client, for as many as the store may keep.
With a store that is shared, it knows the clients that this process has met.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core.bounds import SECOND, ceil_div
from tidegate.policy import join_key

if TYPE_CHECKING:
    from tidegate.core.decision import Decision
    from tidegate.policy import Key


CHECKED_PER_CLEANUP: Final = 50  # clients that are looked at each time, if there are so many


class ClientNearLimit(NamedTuple):
    """How a client stands at the limit that it has used most of."""

    key: Key
    limit: str
    quota: int
    remaining: int
    reset: int  # seconds since 1970


class RecentClients:
    """The last decision about each client."""

    __slots__ = ("most", "seen")

    def __init__(self, most: int) -> None:
        """Remember at most so many."""
        self.seen: dict[Key, Decision] = {}
        self.most = most

    def resize(self, most: int) -> None:
        """Remember so many from now on."""
        self.most = most
        if len(self.seen) > most:
            self.drop()

    def note(self, key: Key, decision: Decision) -> None:
        """Remember the decision; the one noted first goes when there are too many."""
        self.seen[key] = decision
        if len(self.seen) > self.most:
            self.drop()

    def drop(self) -> None:
        """Forget some of those who were noted first: several at once, since looking for the first takes time."""
        for key, _ in self._items(max(1, len(self.seen) - self.most, self.most // 16)):
            self.seen.pop(key, None)

    def forget(self, key: Key) -> None:
        """Forget a client."""
        self.seen.pop(key, None)

    def find(self, text: str | Key) -> Key:
        """Find the key that is written so; one that is not known stands for itself."""
        for key, _ in self._items():
            if not isinstance(key, str) and join_key(key) == text:
                return key
        return text

    def _items(self, most: int | None = None) -> list[tuple[Key, Decision]]:
        while True:
            try:
                return list(islice(self.seen.items(), most))
            except RuntimeError:  # another thread has noted somebody meanwhile
                continue

    def clean(self, now: int) -> int:
        """Forget whoever has nothing left to remember; tell how many stay."""
        for key, decision in self._items():
            if decision.at + _reset(decision) <= now:
                self.seen.pop(key, None)
        return len(self.seen)

    def sweep(self, now: int, part: float) -> None:
        """Look at a part of the clients, those not looked at for longest, and forget whose windows are over."""
        for key, _ in self._items(max(CHECKED_PER_CLEANUP, math.ceil(len(self.seen) * min(1.0, part)))):
            decision = self.seen.pop(key, None)
            if decision is not None and decision.at + _reset(decision) > now:
                self.seen.setdefault(key, decision)  # at the end, unless it was noted again meanwhile

    def near(self, now: int, most: int) -> list[ClientNearLimit]:
        """Tell who is nearest to a limit, nearest first."""
        self.clean(now)
        found = []
        for key, decision in self._items():
            pairs = zip(decision[2], decision.views, strict=True)
            limit, (remaining, _, reset) = min(pairs, key=lambda pair: pair[1][0] / pair[0].burst)
            found.append(
                ClientNearLimit(key, limit.name, limit.quota, remaining, ceil_div(decision.at + reset, SECOND))
            )
        found.sort(key=lambda near: near.remaining / near.quota)
        return found[:most]


def _reset(decision: Decision) -> int:
    return max(view[2] for view in decision.views)
