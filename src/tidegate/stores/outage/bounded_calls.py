"""Deadlines for stores that do not enforce one themselves: their calls run, and may hang, in a few threads or tasks.

The deadline measures the store's silence. A call is late if no call was answered for the whole deadline while it waited
for a thread, for a connection of the store, or for the answer; or if it has waited MAX_DEADLINES times as long. A
deadline is checked in parts, so that the time for which a process or an event loop was blocked does not count.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from tidegate.clock import STORE_THREAD, ThreadSignal
from tidegate.errors import StoreUnavailable
from tidegate.fork import fork_safe
from tidegate.lock import locked
from tidegate.stores.deadline import DEADLINE_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
MAX_THREADS: Final = 16  # further calls wait for one of them
MAX_DEADLINES: Final = 20  # how many deadlines a call waits that is not answered while others are


class SilenceCounter:
    """Counts the parts of a deadline for which one call has waited, and for which no call was answered."""

    def __init__(self, answered: Callable[[], int]) -> None:
        """Start waiting. `answered` returns how many calls have been answered so far."""
        self._answered = answered
        self._seen = answered()
        self._silent_parts = 0
        self._parts = 0

    def is_late(self) -> bool:
        """Count one more part; return whether the call is late."""
        self._parts += 1
        seen = self._answered()
        self._silent_parts = self._silent_parts + 1 if seen == self._seen else 0
        self._seen = seen
        return self._silent_parts >= DEADLINE_STEPS or self._parts >= DEADLINE_STEPS * MAX_DEADLINES


class DeadlineCall(Generic[T]):
    """One call that a worker thread runs."""

    def __init__(self, call: Callable[[], T], done: Callable[[], object]) -> None:
        self.call: Callable[[], T] | None = call
        self.done = done
        self.answer: list[T] = []
        self.error: BaseException | None = None

    def run(self) -> bool:
        """Run the call and keep its result or exception. Return False if it was dropped."""
        call = self.call
        if call is None:
            return False
        try:
            self.answer.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller
            self.error = error
        return True

    def drop(self) -> None:
        """Do not run the call if it has not started."""
        self.call = None

    def result(self) -> T:
        """Return the result, or raise the exception."""
        if self.error is not None:
            raise self.error
        return self.answer[0]


class DeadlineThreads:
    """Runs calls in threads. A late call continues in its thread, but its caller stops waiting.

    An exception that a signal handler raises in a caller leaves it usable: callers hold no lock, and the state that
    they change is always valid. `_idle` has at most one item for each worker that waits for a call. If an item is lost,
    another worker is started; when all have started, every call waits in the queue, from which each worker takes the
    next one.
    """

    def __init__(self) -> None:
        """Start without threads."""
        self.lock: threading.Lock = fork_safe(threading.Lock())  # held by workers only
        self._jobs: SimpleQueue[DeadlineCall[Any]] = SimpleQueue()
        self._idle: deque[None] = deque(maxlen=MAX_THREADS)
        self._workers = 0
        self._answered = 0

    def run(self, call: Callable[[], T], seconds: float) -> T:
        """Run a call and return its result. Raises StoreUnavailable if it is late."""
        done = ThreadSignal()
        job = DeadlineCall(call, done.set)
        self._enqueue(job)
        silence = SilenceCounter(lambda: self._answered)
        while not done.wait(seconds / DEADLINE_STEPS):
            if silence.is_late():
                job.drop()
                raise deadline_error(seconds)
        return job.result()

    def start(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Run a call for a task of this event loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def deliver() -> None:
            if future.done():
                return
            if job.error is None:
                future.set_result(job.answer[0])
            else:
                future.set_exception(job.error)

        def finish() -> None:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(deliver)

        job = DeadlineCall(call, finish)
        self._enqueue(job)
        future.add_done_callback(lambda _: job.drop())
        return future

    def _enqueue(self, job: DeadlineCall[Any]) -> None:
        try:
            self._idle.pop()
        except IndexError:
            if self._workers < MAX_THREADS:
                threading.Thread(target=self._work, name=STORE_THREAD, daemon=True).start()
        self._jobs.put(job)

    def _work(self) -> None:
        """Run calls. The first one is the call for which the thread was started."""
        if not self._add_worker():
            return
        while True:
            job = self._jobs.get()
            if job.run():
                self._count_answer()
                job.done()
            del job
            self._idle.append(None)

    @locked
    def _add_worker(self) -> bool:
        """Count this thread; return False if several callers together have started too many."""
        if self._workers >= MAX_THREADS:
            return False
        self._workers += 1
        return True

    @locked
    def _count_answer(self) -> None:
        self._answered += 1


class DeadlineTasks:
    """Waits for asynchronous calls. A late call continues, but its caller stops waiting."""

    def __init__(self) -> None:
        """Start without calls."""
        self._answered = 0
        self._pending: set[asyncio.Future[Any]] = set()

    async def wait(self, call: asyncio.Future[T], seconds: float) -> T:
        """Wait for a call. Raises StoreUnavailable if it is late. If this task is cancelled, the call continues."""
        self._pending.add(call)
        call.add_done_callback(self._ended)
        silence = SilenceCounter(lambda: self._answered)
        while not call.done():
            await asyncio.wait((call,), timeout=seconds / DEADLINE_STEPS)
            if not call.done() and silence.is_late():
                raise deadline_error(seconds)
        return call.result()

    def _ended(self, call: asyncio.Future[Any]) -> None:
        self._pending.discard(call)
        self._answered += 1
        if not call.cancelled():
            call.exception()  # retrieve it, so that asyncio does not log it


def deadline_error(seconds: float) -> StoreUnavailable:
    """Return the error of a late call."""
    return StoreUnavailable(
        f"the store did not respond within {seconds} s: check the store, or raise ?deadline= in its URL"
    )
