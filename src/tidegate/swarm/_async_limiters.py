"""AsyncMemoryLimiter and AsyncSwarmLimiter, for tasks: the methods of `sync_limiters` as coroutines."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from tidegate._limiter.limiter import AsyncLimiter, seconds
from tidegate._limiter.reservation import AsyncReservation, Reserving
from tidegate.errors import Closed
from tidegate.swarm._limited_calls import AsyncLimitedCall
from tidegate.swarm._resources import AgentResources, MemoryResources, SwarmResources

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Generator
    from datetime import timedelta

    from tidegate._policy import Policy
    from tidegate.adaptive import CapacityUpdate, Listener
    from tidegate.core._decision import Decision
    from tidegate.swarm._arguments import Window
    from tidegate.swarm._capacity import Capacity


class _Done:
    """A completed operation that may be awaited."""

    def __await__(self) -> Generator[None, None, None]:
        """Return immediately."""
        return
        yield


class _AsyncLimiter(SwarmResources[AsyncLimiter]):
    """The operations, for tasks."""

    _loop: asyncio.AbstractEventLoop | None = None
    _tasks: set[asyncio.Task[Any]]

    def _open(self, policy: Policy) -> AsyncLimiter:
        return AsyncLimiter(policy, store=self._store, clock=self._clock)

    async def set_capacity(self, resource: str, capacity: int, window: Window) -> None:
        """Allow `capacity` permits per `window`; see `SwarmLimiter.set_capacity`."""
        removed = self._set(resource, capacity, window)
        if removed is not None:
            await removed.limiter.close()

    async def acquire(
        self,
        resource: str,
        *,
        cost: int = 1,
        timeout: float | None = None,  # noqa: ASYNC109 - the deadline is part of the contract
        priority: float = 0,
    ) -> Decision:
        """Wait for a permit, and take it; see `SwarmLimiter.acquire`."""
        entry = self._require(resource)
        if not self._sync.over:
            timeout = await self._join(timeout)
        try:
            decision = await entry.limiter.acquire(resource, cost, timeout, priority)
        except Closed:
            raise self._missing_error(resource) from None
        entry.begin_call()
        return decision

    async def wait_until_synced(
        self,
        timeout: float | None = None,  # noqa: ASYNC109 - as for `acquire`
    ) -> bool:
        """Wait until the state of the bus was read, at most `timeout` seconds; see `SwarmLimiter.wait_until_synced`."""
        synced = await self._sync.wait_async(None if timeout is None else seconds("timeout", timeout))
        if self._closed:
            raise Closed("the limiter is closed")
        return synced

    async def _join(
        self,
        timeout: float | None,  # noqa: ASYNC109 - as for `acquire`
    ) -> float | None:
        """Wait for the state of the bus; returns what is left of the timeout of a call."""
        timeout = None if timeout is None else seconds("timeout", timeout)
        started = self._sync.started()
        await self._sync.wait_async(self._sync.bounded(timeout))
        return self._after_join(timeout, started)

    async def try_acquire(self, resource: str, *, cost: int = 1) -> bool:
        """Take a permit if one is free; returns whether it did, never waits."""
        entry = self._find(resource)
        try:
            if entry is None or not await entry.limiter.try_acquire(resource, cost):
                return False
        except Closed:
            return False
        entry.begin_call()
        return True

    async def release(self, resource: str, *, cost: int = 1, return_token: bool = True) -> None:
        """End a call and return its permit to the bucket; see `SwarmLimiter.release`."""
        entry = self._find(resource)
        if entry is not None and entry.end_call() and return_token:
            with suppress(Closed):  # the resource was removed at the same time
                await entry.limiter.refund(resource, cost)

    def reserve(
        self, resource: str, *, cost: int = 1, ttl: float = 60.0, timeout: float | None = 0.0, priority: float = 0
    ) -> Reserving[AsyncReservation]:
        """Charge an estimate now and settle it later: await it, or use it in `async with`; see `Limiter.reserve`."""
        return Reserving(lambda: self._reserve(resource, cost, ttl, timeout, priority))

    async def _reserve(
        self,
        resource: str,
        cost: int,
        ttl: float,
        timeout: float | None,  # noqa: ASYNC109 - as above
        priority: float,
    ) -> AsyncReservation:
        entry = self._require(resource)
        if not self._sync.over and timeout != 0:
            timeout = await self._join(timeout)
        try:
            reservation = await entry.limiter.reserve(resource, cost, ttl, timeout, priority)
        except Closed:
            raise self._missing_error(resource) from None
        entry.track(reservation)
        return reservation

    def limited(
        self,
        resource: str | Callable[..., str],
        *,
        cost: int | Callable[..., int] = 1,
        timeout: float | None = None,
        return_token: bool = False,
        announce: bool = True,
    ) -> AsyncLimitedCall:
        """Wait for a permit before a block (`async with`) or each call of a coroutine function (as a decorator)."""
        return AsyncLimitedCall(self, resource, timeout, cost, return_token=return_token, announce=announce)

    async def announce_reduced(
        self,
        resource: str,
        reason: str = "",
        *,
        retry_after: float | timedelta | str | None = None,
        began: float | None = None,
    ) -> CapacityUpdate | None:
        """Reduce a resource for all agents. With `retry_after`, no agent makes calls for that time.

        `retry_after` is a number of seconds, a timedelta, or the string of a Retry-After field (seconds or a date).
        `began` is the `time.monotonic()` at which the refused call began. If that was before the latest reduction took
        effect here, the refusal has the same cause and reduces no further. Returns None if it did not reduce, and
        after `close`.
        """
        return self._reduce(resource, reason, retry_after, began)

    async def get_capacity(self, resource: str) -> Capacity | None:
        """Return the state of a resource; None if no capacity is set."""
        entry = self._find(resource)
        if entry is None:
            return None
        try:
            usage = await entry.limiter.usage(resource)
        except Closed:
            return None
        return self._capacity(entry, usage["capacity"].remaining)

    def on_capacity_change(self, callback: Listener) -> Awaitable[None]:
        """Call a function or coroutine function with each CapacityUpdate that took effect here.

        It is called in the event loop that registers it. The result of this method need not be awaited.
        """
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        self._add_listener(callback)
        return _Done()

    def _call(self, listener: Listener, update: CapacityUpdate) -> None:
        try:
            here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if self._loop is None or self._loop is here:
            self._run(listener, update)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._run, listener, update)

    def _run(self, listener: Listener, update: CapacityUpdate) -> None:
        result = listener(update)
        if inspect.iscoroutine(result):
            self._start(result)

    def _start(self, work: Coroutine[Any, Any, Any]) -> None:
        tasks = self.__dict__.setdefault("_tasks", set())
        task = asyncio.ensure_future(work)
        tasks.add(task)  # the loop keeps only weak references
        task.add_done_callback(tasks.discard)

    async def close(self) -> None:
        """Refuse further calls and wake waiters with Closed. A second call raises Closed."""
        for resource in self._close():
            await resource.limiter.close()
        await self._store.close_async()

    async def __aenter__(self) -> Self:
        """Close at the end of the block."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close, unless it is already closed."""
        if not self._closed:
            await self.close()


class AsyncMemoryLimiter(_AsyncLimiter, MemoryResources[AsyncLimiter]):
    """Token buckets in this process, for tasks; see MemoryLimiter."""


class AsyncSwarmLimiter(_AsyncLimiter, AgentResources[AsyncLimiter]):
    """An agent's buckets, for tasks: same as SwarmLimiter, with coroutines."""
