"""Lists the blocks of all services that share a store. For display only.

A store can look up the state of a given key, but cannot list its keys. So each service writes the blocks that it knows
to the store every `RECORD_SECONDS`, by the clock of the store: as JSON, in write-once entries (see `write_once`) under
its identity in the `ServiceDirectory`. The others read them there, and ask the store whether each block is still in
effect (`Blocks.find_all`). A service also writes the blocks that it has read, so a block stays listed after the service
that made it has ended. Usually all services write the same blocks, so the first entry has a digest, and the rest is
read once for all services. Nothing is read or written while there are no blocks.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from tidegate.clock import TaskSignal
from tidegate.core.bounds import SECOND
from tidegate.core.decision import LocalDecision
from tidegate.errors import ConfigError
from tidegate.policy import normal_key
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
    from collections.abc import Iterable

    from tidegate.core.decision import Decision
    from tidegate.service.decisions.blocks import BlockKey, Blocks
    from tidegate.service.decisions.service_directory import ServiceDirectory
    from tidegate.stores import Store

RECORD_SECONDS: Final = 10
ANNOUNCE_INTERVAL: Final = 5 * SECOND
CACHE_TTL: Final = 2 * SECOND
RECORD_NUMBERS: Final = 10
RECORD_BYTES: Final = RECORD_NUMBERS * NUMBER_BYTES
MAX_RECORDS: Final = 100  # of one service in one period
HEAD_BYTES: Final = 2 * NUMBER_BYTES  # the digest and the length of the JSON
MAX_BYTES: Final = MAX_RECORDS * RECORD_BYTES - HEAD_BYTES  # of the JSON
RECORD_POLICY: Final = write_once_policy("tidegate.blocks", 3.0 * RECORD_SECONDS, RECORD_NUMBERS)


class BlockDirectory:
    """The blocks of the services on one store."""

    def __init__(self, store: Store, services: ServiceDirectory, blocks: Blocks) -> None:
        """List the blocks of these services in addition to those of this service."""
        self._store = store.unleased
        self._clock = self._store.clock
        self._services = services
        self._blocks = blocks
        self._cached: tuple[int, Iterable[BlockKey]] = (0, ())  # until when, in steady time
        self._announced: int | None = None  # the period of the last record
        blocks.find_elsewhere = self.find

    async def run(self) -> None:
        """Write the blocks in each period, until cancelled."""
        signal = TaskSignal()
        while not self._store.instant:
            await self.announce()
            await self._clock.wait_async(signal, self._clock.steady() + ANNOUNCE_INTERVAL)

    async def announce(self) -> None:
        """Write the blocks that the service knows, unless they are written in this period."""
        if not self._blocks.active or (period := await self._period()) in (None, self._announced):
            return
        found = await self._blocks.find_all()
        data = encode_blocks([(each.policy, each.key) for each in found])
        records = [data[start : start + RECORD_BYTES] for start in range(0, len(data), RECORD_BYTES)]
        for place in reversed(range(len(records))):  # the first one last: it shows that the others are written
            numbers = pack_bytes(records[place], RECORD_NUMBERS)
            if isinstance(await self._apply("acquire", period, self._services.identity, place, numbers), LocalDecision):
                return
        self._announced = period

    async def find(self) -> Iterable[BlockKey]:
        """Return the blocks that other services have written; none while the store is unavailable."""
        if self._store.instant or not self._blocks.active:
            return ()
        if self._cached[0] <= self._clock.steady():
            self._cached = (self._clock.steady() + CACHE_TTL, await self._read())
        return self._cached[1]

    async def _read(self) -> Iterable[BlockKey]:
        period = await self._period()
        found: dict[BlockKey, None] = {}
        seen: set[int] = set()
        if period is None:
            return found
        for identity in await self._services.find_others():
            for each in (period, period - 1):
                found |= dict.fromkeys(decode_blocks(await self._read_records(each, identity, seen)))
        return found

    async def _read_records(self, period: int, identity: int, seen: set[int]) -> bytes:
        """Read the JSON that a service has written in a period, unless its digest is in `seen`; add the digest."""
        data, size = b"", 0
        for place in range(MAX_RECORDS):
            entry = await self._apply("peek", period, identity, place, (0,) * RECORD_NUMBERS)
            if isinstance(entry, LocalDecision) or not was_written(entry):
                return b""
            numbers = read_numbers(entry)
            if place == 0:
                digest, size, *_ = numbers
                if digest in seen:
                    return b""
                seen.add(digest)
            data += unpack_bytes(numbers)
            if len(data) >= HEAD_BYTES + size:
                return data[HEAD_BYTES : HEAD_BYTES + size]
        return b""

    async def _period(self) -> int | None:
        """Return the number of the current period, by the clock of the store; None while it is unavailable."""
        entry = await self._apply("peek", "clock", 0, 0, (0,) * RECORD_NUMBERS)
        return None if isinstance(entry, LocalDecision) else entry.at // (RECORD_SECONDS * SECOND)

    async def _apply(
        self, verb: str, period: int | str | None, identity: int, place: int, numbers: tuple[int, ...]
    ) -> Decision:
        key = (f"{period}", f"{identity}", f"{place}")
        return (await self._store.apply_async(verb, ((RECORD_POLICY, key, (1, *numbers)),)))[0]


def encode_blocks(blocks: Iterable[BlockKey]) -> bytes:
    """Write blocks as JSON, in the order of the JSON, as many as fit, after the digest and the length."""
    data = b"["
    for text in sorted(json.dumps(block, separators=(",", ":")).encode() for block in blocks):
        if len(data) + len(text) + 1 > MAX_BYTES:
            break
        data += text + b","
    data = data.removesuffix(b",") + b"]"
    return unpack_bytes((digest_number(data), len(data))) + data


def decode_blocks(data: bytes) -> list[BlockKey]:
    """Read blocks; nothing if the data is not what `encode_blocks` writes."""
    try:
        pairs = json.loads(data) if data else []
        return [(str(policy), normal_key(key)) for policy, key in pairs]
    except (ValueError, TypeError, ConfigError):
        return []
