"""The steps of flows that talk to the server, and how threads and tasks execute them (see `tidegate.flow`)."""

from __future__ import annotations

import asyncio
import select
import weakref
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from tidegate.clock import SystemClock, TaskSignal, ThreadSignal
from tidegate.flow import Flow, run

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

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

    signal: Any  # a ThreadSignal or a TaskSignal, as `Caller.new_signal` returns it
    until: int
    under_way: Callable[[], bool]


class RunBlocking(NamedTuple):
    """A step that calls a blocking function; the flow receives its result."""

    function: Callable[[], Any]


IOStep = WaitForSocket | WaitForSignal | RunBlocking
IOFlow = Flow[IOStep, T]


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

    def run(self, flow: IOFlow[T]) -> T:
        """Run the flow of this call in this thread."""
        self._runs = runs = _within(flow)
        return next(runs)  # type: ignore[no-any-return]  # a T, by `run`

    @property
    def alive(self) -> bool:
        """Whether `run` is running."""
        return self._runs is not None and self._runs.gi_running  # type: ignore[attr-defined]  # a generator function made it

    def new_signal(self) -> Signal:
        """Return a signal that a thread can wait for."""
        return ThreadSignal()


def _within(flow: IOFlow[Any]) -> Generator[Any, None, None]:
    yield run(flow, perform)


class TaskCaller:
    """A call of a task: alive until its flow has ended, whichever task runs it."""

    __slots__ = ("_flow",)

    def __init__(self) -> None:
        """Not running yet."""
        self._flow: weakref.ref[IOFlow[Any]] | None = None

    def run(self, flow: IOFlow[T]) -> AsyncRun[T]:
        """Return a run of this flow, for a task."""
        self._flow = weakref.ref(flow)
        return AsyncRun(flow)

    @property
    def alive(self) -> bool:
        """Whether steps remain."""
        flow = None if self._flow is None else self._flow()
        return flow is not None and flow.gi_frame is not None  # type: ignore[attr-defined]  # a generator function made it

    def new_signal(self) -> Signal:
        """Return a signal that a task can wait for."""
        return TaskSignal()


def perform(step: IOStep) -> Any:  # noqa: ANN401 - the result of the blocking function
    """Execute a step in this thread."""
    if isinstance(step, RunBlocking):
        return step.function()
    if isinstance(step, WaitForSocket):
        _wait(step)
    else:
        SYSTEM_CLOCK.wait(step.signal, step.until)
    return None


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
    """Runs a flow in a task. If that task is cancelled, another can continue from the same step.

    It differs from `tidegate.flow.run_async` in one rule: a cancellation is not raised in the flow. PostgreSQL executes
    a statement that was sent, whether or not a task waits for it. Only its answer says what to refund, and the
    statement may carry calls of other tasks. So the flow must receive the answer: the store lets a background task
    continue the run, instead of ending the flow and its connection with every cancelled task.
    """

    def __init__(self, flow: IOFlow[T]) -> None:
        """Start at the first step."""
        self._flow = flow
        self._step: IOStep | None = None
        self._waiting: asyncio.Future[Any] | None = None  # of the current step

    async def finish(self) -> T:
        """Run the remaining steps; it can be called again after a cancellation."""
        try:
            while True:
                try:
                    answer = await self._finish_step()
                except (asyncio.CancelledError, GeneratorExit):
                    raise
                except BaseException as error:  # noqa: BLE001 - the flow handles it, or raises it again
                    self._waiting = None
                    self._step = self._flow.throw(error)
                else:
                    self._step = self._flow.send(answer)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]  # a T, by the type of Flow

    async def _finish_step(self) -> Any:  # noqa: ANN401 - the result of the blocking function
        """Wait for the current step, which another task may have begun; before the first one, return None."""
        if self._step is None:
            return None
        if isinstance(self._step, WaitForSignal):
            await SYSTEM_CLOCK.wait_async(self._step.signal, self._step.until)
            return None
        self._waiting = self._waiting or _begin(self._step)
        if not self._waiting.done():
            await asyncio.shield(self._waiting)
        waiting, self._waiting = self._waiting, None
        return waiting.result()

    async def finish_anyway(self) -> T:
        """Run the remaining steps, even if this task is cancelled: they have their own deadline."""
        while True:
            try:
                return await self.finish()
            except asyncio.CancelledError:
                continue

    def stop(self) -> bool:
        """Stop if nothing has been sent to the server; return whether it stopped."""
        if self._step is not None and not (isinstance(self._step, WaitForSignal) and not self._step.under_way()):
            return False
        self._flow.close()
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
