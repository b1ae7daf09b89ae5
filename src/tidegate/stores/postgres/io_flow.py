"""Two loops, for threads and for tasks, that run generators of steps; code that talks to the server is written once."""

from __future__ import annotations

import asyncio
import select
import weakref
from collections.abc import Callable, Generator
from contextlib import closing
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from tidegate.clock import SystemClock, TaskSignal, ThreadSignal

if TYPE_CHECKING:
    from tidegate.clock import Signal

T = TypeVar("T")

SYSTEM_CLOCK = SystemClock()  # deadlines are in real time, whichever clock decides


class WaitForSocket(NamedTuple):
    """A step that waits until a socket can be read (or also written to), or until an instant of steady time."""

    socket: int
    write: bool
    until: int


class WaitForSignal(NamedTuple):
    """A step that waits until a signal is set, or until an instant of steady time. `under_way`: the call was sent."""

    signal: Any  # a ThreadSignal or a TaskSignal, as the loop needs it
    until: int
    under_way: Callable[[], bool]


class RunBlocking(NamedTuple):
    """A step that calls a blocking function; the generator receives its result."""

    function: Callable[[], Any]


Step = WaitForSocket | WaitForSignal | RunBlocking
Steps = Generator[Step, Any, T]


class Caller(Protocol):
    """A call that uses connections, as the pool sees it: hashable, compared by identity."""

    @property
    def alive(self) -> bool:
        """Whether the call is still running."""

    def new_signal(self) -> Signal:
        """Return a signal that the call can wait for."""


class ThreadCaller:
    """A call of a thread. It runs inside a generator, since `gi_running` shows whether a generator is running."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        """Not running yet."""
        self._runs: Generator[Any, None, None] | None = None

    def drive(self, steps: Steps[T]) -> T:
        """Run the steps of this call in this thread."""
        self._runs = runs = _within(steps)
        return next(runs)  # type: ignore[no-any-return]  # a T, by drive

    @property
    def alive(self) -> bool:
        """Whether `drive` is running."""
        return self._runs is not None and self._runs.gi_running  # type: ignore[attr-defined]  # a generator function made it

    def new_signal(self) -> Signal:
        """Return a signal that a thread can wait for."""
        return ThreadSignal()


def _within(steps: Steps[Any]) -> Generator[Any, None, None]:
    yield drive(steps)


class TaskCaller:
    """A call of a task: alive until its steps have ended, whichever task runs them."""

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        """Not running yet."""
        self._steps: weakref.ref[Steps[Any]] | None = None

    def run(self, steps: Steps[T]) -> AsyncRun[T]:
        """Return a run of these steps, for a task."""
        self._steps = weakref.ref(steps)
        return AsyncRun(steps)

    @property
    def alive(self) -> bool:
        """Whether steps remain."""
        steps = None if self._steps is None else self._steps()
        return steps is not None and steps.gi_frame is not None  # type: ignore[attr-defined]  # a generator function made it

    def new_signal(self) -> Signal:
        """Return a signal that a task can wait for."""
        return TaskSignal()


def drive(steps: Steps[T]) -> T:
    """Run the steps in this thread."""
    answer = None
    with closing(steps):
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]  # a T, by the type of Steps
            answer = None
            if isinstance(step, WaitForSocket):
                _wait(step)
            elif isinstance(step, WaitForSignal):
                SYSTEM_CLOCK.wait(step.signal, step.until)
            else:
                answer = step.function()


def _wait(step: WaitForSocket) -> None:
    poll = select.poll()
    poll.register(step.socket, select.POLLIN | (select.POLLOUT if step.write else 0))
    poll.poll(max(0, step.until - SYSTEM_CLOCK.steady()) / 1000)


def readable(socket: int) -> bool:
    """Return whether data or the end of the stream has arrived on a socket."""
    poll = select.poll()
    poll.register(socket, select.POLLIN)
    return bool(poll.poll(0))


class AsyncRun(Generic[T]):
    """Runs steps in a task. If that task is cancelled, another can continue from the same step."""

    def __init__(self, steps: Steps[T]) -> None:
        """Start at the first step."""
        self._steps = steps
        self._step: Step | None = None
        self._waiting: asyncio.Future[Any] | None = None  # of the current step

    async def finish(self) -> T:
        """Run the remaining steps; it can be called again after a cancellation."""
        while True:
            if self._step is None:
                answer = None
            elif isinstance(self._step, WaitForSignal):
                await SYSTEM_CLOCK.wait_async(self._step.signal, self._step.until)
                answer = None
            else:
                self._waiting = self._waiting or _begin(self._step)
                if not self._waiting.done():
                    await asyncio.shield(self._waiting)
                answer = self._waiting.result()
            self._waiting = None
            try:
                self._step = self._steps.send(answer)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]  # a T, by the type of Steps

    async def finish_anyway(self) -> T:
        """Run the remaining steps, even if this task is cancelled: they have their own deadline."""
        while True:
            try:
                return await self.finish()
            except asyncio.CancelledError:
                continue

    def stop(self) -> bool:
        """Stop if nothing has been sent to the server; return whether that is so."""
        if self._step is not None and not (isinstance(self._step, WaitForSignal) and not self._step.under_way()):
            return False
        self._steps.close()
        return True


def _begin(step: WaitForSocket | RunBlocking) -> asyncio.Future[Any]:
    if isinstance(step, WaitForSocket):
        return _ready(step)
    return asyncio.get_running_loop().run_in_executor(None, step.function)


def _ready(step: WaitForSocket) -> asyncio.Future[None]:
    """Return a future that is done when the socket is ready or the deadline has passed."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def done() -> None:
        if not future.done():
            loop.remove_reader(step.socket)
            if step.write:
                loop.remove_writer(step.socket)
            timer.cancel()
            future.set_result(None)

    timer = loop.call_later(max(0, step.until - SYSTEM_CLOCK.steady()) / 1_000_000, done)
    loop.add_reader(step.socket, done)
    if step.write:
        loop.add_writer(step.socket, done)
    return future
