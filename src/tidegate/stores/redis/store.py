"""The Redis store: a thin front over the lines in which calls gather."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidegate.errors import Closed
from tidegate.fork import abandon, at_fork, fork_safe
from tidegate.stores.base import Store, merge
from tidegate.stores.redis import driver
from tidegate.stores.redis.address import RedisAddress, read_url
from tidegate.stores.redis.async_cluster import ClusterPipeline
from tidegate.stores.redis.async_pipeline import AsyncPipeline, ServerPipeline
from tidegate.stores.redis.protocol import SCRIPT, Script, ScriptProtocol
from tidegate.stores.redis.server_watch import ServerWatch
from tidegate.stores.redis.sync_pipeline import SyncPipeline, SyncScriptCall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.clock import Clock
    from tidegate.core.decision import Decision
    from tidegate.stores.base import Ask


@dataclass
class CallCounts:
    """What an operator may want to watch. Counted without a lock: they are telling, not exact."""

    scripts: int = 0
    calls: int = 0
    failures: int = 0
    given_back: int = 0
    not_given_back: int = 0
    server_changes: int = 0
    state_losses: int = 0

    def sent(self, scripts: Sequence[Script]) -> None:
        """Count scripts that decide, and the calls in them."""
        self.scripts += sum(bool(script.groups) for script in scripts)
        self.calls += sum(len(script.groups) for script in scripts)


class RedisStore(Store):
    """Keeps states in Redis or Valkey, for any number of processes, by the server's clock.

    One round trip decides a call, however many limits and keys it has; calls made at the same time share one. A server
    that says nothing for `timeout` seconds while it has something to answer, or cannot be connected to within
    `connect_timeout`, is lost: StoreUnavailable is raised, the charge may or may not have been made, and nothing is
    asked twice. Time that calls wait here for others before them does not count. A clock given here replaces the
    server's: for tests.
    """

    def __init__(
        self, address: RedisAddress | None = None, *, clock: Clock | None = None, source: bytes = SCRIPT
    ) -> None:
        """Connect when first asked. `source` is the script, which tests of tests change."""
        super().__init__(clock)
        self.address = address or RedisAddress()
        self._by_hand = clock is not None
        slot = driver.key_slot if self.address.kind == "cluster" else None
        self.wire = ScriptProtocol(self.address, self.clock, slot, source)
        self._counts = CallCounts()
        self._watch = ServerWatch(self.wire, self._counts)
        self._lock = fork_safe(threading.Lock())
        self._closed = False
        at_fork(child=self._forget)
        self._start()

    def _start(self) -> None:
        self._threads = SyncPipeline(self.address, self.wire, self._counts, self._watch)
        self._loops: dict[asyncio.AbstractEventLoop, AsyncPipeline] = {}

    def _forget(self) -> None:
        """Start without connections in a forked process: those of its parent are not for use."""
        abandon(self._threads, self._loops)
        self._start()

    def apply(self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None) -> list[Decision]:
        """Apply the verb to every key together."""
        if not asks:
            return []
        if now is None and self._by_hand:
            now = self.clock.ns() // 1000
        if len(asks) == 1:
            return self._threads.ask(SyncScriptCall(verb, asks, now, at))
        places, merged = merge(asks)
        decisions = self._threads.ask(SyncScriptCall(verb, merged, now, at))
        return [decisions[place] for place in places]

    async def apply_async(
        self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None
    ) -> list[Decision]:
        """Apply without blocking the event loop; a call whose task is cancelled gives back what it was charged."""
        if not asks:
            return []
        if now is None and self._by_hand:
            now = self.clock.ns() // 1000
        if len(asks) == 1:
            return await self._line().ask(verb, asks, now, at).answered()
        places, merged = merge(asks)
        decisions = await self._line().ask(verb, merged, now, at).answered()
        return [decisions[place] for place in places]

    def _line(self) -> AsyncPipeline:
        loop = asyncio.get_running_loop()
        line = self._loops.get(loop)
        if line is None:
            with self._lock:
                if self._closed:
                    raise Closed("the store is closed")
                self._loops = {old: line for old, line in self._loops.items() if not old.is_closed()}
                kind = ClusterPipeline if self.address.kind == "cluster" else ServerPipeline
                line = self._loops[loop] = kind(self.address, self.wire, self._counts, self._watch, self.wake)
        return line

    def metrics(self) -> dict[str, int]:
        """Count what was sent and what became of it.

        `scripts` and the `calls` in them; `failures`; `given_back` and `not_given_back`: corrections for cancelled
        calls; `server_changes`: the server was restarted, another took its place, or a slot of a cluster has moved;
        `state_losses`: a server has lost what it kept.
        """
        return dict(vars(self._counts))

    def close(self) -> None:
        """Close connections; those of other event loops as soon as these run."""
        with self._lock:
            self._closed = True
            lines = list(self._loops.items())
            self._loops.clear()
        self._threads.close()
        for loop, line in lines:
            if not loop.is_closed():
                loop.call_soon_threadsafe(line.close_soon)

    async def close_async(self) -> None:
        """Close connections, those of this event loop before returning."""
        line = self._loops.pop(asyncio.get_running_loop(), None)
        if line is not None:
            await line.close()
        self.close()


def open_redis(url: str, clock: Clock | None) -> Store:
    """Open the store at a URL: `redis://`, `rediss://`, `valkey://`, `redis+cluster://`, `redis+sentinel://`."""
    return RedisStore(read_url(url), clock=clock)
