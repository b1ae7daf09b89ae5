"""The async form of a store whose `apply` blocks: a thread decides, and tasks await the decisions.

The thread decides all queued calls in one transaction, one after another. A call whose task is cancelled before the
thread takes it from the queue is not charged; if the task is cancelled later, or before it reads the decision, the
charge is given back (see `stores.cancellation`).
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from tidegate.clock import SystemClock
from tidegate.errors import Closed
from tidegate.stores.cancellation import CHARGING, DROPPABLE, MAX_CLOSING, corrections

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate.core.decision import Decision
    from tidegate.stores.base import Ask

    # The verb, the asks, `now`, `at`, and an extra argument of a store that stores more than states.
    StoreCall = tuple[str, Sequence[Ask], int | None, int | None, object]
    Results = list[Decision] | BaseException

MAX_CALLS_PER_TRANSACTION: Final = 64  # other processes wait for the file meanwhile
steady: Final = SystemClock.steady


class QueuedCall:
    """A call of `apply`, and the future that waits for its decisions."""

    __slots__ = ("arguments", "loop", "queued_at", "results", "waiter")

    def __init__(self, arguments: StoreCall) -> None:
        """Queue a call that no task waits for."""
        self.arguments = arguments
        self.results: Results = []
        self.queued_at = steady()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.waiter: asyncio.Future[list[Decision]] | None = None

    @property
    def dropped(self) -> bool:
        """Whether it can be skipped, since its task was cancelled; corrections and other writes cannot."""
        if self.waiter is None or not self.waiter.cancelled():
            return False
        return self.arguments[0] in DROPPABLE and self.arguments[4] is None

    def make_corrections(self) -> list[QueuedCall]:
        """Return the calls that give back the charge of this one; none the second time."""
        verb, asks, now, _, more = self.arguments
        results, self.results = self.results, []
        if isinstance(results, BaseException) or more is not None:
            return []
        found = corrections(verb, asks, results, steady() - self.queued_at)
        return [QueuedCall(("adjust", back, now, at, None)) for back, at in found]


class AsyncWorker:
    """A thread that applies queued calls; the first call starts it."""

    def __init__(self, apply: Callable[[list[QueuedCall]], None], wake: Callable[[Sequence[Ask]], None]) -> None:
        """Pass lists of calls to `apply`, which sets their `results` and does not raise.

        `wake` lets callers that wait for permits of keys try again.
        """
        self._apply = apply
        self._wake = wake
        self._queue: deque[QueuedCall] = deque()
        self._undelivered: list[list[QueuedCall]] = []  # decided, but not yet delivered in their event loop
        self._changed = threading.Condition()
        self._thread = ThreadPoolExecutor(1, "tidegate-sqlite")
        self._busy = False
        self._closed = False  # to new calls
        self._ended = False

    async def apply(self, call: QueuedCall) -> list[Decision]:
        """Queue a call and await its decisions."""
        call.loop = asyncio.get_running_loop()
        call.waiter = call.loop.create_future()
        with self._changed:
            if self._closed:
                raise Closed("the store is closed")
            self._put([call])
        try:
            return await call.waiter
        except asyncio.CancelledError:
            if not call.waiter.cancelled():  # decided at the same moment, but the task will not read it
                call.waiter.exception()
                self._abandon([call])
            raise

    def _put(self, calls: list[QueuedCall]) -> None:
        """Queue calls for the thread, unless it has ended. Requires the lock."""
        if self._ended or not calls:
            return
        self._queue.extend(calls)
        if not self._busy:
            self._thread.submit(self._work)
            self._busy = True  # set last, in case an interrupt prevents the submission

    def _work(self) -> None:
        while True:
            with self._changed:
                batch = [self._queue.popleft() for _ in range(min(MAX_CALLS_PER_TRANSACTION, len(self._queue)))]
                self._busy = bool(batch)
                self._changed.notify_all()
            if not batch:
                return
            current = [call for call in batch if not call.dropped]
            self._apply(current)
            loops: dict[Any, list[QueuedCall]] = {}
            for call in current:
                loops.setdefault(call.loop, []).append(call)
            for call in loops.pop(None, ()):  # corrections
                if not isinstance(call.results, BaseException):
                    self._wake(call.arguments[1])
            for loop, applied in loops.items():
                self._send(loop, applied)

    def _send(self, loop: asyncio.AbstractEventLoop, calls: list[QueuedCall]) -> None:
        """Pass decisions to the event loop that waits for them."""
        with self._changed:
            self._undelivered.append(calls)
        try:
            loop.call_soon_threadsafe(self._deliver, calls)
        except RuntimeError:  # the loop is closed
            self._delivered(calls)
            self._abandon(calls)

    def _deliver(self, calls: list[QueuedCall]) -> None:
        """Set the results of the futures, in the event loop; calls whose task was cancelled are undone."""
        for call in calls:
            waiter, results = call.waiter, call.results
            if waiter is None or waiter.done():
                self._abandon([call])
            elif isinstance(results, BaseException):
                waiter.set_exception(results)
            else:
                waiter.set_result(results)
        self._delivered(calls)

    def _delivered(self, calls: list[QueuedCall]) -> None:
        with self._changed:
            self._undelivered = [others for others in self._undelivered if others is not calls]
            self._changed.notify_all()

    def _abandon(self, calls: list[QueuedCall]) -> None:
        """Give back charges that no task has read; other changes stay, and may have made permits available."""
        for call in calls:
            if call.arguments[0] in CHARGING:
                with self._changed:
                    self._put(call.make_corrections())
            elif call.arguments[0] != "peek" and not isinstance(call.results, BaseException):
                self._wake(call.arguments[1])

    def close(self) -> None:
        """Complete queued calls, give back the charges of cancelled ones, then end the thread."""
        try:
            current_loop = asyncio.get_running_loop()
        except RuntimeError:
            current_loop = None
        with self._changed:
            self._closed = True
            undelivered = list(self._undelivered)
        for calls in undelivered:
            loop = calls[0].loop
            if loop is None or loop.is_closed():
                self._delivered(calls)
                self._abandon(calls)
            elif loop is current_loop:  # blocked while this method waits
                self._abandon([call for call in calls if call.waiter and call.waiter.cancelled()])
        with self._changed:
            self._changed.wait_for(lambda: self._is_done(current_loop), MAX_CLOSING)
            self._ended = True
        self._thread.shutdown(wait=True)

    def _is_done(self, current_loop: asyncio.AbstractEventLoop | None) -> bool:
        return not self._busy and all(calls[0].loop is current_loop for calls in self._undelivered)
