"""The Redis store: passes calls to the pipelines."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidegate._runtime.fork import abandon, at_fork, fork_safe
from tidegate.errors import Closed
from tidegate.stores._base import Store
from tidegate.stores._merged_asks import merge
from tidegate.stores._redis import driver
from tidegate.stores._redis.address import RedisAddress, read_url
from tidegate.stores._redis.async_cluster import ClusterPipeline
from tidegate.stores._redis.async_pipeline import AsyncPipeline, ServerPipeline
from tidegate.stores._redis.cluster import NO_SERVER, SlotMap
from tidegate.stores._redis.library import SOURCE
from tidegate.stores._redis.protocol import Script, ScriptProtocol
from tidegate.stores._redis.sync_cluster import SyncCluster
from tidegate.stores._redis.sync_pipeline import SyncPipeline, SyncScriptCall
from tidegate.stores._redis.value_steps import ReadPage, ReadValue, WriteValues
from tidegate.stores._values import check_listed, check_name, check_writes

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from tidegate._runtime.clock import Clock
    from tidegate.core._decision import Decision
    from tidegate.stores._base import Ask
    from tidegate.stores._redis.value_steps import ValueStep
    from tidegate.stores._values import Collection, Value, Write


@dataclass
class CallCounts:
    """Counters for `metrics()`. Counted without a lock, so they are approximate."""

    scripts: int = 0
    calls: int = 0
    failures: int = 0
    refunded: int = 0
    refunds_failed: int = 0

    def count_sent(self, scripts: Sequence[Script]) -> None:
        """Count scripts and the calls in them."""
        self.scripts += len(scripts)
        self.calls += sum([len(script.calls) for script in scripts])


class RedisStore(Store):
    """Keeps states in Redis or Valkey, for any number of processes, by the server's clock.

    A call with any number of limits and keys takes one round trip; concurrent calls share one. If the server is silent
    for `timeout` seconds while a reply is due, or does not accept a connection within `connect_timeout`, the call
    raises StoreUnavailable; it may have been charged, and is not repeated. The time that calls wait for earlier ones
    does not count. For tests, `clock` replaces the server's clock.
    """

    decides_alternatives = True
    keeps_values = True

    def __init__(
        self, address: RedisAddress | None = None, *, clock: Clock | None = None, source: bytes = SOURCE
    ) -> None:
        """Connect with the first call. `source` replaces core.lua in mutation tests."""
        super().__init__(clock)
        self.address: RedisAddress = address or RedisAddress()
        self._manual_clock = clock is not None
        slot = driver.key_slot if self.address.kind == "cluster" else None
        self.protocol: ScriptProtocol = ScriptProtocol(self.address, self.clock, slot, source)
        self._counts = CallCounts()
        self._lock = fork_safe(threading.Lock())
        self._closed = False
        at_fork(child=self._reset_after_fork)
        self._start()

    def _start(self) -> None:
        self._slot_map = SlotMap(self.address)  # of a cluster
        self._sync_pipeline: SyncPipeline | SyncCluster
        if self.address.kind == "cluster":
            self._sync_pipeline = SyncCluster(self.address, self.protocol, self._counts, self._slot_map)
        else:
            self._sync_pipeline = SyncPipeline(self.address, self.protocol, self._counts)
        self._async_pipelines: dict[asyncio.AbstractEventLoop, AsyncPipeline] = {}

    def _reset_after_fork(self) -> None:
        """Start without connections in a forked process: those of the parent must not be used."""
        abandon(self._sync_pipeline, self._async_pipelines)
        self._start()

    def apply(
        self,
        verb: str,
        asks: Sequence[Ask],
        now: int | None = None,
        at: int | None = None,
        writes: Sequence[Write] = (),
    ) -> list[Decision]:
        """Apply the verb to every key together."""
        values = _written(writes) if writes else None
        if not asks and values is None:
            return []
        if now is None and self._manual_clock:
            now = self.clock.ns() // 1000
        if len(asks) == 1:
            return self._sync_pipeline.ask(SyncScriptCall(verb, asks, now, at, values))
        merged = merge(asks)
        return merged.split(self._sync_pipeline.ask(SyncScriptCall(verb, merged.asks, now, at, values)))

    async def apply_async(
        self,
        verb: str,
        asks: Sequence[Ask],
        now: int | None = None,
        at: int | None = None,
        writes: Sequence[Write] = (),
    ) -> list[Decision]:
        """Apply without blocking the event loop; the charge of a cancelled call without writes is refunded."""
        values = _written(writes) if writes else None
        if not asks and values is None:
            return []
        if now is None and self._manual_clock:
            now = self.clock.ns() // 1000
        if len(asks) == 1:
            return await self._pipeline().ask(verb, asks, now, at, values).wait()
        merged = merge(asks)
        return merged.split(await self._pipeline().ask(verb, merged.asks, now, at, values).wait())

    def key_slots(self, asks: Sequence[Ask]) -> Sequence[int]:
        """Return the slot of the key of each ask: several in a cluster, otherwise one."""
        return [self.protocol.first_slot((ask,), ()) for ask in asks]

    def get_value(self, collection: Collection, name: str, now: int | None = None) -> Value | None:
        """Read a value."""
        check_name(collection, name)
        self._read(read := ReadValue(collection, name), now)
        return read.found

    async def get_value_async(self, collection: Collection, name: str, now: int | None = None) -> Value | None:
        """Do what `get_value` does, without blocking the event loop."""
        check_name(collection, name)
        await self._read_async(read := ReadValue(collection, name), now)
        return read.found

    def list_values(self, collection: Collection, now: int | None = None) -> dict[str, Value]:
        """Read all values of a listed collection, page by page."""
        check_listed(collection)
        self._read(page := ReadPage(collection), now)
        found = page.found
        while page.cursor is not None:
            self._read(page := ReadPage(collection, page.cursor), now)
            found |= page.found  # a value may be read twice
        return found

    async def list_values_async(self, collection: Collection, now: int | None = None) -> dict[str, Value]:
        """Do what `list_values` does, without blocking the event loop."""
        check_listed(collection)
        await self._read_async(page := ReadPage(collection), now)
        found = page.found
        while page.cursor is not None:
            await self._read_async(page := ReadPage(collection, page.cursor), now)
            found |= page.found
        return found

    def _read(self, read: ValueStep, now: int | None) -> None:
        if now is None and self._manual_clock:
            now = self.clock.ns() // 1000
        self._sync_pipeline.ask(SyncScriptCall("peek", (), now, None, read))

    async def _read_async(self, read: ValueStep, now: int | None) -> None:
        if now is None and self._manual_clock:
            now = self.clock.ns() // 1000
        await self._pipeline().ask("peek", (), now, None, read).wait()

    def _pipeline(self) -> AsyncPipeline:
        loop = asyncio.get_running_loop()
        pipeline = self._async_pipelines.get(loop)
        if pipeline is None:
            with self._lock:
                if self._closed:
                    raise Closed("the store is closed")
                self._async_pipelines = {
                    old: pipeline for old, pipeline in self._async_pipelines.items() if not old.is_closed()
                }
                arguments = (self.address, self.protocol, self._counts, self)
                if self.address.kind == "cluster":
                    pipeline = ClusterPipeline(*arguments, self._slot_map)
                else:
                    pipeline = ServerPipeline(*arguments)
                self._async_pipelines[loop] = pipeline
        return pipeline

    def shard(self, asks: Sequence[Ask], values: Sequence[tuple[Collection, str]] = ()) -> Hashable:
        """Return the server of a cluster that has these keys; NO_SERVER if none has them."""
        if self.address.kind != "cluster":
            return None
        slot = self.protocol.first_slot(asks, values)
        return self._slot_map.owner(slot) or NO_SERVER

    def metrics(self) -> dict[str, int]:
        """Return counters.

        `scripts` (round trips) and the `calls` in them; `failures`; `refunded` and `refunds_failed`: corrections for
        cancelled calls.
        """
        return dict(vars(self._counts))

    def close(self) -> None:
        """Close the connections; those of other event loops are closed as soon as these run."""
        with self._lock:
            self._closed = True
            pipelines = list(self._async_pipelines.items())
            self._async_pipelines.clear()
        self._sync_pipeline.close()
        for loop, pipeline in pipelines:
            if not loop.is_closed():
                loop.call_soon_threadsafe(pipeline.close_soon)

    async def close_async(self) -> None:
        """Close the connections; those of this event loop are closed when it returns."""
        pipeline = self._async_pipelines.pop(asyncio.get_running_loop(), None)
        if pipeline is not None:
            await pipeline.close()
        self.close()


def _written(writes: Sequence[Write]) -> ValueStep:
    check_writes(writes)
    return WriteValues(writes)


def open_redis(url: str, clock: Clock | None) -> Store:
    """Open the store at a URL: `redis://`, `rediss://`, `valkey://`, `redis+cluster://`, `redis+sentinel://`."""
    return RedisStore(read_url(url), clock=clock)
