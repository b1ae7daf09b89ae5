"""A deadline for stores that cannot keep one themselves: their calls run, and may hang, in a few threads."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from tidegate.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")
MOST: Final = 16  # threads; when all of them hang, further calls are refused at once


class Job(Generic[T]):
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
        self.done()

    def result(self) -> T:
        """Give the answer, or raise."""
        if self.error is not None:
            raise self.error
        return self.answer[0]


class Workers:
    """Runs calls with a deadline. A call that misses it goes on in its thread, and nobody waits for it any more."""

    def __init__(self) -> None:
        """Start without threads."""
        self._jobs: deque[Job[Any]] = deque()
        self._ready = threading.Condition()
        self._idle = 0
        self._threads = 0

    def run(self, call: Callable[[], T], seconds: float) -> T:
        """Run a call; raise StoreUnavailable when it takes longer than this."""
        done = threading.Event()
        job = Job(call, done.set)
        self._start(job)
        if not done.wait(seconds):
            raise late(seconds)
        return job.result()

    async def run_async(self, call: Callable[[], T]) -> T:
        """Run a call without blocking the event loop, for as long as it takes."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def finish() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(done.set)

        job = Job(call, finish)
        self._start(job)
        await done.wait()
        return job.result()

    def _start(self, job: Job[Any]) -> None:
        with self._ready:
            if not self._idle:
                if self._threads >= MOST:
                    raise StoreUnavailable(f"{MOST} calls to the store hang already: it is not asked until one returns")
                self._threads += 1
                threading.Thread(target=self._work, name="tidegate-store", daemon=True).start()
                self._idle += 1
            self._idle -= 1
            self._jobs.append(job)
            self._ready.notify()

    def _work(self) -> None:
        while True:
            with self._ready:
                while not self._jobs:
                    self._ready.wait()
                job = self._jobs.popleft()
            job.run()
            del job
            with self._ready:
                self._idle += 1


class Tasks:
    """Awaits calls with a deadline. A call that misses it goes on in its task, which may take its time to tidy up."""

    def __init__(self) -> None:
        """Start without tasks."""
        self._left: set[asyncio.Task[Any]] = set()

    async def run(self, call: Coroutine[Any, Any, T], seconds: float) -> T:
        """Await a call; raise StoreUnavailable when it takes longer than this. Cancelled, it cancels the call."""
        task = asyncio.ensure_future(call)
        self._left.add(task)
        task.add_done_callback(self._forget)
        try:
            await asyncio.wait((task,), timeout=seconds)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not task.done():
            raise late(seconds)
        return task.result()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._left.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, so that nobody is told it never was


def late(seconds: float) -> StoreUnavailable:
    """Say that a call took too long."""
    return StoreUnavailable(f"the store did not answer within {seconds} s: check it, or allow more with deadline=")
