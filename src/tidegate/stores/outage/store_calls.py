"""Calls to a guarded store within its deadline; the charge of a cancelled call is refunded."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import StoreUnavailable
from tidegate.stores.base import Store
from tidegate.stores.cancellation import BackgroundTasks, corrections
from tidegate.stores.outage.bounded_calls import DeadlineTasks, DeadlineThreads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.clock import Clock
    from tidegate.core.decision import Decision
    from tidegate.stores.base import Ask
    from tidegate.stores.outage.fallback import Fallback
    from tidegate.stores.values import Write

OUTAGE_ERRORS: Final = (
    StoreUnavailable,
    OSError,
)  # raised by a store that is unavailable; OSError by one that does not translate errors of its driver
CONNECT_DEADLINE: Final = 1.0  # seconds for a call that has to connect
FIRST_CALL_TRIES: Final = 3


class StoreCalls:
    """Calls one store. `tries` is how often a call is sent before an outage starts: more than once until it connects.

    A store that is `bounded` enforces the deadline itself; the calls of others run in a few threads or tasks.
    """

    tries: int

    def __init__(self, store: Store, deadline: float, clock: Clock, fallback: Fallback, *, bounded: bool) -> None:
        """Call this store. `fallback` queues refunds that cannot be sent; `clock` measures the duration of calls."""
        self.tries = FIRST_CALL_TRIES
        self._store = store
        self._deadline = deadline
        self._clock = clock
        self._fallback = fallback
        self._workers = None if bounded else DeadlineThreads()
        self._tasks = DeadlineTasks()
        self._cancelled_calls = BackgroundTasks()

    def tries_for(self, verb: str) -> int:
        """Return how often a call is sent: a correction once, since an unanswered attempt may have arrived."""
        return min(1, self.tries) if verb == "adjust" else self.tries

    def apply(
        self, verb: str, asks: Sequence[Ask], now: int | None, at: int | None, writes: Sequence[Write] = ()
    ) -> list[Decision]:
        """Apply a verb. Raises StoreUnavailable if the store does not answer within the deadline."""
        arguments: tuple[Any, ...] = (verb, asks, now, at, writes) if writes else (verb, asks, now, at)
        if self._workers is None:
            return self._store.apply(*arguments)
        return self._workers.run(partial(self._store.apply, *arguments), self._call_deadline())

    def apply_one(self, *arguments: Any) -> Decision:  # noqa: ANN401 - the arguments of Store.apply_one
        """Apply a verb to one key."""
        if self._workers is None:
            return self._store.apply_one(*arguments)
        return self._workers.run(partial(self._store.apply_one, *arguments), self._call_deadline())

    def apply_one_in_background(self, *arguments: Any) -> Decision:  # noqa: ANN401 - as above
        """Apply a verb to one key; no caller waits for it, so it may take longer without starting an outage."""
        if self._workers is None:
            return self._store.apply_one(*arguments)
        return self._workers.run(partial(self._store.apply_one, *arguments), max(self._deadline, CONNECT_DEADLINE))

    async def apply_async(
        self, verb: str, asks: Sequence[Ask], now: int | None, at: int | None, writes: Sequence[Write] = ()
    ) -> list[Decision]:
        """Apply a verb without blocking the event loop; the charge of a cancelled call without writes is refunded."""
        arguments: tuple[Any, ...] = (verb, asks, now, at, writes) if writes else (verb, asks, now, at)
        if self._workers is None:
            return await self._store.apply_async(*arguments)
        await self._cancelled_calls.watch()
        began = self._clock.steady()
        call: asyncio.Future[list[Decision]]
        if type(self._store).apply_async is Store.apply_async:  # it would block the event loop
            call = self._workers.start(partial(self._store.apply, *arguments))
        else:
            call = asyncio.ensure_future(self._store.apply_async(*arguments))
        try:
            return await self._tasks.wait(call, self._call_deadline())
        except asyncio.CancelledError:
            self._cancelled_calls.start(self._refund_cancelled(call, ("adjust" if writes else verb, asks, now), began))
            raise

    async def finish(self) -> None:
        """Wait until the charges of cancelled calls are refunded."""
        await self._cancelled_calls.finish()

    async def _refund_cancelled(
        self, call: asyncio.Future[list[Decision]], arguments: tuple[str, Sequence[Ask], int | None], began: int
    ) -> None:
        """Wait for the answer to a call whose task was cancelled, and refund its charge."""
        verb, asks, now = arguments
        for _ in range(2):  # an event loop that ends cancels this task too
            with suppress(asyncio.CancelledError):
                await asyncio.wait((call,), timeout=self._call_deadline())
                break
        if not call.done():
            call.cancel()  # it hangs; the store may undo it by itself
            return
        if call.cancelled() or call.exception() is not None:
            return
        for refund, at in corrections(verb, asks, call.result(), self._clock.steady() - began):
            try:
                await self.apply_async("adjust", refund, now, at)
            except OUTAGE_ERRORS:
                self._fallback.decide("adjust", refund, now, at, in_doubt=True)
        if verb != "peek":
            self._store.wake(asks)

    def _call_deadline(self) -> float:
        """Return the deadline of a call; the first call has to connect."""
        return max(self._deadline, CONNECT_DEADLINE) if self.tries > 1 else self._deadline
