"""Limiter for threads and AsyncLimiter for asyncio.

`base_limiter` has the logic that both share. The two classes differ only in how they call the store, sleep and return.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from tidegate._limiter.base_limiter import BaseLimiter, Usage, usage_of
from tidegate._limiter.joint import acquire_flow, async_performer, performer
from tidegate._limiter.limited import AsyncLimited, Limited
from tidegate._limiter.reservation import AsyncReservation, Reservation, Reserving
from tidegate._limiter.waiting import ApplyStep, Denial
from tidegate._policy.key import Key, normal_key
from tidegate._runtime.arguments import check_priority, seconds
from tidegate._runtime.clock import TaskSignal, ThreadSignal
from tidegate._runtime.flow import run, run_async

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tidegate._policy.model import Cost, Policy
    from tidegate.core._decision import Decision
    from tidegate.stores._base import Ask, TryAcquire

    AsyncApply = Callable[..., Awaitable[list[Decision]]]  # as Store.apply_async

__all__ = ["AsyncLimiter", "Limiter", "Usage", "check_priority", "seconds", "usage_of"]


class Limiter(BaseLimiter):
    """A rate limiter for threads. Thread-safe; a context manager that closes itself."""

    def try_acquire(self, key: Key, cost: Cost = 1) -> Decision:
        """Take permits if enough are available; never waits.

        Returns a Decision, allowed or denied. Ignores calls that wait for the key.
        """
        decision: Decision = self._try_acquire(key, cost)
        return decision

    def peek(self, key: Key, cost: Cost = 1) -> Decision:
        """Return the decision that `try_acquire` would return, and change nothing."""
        return self._ask_now("peek", self._make_ask(key, cost))

    def acquire(self, key: Key, cost: Cost = 1, timeout: float | None = None, priority: float = 0) -> Decision:
        """Wait until enough permits are available, and take them.

        Raises Denied after `timeout` seconds, or at once if the cost can never fit. Waiting is fair: calls are served
        by priority (larger is sooner), then in order of arrival, and waiting raises the priority (see
        `_limiter.waiting`).
        """
        return self._acquire("acquire", normal_key(key), cost, timeout, priority)

    def _acquire(self, verb: str, key: Key, cost: Cost, timeout: float | None, priority: float) -> Decision:
        """Ask the store at once, unless other calls wait for the key; if denied, wait in the queue."""
        denied = None
        if self._asks_at_once(key, timeout, priority):
            wakes = self.queues.wakes
            if verb == "acquire":
                decision: Decision = self._try_acquire(key, cost)
            else:
                decision = self._ask_now(verb, self._make_ask(key, cost))
            if decision.allowed:
                return decision
            denied = Denial(decision, self.clock.steady(), wakes, ((self.queues, key),))
        flow = acquire_flow(self._call(key, cost), verb, timeout, priority, ThreadSignal, denied)
        return run(flow, performer(self.clock))

    def reserve(
        self, key: Key, cost: Cost = 1, ttl: float = 60.0, timeout: float | None = 0.0, priority: float = 0
    ) -> Reservation:
        """Charge an estimate now and settle it later: `commit` the actual cost, or `cancel`.

        As a context manager, the reservation commits the estimate at the end of the block, or cancels after an
        exception, unless it was settled before. If it is not settled within `ttl` seconds, the estimate stays charged.
        Waits up to `timeout` seconds, then raises Denied.
        """
        ttl = seconds("ttl", ttl)
        key = normal_key(key)
        return self.make_reservation(key, cost, self._acquire("hold", key, cost, timeout, priority), ttl)

    def make_reservation(self, key: Key, cost: Cost, decision: Decision, ttl: float) -> Reservation:
        """Build the reservation of a cost that was charged by `decision`."""
        return Reservation([self._charge(key, cost, decision)], self.clock, ttl)

    def _settle(self, verb: str, ask: Ask, at: int | None = None) -> None:
        """Correct a charge, and wake the first waiter of its key."""
        self._ask_now(verb, ask, at)
        self.store.wait_queues.wake(ask[1])

    def refund(self, key: Key, cost: Cost = 1) -> None:
        """Refund the most recently taken permits."""
        self._settle("adjust", self._refund_ask(key, cost))

    def release(self, key: Key, cost: Cost = 1, decision: Decision | None = None) -> None:
        """Release slots of concurrency limits: those that `decision` took, or those whose lease ends first."""
        self._settle("adjust", *self._release_ask(key, cost, decision))

    def reset(self, key: Key) -> None:
        """Clear the state of a key."""
        self._settle("reset", self._reset_ask(key))

    def usage(self, key: Key) -> dict[str, Usage]:
        """Return the usage of a key at each limit, by the name of the limit."""
        return usage_of(self._ask_now("peek", self._make_ask(key, {})))

    def limited(
        self,
        key: Key | Callable[..., Key],
        cost: Cost | Callable[..., Cost] = 1,
        timeout: float | None = None,
        priority: float = 0,
    ) -> Limited:
        """Limit a block (`with`) or every call of a function (as a decorator); releases slots at the end.

        As a decorator, `key` and `cost` may be functions of the arguments of the call.
        """
        return Limited(self, key, cost, timeout, priority)

    def close(self) -> None:
        """Reject further calls, wake waiting calls with Closed, and close the store if it was opened from a URL."""
        self.reject_calls()
        self._opened.close()

    def __enter__(self) -> Self:
        """Close at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


def decide_nothing(_key: Key, _cost: Cost) -> None:
    """Leave a call to the store."""


class AsyncLimiter(BaseLimiter):
    """A rate limiter for asyncio tasks: the methods of Limiter as coroutines. An async context manager."""

    for_tasks = True

    def _prepare_try_acquire(self, policy: Policy) -> TryAcquire[Decision | None]:
        """Return what `try_acquire` calls first: None from it means that the store has to be awaited."""
        if self._instant_store or self.queues.closed:
            return super()._prepare_try_acquire(policy)
        if self.observed or self._now is not None:
            return decide_nothing
        return self.store.specialize(policy, decide_nothing)

    async def try_acquire(self, key: Key, cost: Cost = 1) -> Decision:
        """Take permits if enough are available; never waits.

        Returns a Decision, allowed or denied. Ignores calls that wait for the key.
        """
        decision: Decision | None = self._try_acquire(key, cost)
        if decision is None:
            decision = await self._ask("acquire", self._make_ask(key, cost))
        return decision

    async def peek(self, key: Key, cost: Cost = 1) -> Decision:
        """Return the decision that `try_acquire` would return, and change nothing."""
        return await self._ask("peek", self._make_ask(key, cost))

    async def acquire(self, key: Key, cost: Cost = 1, timeout: float | None = None, priority: float = 0) -> Decision:  # noqa: ASYNC109 - the deadline is part of the contract
        """Wait until enough permits are available, and take them; see `Limiter.acquire`."""
        return await self._acquire("acquire", normal_key(key), cost, timeout, priority)

    async def _acquire(
        self,
        verb: str,
        key: Key,
        cost: Cost,
        timeout: float | None,  # noqa: ASYNC109 - as above
        priority: float,
        apply: AsyncApply | None = None,
    ) -> Decision:
        """Ask the store at once, unless other calls wait for the key; `apply` replaces `store.apply_async`."""
        denied = None
        if self._asks_at_once(key, timeout, priority):
            wakes = self.queues.wakes
            decision: Decision | None = None
            if verb == "acquire" and apply is None:
                decision = self._try_acquire(key, cost)
            if decision is None:
                decision = await self._ask(verb, self._make_ask(key, cost), None, apply)
            if decision.allowed:
                return decision
            denied = Denial(decision, self.clock.steady(), wakes, ((self.queues, key),))
        perform: Callable[..., Any] = async_performer(self.clock)
        if apply is not None:
            other = perform
            perform = lambda step: apply(*step.arguments) if isinstance(step, ApplyStep) else other(step)  # noqa: E731 - as above
        return await run_async(
            acquire_flow(self._call(key, cost), verb, timeout, priority, TaskSignal, denied), perform
        )

    def reserve(
        self, key: Key, cost: Cost = 1, ttl: float = 60.0, timeout: float | None = 0.0, priority: float = 0
    ) -> Reserving[AsyncReservation]:
        """Charge an estimate now and settle it later: await it or use it in `async with`; see `Limiter.reserve`."""
        return Reserving(lambda: self._reserve(key, cost, ttl, timeout, priority))

    async def _reserve(
        self,
        key: Key,
        cost: Cost,
        ttl: float,
        timeout: float | None,  # noqa: ASYNC109 - as above
        priority: float,
    ) -> AsyncReservation:
        ttl = seconds("ttl", ttl)
        key = normal_key(key)
        return self.make_reservation(key, cost, await self._acquire("hold", key, cost, timeout, priority), ttl)

    def make_reservation(self, key: Key, cost: Cost, decision: Decision, ttl: float) -> AsyncReservation:
        """Build the reservation of a cost that was charged by `decision`."""
        return AsyncReservation([self._charge(key, cost, decision)], self.clock, ttl)

    async def _settle(self, verb: str, ask: Ask, at: int | None = None) -> None:
        """Correct a charge, and wake the first waiter of its key."""
        await self._ask(verb, ask, at)
        self.store.wait_queues.wake(ask[1])

    async def refund(self, key: Key, cost: Cost = 1) -> None:
        """Refund the most recently taken permits."""
        await self._settle("adjust", self._refund_ask(key, cost))

    async def release(self, key: Key, cost: Cost = 1, decision: Decision | None = None) -> None:
        """Release slots of concurrency limits: those that `decision` took, or those whose lease ends first."""
        await self._settle("adjust", *self._release_ask(key, cost, decision))

    async def reset(self, key: Key) -> None:
        """Clear the state of a key."""
        await self._settle("reset", self._reset_ask(key))

    async def usage(self, key: Key) -> dict[str, Usage]:
        """Return the usage of a key at each limit, by the name of the limit."""
        return usage_of(await self._ask("peek", self._make_ask(key, {})))

    def limited(
        self,
        key: Key | Callable[..., Key],
        cost: Cost | Callable[..., Cost] = 1,
        timeout: float | None = None,
        priority: float = 0,
    ) -> AsyncLimited:
        """Limit a block (`async with`) or every call of a coroutine function (as a decorator)."""
        return AsyncLimited(self, key, cost, timeout, priority)

    async def close(self) -> None:
        """Reject further calls, wake waiting calls with Closed, and close the store if it was opened from a URL."""
        self.reject_calls()
        await self._opened.close_async()

    async def __aenter__(self) -> Self:
        """Close at the end of the block."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.close()

    async def _ask(self, verb: str, ask: Ask, at: int | None = None, apply: AsyncApply | None = None) -> Decision:
        """Ask the store; `apply` replaces `store.apply_async`."""
        if self._instant_store or self.queues.closed:
            return self._ask_now(verb, ask, at)
        decision: Decision = (await (apply or self.store.apply_async)(verb, (ask,), self.current_time(), at))[0]
        return self.observe(verb, ask, decision) if self.observed else decision
