"""The async form of a store whose `apply` blocks: one thread decides, tasks wait.

Calls that wait when the thread comes to look are decided in one transaction, one after another. A task that is
cancelled before its call is looked at was never charged; one cancelled later, or in the moment between the answer
and its reading, gets its permits given back (see `stores.cancellation`).

A signal handler may raise at any instruction of an event loop's thread, so the lock is one that can be lost
(`tidegate.lock`), and results are delivered by two callbacks: the second does what the first could not.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from tidegate.clock import SystemClock, yield_thread
from tidegate.core.bounds import SECOND
from tidegate.errors import Closed
from tidegate.lock import Lock, locked
from tidegate.stores.cancellation import CHARGING, DROPPABLE, MAX_CLOSING, corrections

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate.core.decision import Decision
    from tidegate.stores.base import Ask

    # The verb, what it is applied to, `now`, `at`, and what a store that keeps more than states adds.
    StoreCall = tuple[str, Sequence[Ask], int | None, int | None, object]
    Results = list[Decision] | BaseException

MAX_CALLS_PER_TRANSACTION: Final = 64  # calls decided in one transaction at most: others wait for the file meanwhile
POLL_INTERVAL: Final = 0.001  # seconds between two looks whether the thread has ended, when closing
steady: Final = SystemClock.steady


class QueuedCall:
    """One call of `apply`, and who waits for its answer."""

    __slots__ = ("arguments", "loop", "queued_at", "results", "waiter")

    def __init__(self, asked: StoreCall) -> None:
        """Ask; nobody waits."""
        self.arguments: StoreCall = asked
        self.results: Results = []
        self.queued_at: int = steady()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.waiter: asyncio.Future[list[Decision]] | None = None

    @property
    def dropped(self) -> bool:
        """Whether it need not be asked, since nobody waits any more; what gives back or writes down has to be."""
        if self.waiter is None or not self.waiter.cancelled():
            return False
        return self.arguments[0] in DROPPABLE and self.arguments[4] is None

    def make_corrections(self) -> list[QueuedCall]:
        """Word what gives back the permits that nobody learned of, once."""
        verb, asks, now, _, more = self.arguments
        results, self.results = self.results, []
        if isinstance(results, BaseException) or not results or more is not None:
            return []
        found = corrections(verb, asks, results, steady() - self.queued_at)
        return [QueuedCall(("adjust", back, now, at, None)) for back, at in found]


class AsyncWorker:
    """A thread that results calls, started by the first."""

    def __init__(self, apply: Callable[[list[QueuedCall]], None], wake: Callable[[Sequence[Ask]], None]) -> None:
        """Leave lists of calls to `apply`, which sets their `results` and does not raise.

        `wake` lets whoever waits for keys ask again.
        """
        self._apply = apply
        self._wake = wake
        self._queue: deque[QueuedCall] = deque()
        self._undelivered: list[list[QueuedCall]] = []  # answered, and on the way to their event loop
        self.lock: Lock = Lock()
        self._thread = ThreadPoolExecutor(1, "tidegate-sqlite")
        self._busy = False
        self._closed = False  # to new calls
        self._ended = False

    async def apply(self, call: QueuedCall) -> list[Decision]:
        """Have a call answered."""
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
        """Let the thread answer these, if it still does. The lock is ours."""
        if self._ended or not calls:
            return
        self._queue.extend(calls)
        if not self._busy:
            self._thread.submit(self._work)
            self._busy = True  # after it, so that nobody counts on work that an interrupt kept from being submitted

    def _work(self) -> None:
        while some := self._take_some():
            asked = [call for call in some if not call.dropped]
            self._apply(asked)
            loops: dict[Any, list[QueuedCall]] = {}
            for call in asked:
                loops.setdefault(call.loop, []).append(call)
            for call in loops.pop(None, ()):  # what was given back
                if not isinstance(call.results, BaseException):
                    self._wake(call.arguments[1])
            for loop, answered in loops.items():
                self._send(loop, answered)

    @locked
    def _take_some(self) -> list[QueuedCall]:
        some = [self._queue.popleft() for _ in range(min(MAX_CALLS_PER_TRANSACTION, len(self._queue)))]
        self._busy = bool(some)
        return some

    def _send(self, loop: asyncio.AbstractEventLoop, calls: list[QueuedCall]) -> None:
        """Hand results over to the event loop that waits for them."""
        self._add_undelivered(calls)
        try:
            loop.call_soon_threadsafe(self._deliver, calls)
            loop.call_soon_threadsafe(self._deliver, calls)  # if a signal handler raises in the first
        except RuntimeError:  # the loop is closed: nobody will learn of it
            self._delivered(calls)
            self._abandon(calls)

    @locked
    def _add_undelivered(self, calls: list[QueuedCall]) -> None:
        self._undelivered.append(calls)

    def _deliver(self, calls: list[QueuedCall]) -> None:
        """Hand the results over, in the event loop; those that nobody waits for any more are undone."""
        if not any(others is calls for others in self._undelivered):
            return
        for call in calls:
            waiter, results = call.waiter, call.results
            if waiter is None or waiter.cancelled():
                self._abandon([call])
            elif waiter.done():
                continue  # handed over before a signal handler raised
            elif isinstance(results, BaseException):
                waiter.set_exception(results)
            else:
                waiter.set_result(results)
        self._delivered(calls)

    @locked
    def _delivered(self, calls: list[QueuedCall]) -> None:
        self._undelivered = [others for others in self._undelivered if others is not calls]

    def _abandon(self, calls: list[QueuedCall]) -> None:
        """Undo charges that nobody learned of; other changes stand, and may have made permits free."""
        for call in calls:
            if call.arguments[0] in CHARGING:
                self._undo(call)
            elif call.arguments[0] != "peek" and not isinstance(call.results, BaseException):
                self._wake(call.arguments[1])

    @locked
    def _undo(self, call: QueuedCall) -> None:
        self._put(call.make_corrections())

    def close(self) -> None:
        """Answer what was asked, give back what was cancelled meanwhile, then end."""
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        self._closed = True
        for calls in list(self._undelivered):
            loop = calls[0].loop
            if loop is None or loop.is_closed():
                self._delivered(calls)
                self._abandon(calls)
            elif loop is here:  # which stands still while this waits
                self._abandon([call for call in calls if call.waiter and call.waiter.cancelled()])
        deadline = steady() + round(MAX_CLOSING * SECOND)
        while not self._is_done(here) and steady() < deadline:
            yield_thread(POLL_INTERVAL)
        self._ended = True
        self._thread.shutdown(wait=True)

    def _is_done(self, here: asyncio.AbstractEventLoop | None) -> bool:
        return not self._busy and all(calls[0].loop is here for calls in self._undelivered)
