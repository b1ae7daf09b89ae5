"""A deadline for stores that cannot keep one themselves: their calls run, and may hang, in a few threads or tasks.

What is measured is the store's silence. A call is late when no call has been answered for the whole deadline while it
waited, be it for a thread, for a connection of the store, or for the answer; or when it has waited MAX_DEADLINES times
as long. A deadline is looked at in parts, so that a process or an event loop that stood still does not count.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from tidegate.errors import StoreUnavailable
from tidegate.stores.deadline import PARTS

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
MAX_THREADS: Final = 16  # further calls wait for one of them
MAX_DEADLINES: Final = 20  # for which a call waits that is not answered while others are


class Silence:
    """How long one call has waited, in parts of its deadline, and for how many of these nobody was answered."""

    def __init__(self, answered: Callable[[], int]) -> None:
        """Begin to wait. `answered` returns how many calls have been answered so far."""
        self._answered = answered
        self._seen = answered()
        self._quiet = 0
        self._parts = 0

    def is_over(self) -> bool:
        """Count one more part; tell whether the call is late."""
        self._parts += 1
        seen = self._answered()
        self._quiet = self._quiet + 1 if seen == self._seen else 0
        self._seen = seen
        return self._quiet >= PARTS or self._parts >= PARTS * MAX_DEADLINES


class DeadlineCall(Generic[T]):
    """One call on its way through a worker."""

    def __init__(self, call: Callable[[], T], done: Callable[[], object]) -> None:
        self.call = call
        self.done = done
        self.answer: list[T] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run the call and keep what came of it."""
        try:
            self.answer.append(self.call())
        except BaseException as error:  # noqa: BLE001 - raised again where the answer is awaited
            self.error = error

    def result(self) -> T:
        """Give the answer, or raise."""
        if self.error is not None:
            raise self.error
        return self.answer[0]


class DeadlineThreads:
    """Runs calls in threads. A call that is late goes on in its thread, and nobody waits for it any more."""

    def __init__(self) -> None:
        """Start without threads."""
        self._jobs: deque[DeadlineCall[Any]] = deque()
        self._ready = threading.Condition()
        self._idle = 0
        self._threads = 0
        self._answered = 0

    def run(self, call: Callable[[], T], seconds: float) -> T:
        """Run a call; raise StoreUnavailable when it is late."""
        done = threading.Event()
        job = DeadlineCall(call, done.set)
        self._start(job)
        silence = Silence(lambda: self._answered)
        while not done.wait(seconds / PARTS):
            if silence.is_over():
                self._drop(job)
                raise late(seconds)
        return job.result()

    def begin(self, call: Callable[[], T]) -> asyncio.Future[T]:
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
            if not loop.is_closed():
                loop.call_soon_threadsafe(deliver)

        job = DeadlineCall(call, finish)
        self._start(job)
        future.add_done_callback(lambda _: self._drop(job))
        return future

    def _start(self, job: DeadlineCall[Any]) -> None:
        with self._ready:
            self._jobs.append(job)
            if self._idle >= len(self._jobs):
                self._ready.notify()
            elif self._threads < MAX_THREADS:
                self._threads += 1
                threading.Thread(target=self._work, name="tidegate-store", daemon=True).start()

    def _drop(self, job: DeadlineCall[Any]) -> None:
        """Do not begin a call that nobody waits for any more."""
        with self._ready:
            if job in self._jobs:
                self._jobs.remove(job)

    def _work(self) -> None:
        while True:
            with self._ready:
                while not self._jobs:
                    self._idle += 1
                    self._ready.wait()
                    self._idle -= 1
                job = self._jobs.popleft()
            job.run()
            with self._ready:
                self._answered += 1
            job.done()
            del job


class DeadlineTasks:
    """Waits for calls of tasks. A call that is late goes on, and nobody waits for it any more."""

    def __init__(self) -> None:
        """Start without calls."""
        self._answered = 0
        self._left: set[asyncio.Future[Any]] = set()

    async def wait(self, call: asyncio.Future[T], seconds: float) -> T:
        """Wait for a call; raise StoreUnavailable when it is late. Cancelled, it leaves the call alone."""
        self._left.add(call)
        call.add_done_callback(self._ended)
        silence = Silence(lambda: self._answered)
        while not call.done():
            await asyncio.wait((call,), timeout=seconds / PARTS)
            if not call.done() and silence.is_over():
                raise late(seconds)
        return call.result()

    def _ended(self, call: asyncio.Future[Any]) -> None:
        self._left.discard(call)
        self._answered += 1
        if not call.cancelled():
            call.exception()  # looked at, so that nobody is told it never was


def late(seconds: float) -> StoreUnavailable:
    """Say that a call took too long."""
    return StoreUnavailable(f"the store did not answer within {seconds} s: check it, or allow more with deadline=")
