"""Byte strings in a store, each written at most once under a key, in as many write-once entries as it needs.

The first entry (see `write_once`) begins with a digest and the length of the data. It decides which of several writers
is first: only that one writes the other entries. A reader checks the digest, so it ignores data that its writer did not
complete. The entries expire by themselves.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from tidegate.core.bounds import SECOND
from tidegate.core.decision import LocalDecision
from tidegate.service.decisions.write_once import (
    NUMBER_BYTES,
    digest_number,
    pack_bytes,
    read_numbers,
    unpack_bytes,
    was_written,
    write_once_policy,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tidegate.core.decision import Decision
    from tidegate.stores import Store

ENTRY_NUMBERS: Final = 30  # of one entry
ENTRY_BYTES: Final = ENTRY_NUMBERS * NUMBER_BYTES
HEAD_BYTES: Final = 2 * NUMBER_BYTES  # the digest and the length of the data
MAX_ENTRIES: Final = 64  # of one byte string
MAX_STORED_BYTES: Final = MAX_ENTRIES * ENTRY_BYTES - HEAD_BYTES
CONCURRENT_READS: Final = 32

StoredKey = tuple[str, ...]


class StoredBytes:
    """Byte strings of one kind in a store."""

    def __init__(self, store: Store, name: str, seconds: float) -> None:
        """Keep them for some seconds, under the policy of this name."""
        self._store = store.unleased
        self._policy = write_once_policy(name, seconds, ENTRY_NUMBERS)

    async def write(self, key: StoredKey, data: bytes) -> bool | None:
        """Write data, unless the key has some; return whether it was written; None while the store is unavailable."""
        if len(data) > MAX_STORED_BYTES:
            raise ValueError(f"{len(data)} bytes are more than {MAX_STORED_BYTES}")
        data = unpack_bytes((digest_number(data), len(data))) + data
        for place, start in enumerate(range(0, len(data), ENTRY_BYTES)):
            numbers = pack_bytes(data[start : start + ENTRY_BYTES], ENTRY_NUMBERS)
            entry = await self._apply("acquire", key, place, (1, *numbers))
            if isinstance(entry, LocalDecision):
                return None
            if place == 0 and was_written(entry):
                return False
        return True

    async def read(self, key: StoredKey, known: Collection[int] = ()) -> bytes | None:
        """Return the data of a key; None if there is none, or if its digest is one of the `known` ones."""
        head = await self._peek(key, 0)
        if isinstance(head, LocalDecision) or not was_written(head):
            return None
        numbers = read_numbers(head)
        digest, size, *_ = numbers
        if digest in known or size > MAX_STORED_BYTES:
            return None
        data = unpack_bytes(numbers)
        for place in range(1, -(-(HEAD_BYTES + size) // ENTRY_BYTES)):
            entry = await self._peek(key, place)
            if isinstance(entry, LocalDecision) or not was_written(entry):
                return None
            data += unpack_bytes(read_numbers(entry))
        data = data[HEAD_BYTES : HEAD_BYTES + size]
        return data if digest_number(data) == digest else None

    async def read_many(self, keys: Sequence[StoredKey]) -> list[bytes | None]:
        """Return the data of each key. Several reads run at once: a store on a network sends them together."""
        found: list[bytes | None] = []
        for start in range(0, len(keys), CONCURRENT_READS):
            found += await asyncio.gather(*(self.read(key) for key in keys[start : start + CONCURRENT_READS]))
        return found

    async def has(self, key: StoredKey) -> bool | None:
        """Return whether a key has data; None while the store is unavailable."""
        head = await self._peek(key, 0)
        return None if isinstance(head, LocalDecision) else was_written(head)

    async def now(self) -> int | None:
        """Return the time by the clock of the store, in seconds since 1970; None while it is unavailable."""
        entry = await self._peek(("clock",), 0)
        return None if isinstance(entry, LocalDecision) else entry.at // SECOND

    async def _peek(self, key: StoredKey, place: int) -> Decision:
        return await self._apply("peek", key, place, (1, *(0,) * ENTRY_NUMBERS))

    async def _apply(self, verb: str, key: StoredKey, place: int, costs: tuple[int, ...]) -> Decision:
        return (await self._store.apply_async(verb, ((self._policy, (*key, f"{place}"), costs),)))[0]
