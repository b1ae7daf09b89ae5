"""Limits the share of a memory store that one group of keys may take.

Some keys are cheap to invent: one client may own a network of addresses, or send any header. Without a limit, a client
that invents `max_entries` keys fills the store, and all new clients share one bucket.

So a group may add a key only while it has fewer keys than the store has free places (the dynamic threshold of shared
packet buffers, Choudhury and Hahne 1998). One flooding group gets half of the store, two get a third each, n get
1/(n+1) each: the free room is always as large as the largest group. The limit has no effect while the store is less
than half full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Final

from tidegate._policy import Key

if TYPE_CHECKING:
    from collections.abc import Iterable

GroupOf = Callable[[Key], Hashable | None]  # None: the key is in no group

SHARED_KEY_PREFIX: Final = (None,)  # the first part of a key that several keys share


def shared_key(group: Hashable | None) -> Key:
    """Return the key that new keys share, of a group or of all; it equals no real key, whose parts are strings."""
    return (*SHARED_KEY_PREFIX, group)  # type: ignore[return-value]  # see above


class GroupShares:
    """The number of keys of each group."""

    __slots__ = ("_counts", "_group_of")

    def __init__(self, group_of: GroupOf) -> None:
        """Use this function to find the group of a key; it must always return the same group for a key."""
        self._group_of = group_of
        self._counts: Counter[Hashable] = Counter()

    def _group(self, key: Key) -> Hashable | None:
        """Return the group of a key; None for a shared key."""
        return None if key[:1] == SHARED_KEY_PREFIX else self._group_of(key)  # type: ignore[comparison-overlap]  # see shared_key

    def add(self, key: Key) -> None:
        """Count a key."""
        group = self._group(key)
        if group is not None:
            self._counts[group] += 1

    def remove(self, key: Key) -> None:
        """Stop counting a key."""
        group = self._group(key)
        if group is None:
            return
        if self._counts[group] <= 1:
            del self._counts[group]
        else:
            self._counts[group] -= 1

    def find_full_group(self, key: Key, room: int) -> Hashable | None:
        """Return the group of a new key if that group is full, with `room` free places in the store; else None."""
        group = self._group(key)
        return group if group is not None and self._counts[group] >= room else None

    def recount(self, keys: Iterable[Key]) -> None:
        """Count these keys and no others."""
        self._counts = Counter(group for group in map(self._group, keys) if group is not None)
