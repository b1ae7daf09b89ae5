"""Bounds the share of a memory store that one group of keys may take.

Some keys are cheap to make up: one client may own a network of addresses, or send any header. Without a bound, whoever
makes up `max_entries` keys fills the store, and every new client elsewhere shares a bucket with all other new ones.

So a group may have a further key only while it has fewer keys than there is room left (the dynamic threshold of shared
packet buffers, Choudhury and Hahne 1998). One group that floods gets half of the store, two get a third each, n get
1/(n+1) each: there is always as much room left for others as the largest group has. Before the store is half full,
nobody notices anything.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from tidegate.policy import Key

    GroupOf = Callable[[Key], Hashable | None]  # None: the key is in no group


SHARED_KEY_PREFIX: Final = (None,)  # how keys begin that several keys share


def shared_key(group: Hashable | None) -> Key:
    """Give the key that new keys share, those of a group or all; equal to no key, since parts of those are strings."""
    return (*SHARED_KEY_PREFIX, group)  # type: ignore[return-value]  # see above


class GroupShares:
    """Counts the keys of each group."""

    __slots__ = ("_counts", "_group_of")

    def __init__(self, group_of: GroupOf) -> None:
        """Tell groups by this function, which gives the same for a key at all times."""
        self._group_of = group_of
        self._counts: Counter[Hashable] = Counter()

    def _group(self, key: Key) -> Hashable | None:
        """Tell the group of a key; the key that a group's new keys share is in none."""
        return None if key[:1] == SHARED_KEY_PREFIX else self._group_of(key)  # type: ignore[comparison-overlap]  # see shared_key

    def add(self, key: Key) -> None:
        """Count a key."""
        group = self._group(key)
        if group is not None:
            self._counts[group] += 1

    def remove(self, key: Key) -> None:
        """Count a key no longer."""
        group = self._group(key)
        if group is None:
            return
        if self._counts[group] <= 1:
            del self._counts[group]
        else:
            self._counts[group] -= 1

    def crowded(self, key: Key, room: int) -> Hashable | None:
        """Tell the group of a new key if it has no room for it, although the store has room for so many; else None."""
        group = self._group(key)
        return group if group is not None and self._counts[group] >= room else None

    def recount(self, keys: Iterable[Key]) -> None:
        """Count these keys and no others."""
        self._counts = Counter(group for group in map(self._group, keys) if group is not None)
