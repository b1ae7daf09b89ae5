"""The values of a store in memory. The caller holds the lock of the store."""

from __future__ import annotations

import heapq
from itertools import count
from typing import TYPE_CHECKING, Final

from tidegate.errors import CollectionFull, ValueConflict
from tidegate.stores._values import MAX_LISTED, Collection, Value, check_writes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.stores._values import Write

MIN_ENDS: Final = 64  # entries of the heap, however few values there are


class MemoryValues:
    """Values by collection and name.

    Each write removes the values that have ended. A heap holds the end of every value that was written; it is built
    again when it has doubled, without the values that were replaced or deleted since.
    """

    __slots__ = ("_collections", "_ends", "_max_ends", "_numbers")

    def __init__(self) -> None:
        """Start without values."""
        self._collections: dict[Collection, dict[str, Value]] = {}
        self._numbers = count()
        self._max_ends = MIN_ENDS
        self._ends: list[tuple[int, int, Collection, str]] = []  # a number decides between equal ends

    def get(self, collection: Collection, name: str, now: int) -> Value | None:
        """Read a value that has not ended."""
        found = self._collections.get(collection, {}).get(name)
        return None if found is None or found.ends <= now else found

    def list(self, collection: Collection, now: int) -> dict[str, Value]:
        """Read all values of a collection that have not ended."""
        return {name: value for name, value in self._collections.get(collection, {}).items() if value.ends > now}

    def check(self, writes: Sequence[Write], now: int) -> None:
        """Raise ValueConflict if a condition does not hold, or CollectionFull."""
        check_writes(writes)
        self._remove_ended(now)
        added: dict[Collection, int] = {}
        for write in writes:
            found = self.get(write.collection, write.name, now)
            if not write.holds(found):
                raise ValueConflict(write, found)
            if write.collection.listed and isinstance(write.data, bytes) and found is None:
                added[write.collection] = new = added.get(write.collection, 0) + 1
                if len(self._collections.get(write.collection, ())) + new > MAX_LISTED:
                    raise CollectionFull(write)

    def write(self, writes: Sequence[Write], now: int) -> None:
        """Write values that were checked."""
        for collection, name, data, ttl, _ in writes:
            if data is None:
                self._delete(collection, name)
            elif isinstance(data, bytes):
                self._collections.setdefault(collection, {})[name] = Value(data, now, now + ttl)
                heapq.heappush(self._ends, (now + ttl, next(self._numbers), collection, name))
        if len(self._ends) > self._max_ends:
            self._ends = [
                (value.ends, next(self._numbers), collection, name)
                for collection, values in self._collections.items()
                for name, value in values.items()
            ]
            heapq.heapify(self._ends)
            self._max_ends = 2 * len(self._ends) + MIN_ENDS

    def _remove_ended(self, now: int) -> None:
        while self._ends and self._ends[0][0] <= now:
            ends, _, collection, name = heapq.heappop(self._ends)
            found = self._collections.get(collection, {}).get(name)
            if found is not None and found.ends == ends:
                self._delete(collection, name)

    def _delete(self, collection: Collection, name: str) -> None:
        values = self._collections.get(collection)
        if values is not None:
            values.pop(name, None)
            if not values:
                self._collections.pop(collection, None)

    def __len__(self) -> int:
        """Return the number of values, with those that have ended and were not removed yet."""
        return sum(map(len, self._collections.values()))
