"""Async calls to a store whose `apply` blocks: one thread applies the calls while tasks wait.

The thread takes all queued calls and applies them in order, in one transaction. A task that is cancelled before the
thread takes its call is not charged. If it is cancelled later, even after the call was applied and before the task
resumes, its permits are refunded (see `stores.cancellation`).

A signal handler may raise at any instruction of an event loop's thread. So the lock is held by `with` only
(`tidegate._runtime.lock`), and results are delivered by two callbacks: the second one continues if the first one was
interrupted.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from tidegate._runtime.clock import SystemClock, yield_thread
from tidegate._runtime.fork import fork_safe
from tidegate._runtime.lock import locked
from tidegate.core._bounds import SECOND
from tidegate.core._decision import VERBS
from tidegate.errors import Closed
from tidegate.stores._cancellation import MAX_CLOSING, corrections, report_lost
from tidegate.stores._values import changes_values

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate.core._decision import Decision
    from tidegate.stores._base import Ask, Store
    from tidegate.stores._values import Write

    # The verb, what it is applied to, `now`, `at`, and what a store that keeps more than states adds.
    StoreCall = tuple[str, Sequence[Ask], int | None, int | None, object]
    Results = list[Decision] | BaseException

MAX_CALLS_PER_TRANSACTION: Final = 64  # bounds how long other processes wait for the file
POLL_INTERVAL: Final = 0.001  # seconds between two checks whether the thread has ended, when closing
steady: Final = SystemClock.steady


class Writes(tuple["Write", ...]):
    """The values that a call writes."""

    __slots__ = ()


class QueuedCall:
    """One call of `apply`, and the future of the task that waits for its result."""

    __slots__ = ("arguments", "loop", "queued_at", "results", "waiter")

    def __init__(self, asked: StoreCall) -> None:
        """Create a call that no task waits for."""
        self.arguments: StoreCall = asked
        self.results: Results = []
        self.queued_at: int = steady()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.waiter: asyncio.Future[list[Decision]] | None = None

    @property
    def dropped(self) -> bool:
        """Whether the call can be skipped: its task was cancelled. Corrections and records are never skipped."""
        if self.waiter is None or not self.waiter.cancelled():
            return False
        return VERBS[self.arguments[0]].asks and not self.keeps_charge

    @property
    def keeps_charge(self) -> bool:
        """Whether it writes more than its charge, so that it is made, and stays charged, although it was cancelled."""
        more = self.arguments[4]
        return more is not None and (not isinstance(more, Writes) or changes_values(more))

    @property
    def answered(self) -> bool:
        """Whether its task has the result, so that nothing is refunded."""
        return self.waiter is not None and self.waiter.done() and not self.waiter.cancelled()

    def make_corrections(self) -> list[QueuedCall]:
        """Build the calls that refund the permits of this call; a second time, none."""
        verb, asks, now, _, _ = self.arguments
        results, self.results = self.results, []
        if isinstance(results, BaseException) or not results or self.keeps_charge:
            return []
        found = corrections(verb, asks, results, steady() - self.queued_at)
        return [QueuedCall(("adjust", back, now, at, None)) for back, at in found]


class AsyncWorker:
    """A thread that applies queued calls, started by the first call."""

    def __init__(self, apply: Callable[[list[QueuedCall]], None], store: Store) -> None:
        """Pass lists of calls of a store to `apply`, which sets their `results` and does not raise."""
        self._apply = apply
        self._store = store
        self._queue: deque[QueuedCall] = deque()
        self._undelivered: list[list[QueuedCall]] = []  # applied, and not delivered to their event loop yet
        self.lock: threading.Lock = fork_safe(threading.Lock())
        self._thread = ThreadPoolExecutor(1, "tidegate-sqlite")
        self._busy = False
        self._closed = False  # to new calls
        self._ended = False

    async def apply(self, call: QueuedCall) -> list[Decision]:
        """Queue a call, and wait for its result."""
        call.loop = asyncio.get_running_loop()
        call.waiter = call.loop.create_future()
        self._enter(call)
        try:
            return await call.waiter
        except asyncio.CancelledError:
            if not call.waiter.cancelled():  # answered in the same moment, but the task will not see it
                call.waiter.exception()
                self._abandon([call])
            raise

    @locked
    def _enter(self, call: QueuedCall) -> None:
        if self._closed:
            raise Closed("the store is closed")
        self._put([call])

    def _put(self, calls: list[QueuedCall]) -> None:
        """Queue calls, unless the thread has ended. Requires the lock."""
        if self._ended or not calls:
            return
        self._queue.extend(calls)
        if not self._busy:
            self._thread.submit(self._work)
            self._busy = True  # after `submit`: an interrupt between both must not leave calls without a thread

    def _work(self) -> None:
        while some := self._take_some():
            asked = [call for call in some if not call.dropped]
            self._apply(asked)
            loops: dict[Any, list[QueuedCall]] = {}
            for call in asked:
                loops.setdefault(call.loop, []).append(call)
            for call in loops.pop(None, ()):  # refunds
                if not isinstance(call.results, BaseException):
                    self._store.wake(call.arguments[1])
            for loop, answered in loops.items():
                self._send(loop, answered)

    @locked
    def _take_some(self) -> list[QueuedCall]:
        some = [self._queue.popleft() for _ in range(min(MAX_CALLS_PER_TRANSACTION, len(self._queue)))]
        self._busy = bool(some)
        return some

    def _send(self, loop: asyncio.AbstractEventLoop, calls: list[QueuedCall]) -> None:
        """Schedule the delivery of results in their event loop."""
        self._add_undelivered(calls)
        try:
            loop.call_soon_threadsafe(self._deliver, calls)
            loop.call_soon_threadsafe(self._deliver, calls)  # if a signal handler raises in the first
        except RuntimeError:  # the loop is closed: no task will resume, unless the first callback has run before
            self._delivered(calls)
            self._abandon([call for call in calls if not call.answered])

    @locked
    def _add_undelivered(self, calls: list[QueuedCall]) -> None:
        self._undelivered.append(calls)

    def _deliver(self, calls: list[QueuedCall]) -> None:
        """Set the results, in the event loop; refund the calls of cancelled tasks."""
        if not any(others is calls for others in self._undelivered):
            return
        for call in calls:
            waiter, results = call.waiter, call.results
            if waiter is None or waiter.cancelled():
                self._abandon([call])
            elif waiter.done():
                continue  # set before a signal handler raised
            elif isinstance(results, BaseException):
                waiter.set_exception(results)
            else:
                waiter.set_result(results)
        self._delivered(calls)

    @locked
    def _delivered(self, calls: list[QueuedCall]) -> None:
        self._undelivered = [others for others in self._undelivered if others is not calls]

    def _abandon(self, calls: list[QueuedCall]) -> None:
        """Refund charges whose tasks were cancelled; other changes stay, and may have freed permits."""
        for call in calls:
            if VERBS[call.arguments[0]].charges:
                self._undo(call)
            elif isinstance(call.results, BaseException):
                self._report_failed(call)
            elif VERBS[call.arguments[0]].changes:
                self._store.wake(call.arguments[1])

    def _report_failed(self, call: QueuedCall) -> None:
        if not call.keeps_charge:
            verb, asks, now, at, _ = call.arguments
            report_lost(self._store, verb, asks, now, at, call.results)

    @locked
    def _undo(self, call: QueuedCall) -> None:
        self._put(call.make_corrections())

    def close(self) -> None:
        """Apply queued calls, refund cancelled ones, then end the thread."""
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        self._closed = True
        for calls in list(self._undelivered):
            loop = calls[0].loop
            if loop is None or loop.is_closed():
                self._delivered(calls)
                self._abandon([call for call in calls if not call.answered])
            elif loop is here:  # it runs nothing while this method waits
                self._abandon([call for call in calls if call.waiter and call.waiter.cancelled()])
        deadline = steady() + round(MAX_CLOSING * SECOND)
        while not self._is_done(here) and steady() < deadline:
            yield_thread(POLL_INTERVAL)
        self._ended = True
        self._thread.shutdown(wait=True)

    def _is_done(self, here: asyncio.AbstractEventLoop | None) -> bool:
        return not self._busy and all(calls[0].loop is here for calls in self._undelivered)
