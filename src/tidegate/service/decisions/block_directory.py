"""Lists the blocks of all services that share a store. For display only.

A store can look up the state of a given key, but cannot list its keys. So each service writes the blocks that it knows
to the store every `RECORD_SECONDS`, by the clock of the store: as JSON (see `stored_bytes`), under its identity in the
`ServiceDirectory`. The others read them there, and ask the store whether each block is still in effect
(`Blocks.find_all`). A service also writes the blocks that it has read, so a block stays listed after the service that
made it has ended. Usually all services write the same blocks, so data with a known digest is not read again. Nothing is
read or written while there are no blocks.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from tidegate.clock import TaskSignal
from tidegate.core.bounds import SECOND
from tidegate.errors import ConfigError
from tidegate.policy import normal_key
from tidegate.service.decisions.stored_bytes import MAX_STORED_BYTES, StoredBytes
from tidegate.service.decisions.write_once import digest_number

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidegate.service.decisions.blocks import BlockKey, Blocks
    from tidegate.service.decisions.service_directory import ServiceDirectory
    from tidegate.stores import Store

RECORD_SECONDS: Final = 10
ANNOUNCE_INTERVAL: Final = 5 * SECOND
CACHE_TTL: Final = 2 * SECOND


class BlockDirectory:
    """The blocks of the services on one store."""

    def __init__(self, store: Store, services: ServiceDirectory, blocks: Blocks) -> None:
        """List the blocks of these services in addition to those of this service."""
        self._store = store.unleased
        self._clock = self._store.clock
        self._stored = StoredBytes(store, "tidegate.blocks", 3.0 * RECORD_SECONDS)
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
        """Write the blocks that the service knows, unless that was done before in this period."""
        if not self._blocks.active or (period := await self._period()) in (None, self._announced):
            return
        found = await self._blocks.find_all()
        data = encode_blocks([(each.policy, each.key) for each in found])
        if await self._stored.write(self._key(period, self._services.identity), data) is not None:
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
                data = await self._stored.read(self._key(each, identity), seen)
                if data is not None:
                    seen.add(digest_number(data))
                    found |= dict.fromkeys(decode_blocks(data))
        return found

    async def _period(self) -> int | None:
        """Return the number of the current period, by the clock of the store; None while it is unavailable."""
        now = await self._stored.now()
        return None if now is None else now // RECORD_SECONDS

    @staticmethod
    def _key(period: int | None, identity: int) -> tuple[str, str]:
        return f"{period}", f"{identity}"


def encode_blocks(blocks: Iterable[BlockKey]) -> bytes:
    """Write blocks as JSON, in the order of the JSON, as many as fit."""
    data = b"["
    for text in sorted(json.dumps(block, separators=(",", ":")).encode() for block in blocks):
        if len(data) + len(text) + 1 > MAX_STORED_BYTES:
            break
        data += text + b","
    return data.removesuffix(b",") + b"]"


def decode_blocks(data: bytes) -> list[BlockKey]:
    """Read blocks; nothing if the data is not what `encode_blocks` writes."""
    try:
        pairs = json.loads(data) if data else []
        return [(str(policy), normal_key(key)) for policy, key in pairs]
    except (ValueError, TypeError, ConfigError):
        return []
