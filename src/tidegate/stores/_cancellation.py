"""Refunds the charge of a call whose task was cancelled, in the same way for every store.

A decision charges when it is made, but a cancelled task never reads it. So every store guarantees:

- A call that has not been sent yet is not sent (`Verb.asks`). Corrections and resets are sent anyway.
- A call that has been sent continues in the background, and the cancelled task ends at once. When the reply arrives,
  the charge is corrected (`corrections`), and waiters of the key are woken.
- A call whose reply is lost may have been charged. It is not refunded, because a wrong refund would over-admit.
- A correction whose reply is lost is passed on (`report_lost`): during an outage, its charges are made afterwards.

Closing a store waits for these background tasks, for `MAX_CLOSING` seconds at most.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from tidegate.core._bounds import SECOND
from tidegate.core._decision import VERBS
from tidegate.errors import RateLimitError, StoreUnavailable
from tidegate.stores._base import decided_asks
from tidegate.stores._merged_asks import merge
from tidegate.stores._values import changes_values

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence

    from tidegate.core._decision import Decision
    from tidegate.core._limit import Limit
    from tidegate.stores._base import Ask, Store
    from tidegate.stores._values import Write

T = TypeVar("T")

MAX_CLOSING: Final = 2.0  # seconds that closing a store waits for background tasks
MAX_TRANSIT: Final = SECOND  # microseconds that a correction may take to reach the store


class Correction(NamedTuple):
    """The arguments of an `adjust` that refunds a charge: the asks, and the time of their charge."""

    asks: list[Ask]
    at: int | None


def corrections(verb: str, asks: Sequence[Ask], decisions: Sequence[Decision], passed: int) -> list[Correction]:
    """Return the corrections of a call that was made `passed` microseconds ago; none if it was denied.

    Windows, logs and marked buckets correct the charge made at the time of the decision. A bucket that was charged
    without a mark does not record it: it is refunded what it cannot have refilled meanwhile (see `bucket_credit`).
    """
    if not VERBS[verb].charges or not decisions or not decisions[-1].within_limits:
        return []
    asks, decisions = decided_asks(asks, decisions)
    merged = merge(asks)
    views = {
        (place, limit.identity): view
        for place, (policy, _, _), decision in zip(merged.places, asks, decisions, strict=True)
        for limit, view in zip(policy.limits, decision.views, strict=True)
    }
    marked: list[Ask] = []
    unmarked: list[Ask] = []
    for place, (policy, key, costs) in enumerate(merged.asks):
        rows = [(limit, cost, views[place, limit.identity]) for limit, cost in zip(policy.limits, costs, strict=True)]
        if VERBS[verb].marks:
            marked.append((policy, key, tuple(-cost for cost in costs)))
            continue
        exact = tuple(0 if limit.rules.refills else -cost for limit, cost, _ in rows)
        credit = tuple(-bucket_credit(limit, cost, view[2], passed + MAX_TRANSIT) for limit, cost, view in rows)
        marked.append((policy, key, exact))
        unmarked.append((policy, key, credit))
    found = (Correction(_needed(marked), decisions[0].at), Correction(_needed(unmarked), None))
    return [correction for correction in found if correction.asks]


def _needed(asks: Iterable[Ask]) -> list[Ask]:
    return [ask for ask in asks if any(ask[2])]


def bucket_credit(limit: Limit, cost: int, reset: int, passed: int) -> int:
    """Return how many permits of a charge to refund to an unmarked bucket that needed `reset` us to be full after it.

    Without the charge, the bucket might have been full within `passed` microseconds, and refill beyond that would have
    been lost. That part is not refunded (rounded down to permits), since the bucket has already refilled it.
    """
    if not limit.rules.refills or not cost:
        return 0
    missing = max(0, (reset - 1) * limit.rate - cost * limit.scale)  # at least this much was missing before the charge
    overflow = max(0, passed * limit.rate - missing) // limit.scale
    return max(0, cost - overflow)


def report_lost(store: Store, verb: str, asks: Sequence[Ask], now: int | None, at: int | None, error: object) -> None:
    """Pass on a correction without writes whose task was cancelled, and that was answered with an error."""
    if (
        VERBS[verb].corrects
        and isinstance(error, (StoreUnavailable, OSError))
        and not getattr(error, "concerns_key", False)
        and store.lost_correction is not None
    ):
        store.lost_correction(asks, now, at)


class BackgroundTasks:
    """Tasks that continue after their callers were cancelled. Each ends within its own deadline."""

    def __init__(self) -> None:
        """Start without tasks."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop_ends: dict[asyncio.AbstractEventLoop, AsyncGenerator[None, None]] = {}
        self._on_done: Callable[[], None] | None = None

    async def watch(self) -> None:
        """Make the running event loop wait for the tasks when it ends; call this before starting tasks.

        A loop that ends cancels its tasks and waits for those. Then it closes the asynchronous generators that were
        started in it, and waits for them: this generator waits for the tasks.
        """
        loop = asyncio.get_running_loop()
        if loop not in self._loop_ends:
            self._loop_ends = {other: end for other, end in self._loop_ends.items() if not other.is_closed()}
            self._loop_ends[loop] = end = self._end_of_loop()
            await anext(end)

    async def _end_of_loop(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            await self.finish()

    def give_back(
        self, store: Store, verb: str, asks: Sequence[Ask], decisions: Sequence[Decision], now: int | None = None
    ) -> None:
        """Refund the charge of a call whose decisions are no longer needed; `now` is the time that it was given."""
        instant = store.clock.ns() // 1000 if now is None else now
        passed = max(0, instant - decisions[0].at) if decisions else 0
        found = corrections(verb, asks, decisions, passed)
        if found:
            self.start(self._give_back(store, found, now))

    @staticmethod
    async def _give_back(store: Store, found: list[Correction], now: int | None) -> None:
        for asks, at in found:
            try:
                await store.apply_async("adjust", asks, now, at)
            except RateLimitError as error:
                store.outage_log.warning("could not refund the permits of a cancelled call: %s", error)
            else:
                store.wake(asks)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a background task in the running event loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def complete(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine that is completed even if this task is cancelled meanwhile."""
        return await asyncio.shield(self.start(work))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # so that asyncio does not log it as never retrieved
        if not self._tasks and self._on_done is not None:
            then, self._on_done = self._on_done, None
            then()

    def __bool__(self) -> bool:
        """Return whether there are tasks."""
        return bool(self._tasks)

    async def finish(self) -> None:
        """Wait for the tasks of this event loop, and those that they start, for `MAX_CLOSING` seconds at most."""
        loop = asyncio.get_running_loop()
        until = loop.time() + MAX_CLOSING
        while (tasks := [task for task in self._tasks if task.get_loop() is loop]) and loop.time() < until:
            await asyncio.wait(tasks, timeout=until - loop.time())

    def when_done(self, then: Callable[[], None]) -> None:
        """Call a function when there are no tasks: now, or when the last one has ended."""
        if any(not task.get_loop().is_closed() for task in tuple(self._tasks)):
            self._on_done = then
        else:
            then()


CONTINUED_CALLS: Final = BackgroundTasks()  # calls whose tasks were cancelled


async def apply_in_thread(
    store: Store, verb: str, asks: Sequence[Ask], now: int | None, at: int | None, writes: Sequence[Write] = ()
) -> list[Decision]:
    """Call `Store.apply` in a thread."""
    arguments = (verb, asks, now, at, writes) if writes else (verb, asks, now, at)
    return await refund_if_cancelled(store, asyncio.to_thread(store.apply, *arguments), verb, asks, now, at, writes)


async def refund_if_cancelled(
    store: Store,
    call: Coroutine[Any, Any, list[Decision]],
    verb: str,
    asks: Sequence[Ask],
    now: int | None = None,
    at: int | None = None,
    writes: Sequence[Write] = (),
) -> list[Decision]:
    """Await a call that continues if this task is cancelled; then its charge is refunded, unless it changes values."""
    await CONTINUED_CALLS.watch()
    running = CONTINUED_CALLS.start(call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if not changes_values(writes):
            CONTINUED_CALLS.start(_refund(store, running, verb, asks, now, at))
        raise


async def _refund(
    store: Store, call: asyncio.Task[list[Decision]], verb: str, asks: Sequence[Ask], now: int | None, at: int | None
) -> None:
    await asyncio.wait((call,))
    if not call.cancelled() and call.exception() is None:
        CONTINUED_CALLS.give_back(store, verb, asks, call.result(), now)
    elif not call.cancelled():
        report_lost(store, verb, asks, now, at, call.exception())
