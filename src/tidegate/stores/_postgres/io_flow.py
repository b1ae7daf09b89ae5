"""The steps of flows that talk to the server, and how threads and tasks execute them (see `tidegate._runtime.flow`)."""

from __future__ import annotations

import asyncio
import select
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from tidegate._runtime.clock import SystemClock, ThreadSignal
from tidegate._runtime.flow import Flow

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.stores._postgres.pool import ConnectionSlot

T = TypeVar("T")

SYSTEM_CLOCK = SystemClock()  # deadlines are in real time, whichever clock decides


class WaitForSocket(NamedTuple):
    """A step that waits until a socket can be read (or also written to), or until an instant of steady time."""

    socket: int
    write: bool
    until: int


class WaitForSignal(NamedTuple):
    """A step that waits until a signal is set, or until an instant of steady time. `under_way`: the call was sent."""

    signal: Any  # a ThreadSignal or a LoopSignal, as `Caller.new_signal` returns it
    until: int
    under_way: Callable[[], bool]


class GatherCalls(NamedTuple):
    """A step that lets the other tasks of the event loop run once, so that their calls join the statement."""


class RunBlocking(NamedTuple):
    """A step that calls a blocking function; the flow receives its result."""

    function: Callable[[], Any]


IOStep = WaitForSocket | WaitForSignal | GatherCalls | RunBlocking
IOFlow = Flow[IOStep, T]


class CallSignal(Protocol):
    """Resumes a call that waits."""

    def set(self) -> None:
        """Resume the call, from any thread."""

    def set_soon(self) -> None:
        """Resume the call, but not within this method: a finalizer may call it anywhere."""

    def is_set(self) -> bool:
        """Return whether it was set."""


class ThreadCallSignal(ThreadSignal):
    """A signal for the flow of a thread."""

    set_soon = ThreadSignal.set


class Caller:
    """A call of a thread, and the connection that it uses. It lives as long as the flow of the call."""

    __slots__ = ("slot",)
    loop: asyncio.AbstractEventLoop | None = None

    def __init__(self) -> None:
        """Use no connection yet."""
        self.slot: ConnectionSlot | None = None

    def new_signal(self) -> CallSignal:
        """Return a signal that the call can wait for."""
        return ThreadCallSignal()


class TaskCaller(Caller):
    """A call of a task."""

    __slots__ = ("loop",)

    def __init__(self) -> None:
        """Run in the running event loop."""
        super().__init__()
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()

    def run(self, flow: IOFlow[T]) -> LoopRun[T]:
        """Start to run a flow in the event loop."""
        run = LoopRun(flow, self.loop)
        run.advance()
        return run

    def new_signal(self) -> CallSignal:
        """Return a signal that a flow in the event loop can wait for."""
        return LoopSignal(self.loop)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class LoopSignal:
    """A signal for a flow that runs in an event loop. Any thread may set it."""

    __slots__ = ("_loop", "_set", "resume")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Not set yet."""
        self._loop = loop
        self._set = False
        self.resume: Callable[[], object] | None = None  # called when the signal is set

    def set(self) -> None:
        """Resume the flow."""
        if _running_loop() is self._loop:
            self._set = True
            self._resume()
        else:
            self.set_soon()

    def set_soon(self) -> None:
        """Resume the flow in an iteration of the event loop."""
        self._set = True
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._resume)

    def _resume(self) -> None:
        if self.resume is not None:
            self.resume()

    def is_set(self) -> bool:
        """Return whether it was set."""
        return self._set


def perform(step: IOStep) -> Any:  # noqa: ANN401 - the result of the blocking function
    """Execute a step in this thread."""
    if isinstance(step, RunBlocking):
        return step.function()
    if isinstance(step, WaitForSocket):
        _wait(step)
    elif isinstance(step, WaitForSignal):
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


class LoopRun(Generic[T]):
    """Runs a flow in an event loop by callbacks. The cancellation of a task that waits for it does not reach the flow.

    PostgreSQL executes a statement that was sent, whether or not a task waits for it. Only its answer says what to
    refund, and the statement may carry calls of other tasks. So the flow goes on until it has received the answer.
    """

    def __init__(self, flow: IOFlow[T], loop: asyncio.AbstractEventLoop) -> None:
        """Prepare to run a flow; `advance` starts it."""
        self._flow = flow
        self._loop = loop
        self._step: IOStep | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.result: asyncio.Future[T] = loop.create_future()

    def advance(self, value: Any = None, error: BaseException | None = None) -> None:  # noqa: ANN401 - the result of the blocking function
        """Continue with the result of the last step, up to the next one."""
        try:
            self._clear()
            self._step = self._flow.send(value) if error is None else self._flow.throw(error)
            self._begin(self._step)
        except StopIteration as done:
            self._finish(done.value, None)
        except BaseException as raised:  # noqa: BLE001 - raised by the task that waits for the result
            self._clear()
            self._flow.close()  # if the step could not begin
            self._finish(None, raised)

    def _finish(self, value: Any, error: BaseException | None) -> None:  # noqa: ANN401 - a T, by the type of Flow
        result = self.detach()
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)
            result.exception()  # so that asyncio does not log it as never retrieved if the task was cancelled

    def _begin(self, step: IOStep) -> None:
        if isinstance(step, WaitForSignal):
            step.signal.resume = partial(self._resume, step)
            self._set_timer(step, step.until)
            if step.signal.is_set():
                self._loop.call_soon(self._resume, step)
        elif isinstance(step, WaitForSocket):
            self._loop.add_reader(step.socket, self._resume, step)
            if step.write:
                self._loop.add_writer(step.socket, self._resume, step)
            self._set_timer(step, step.until)
        elif isinstance(step, GatherCalls):
            self._loop.call_soon(self._resume, step)
        else:
            self._loop.run_in_executor(None, step.function).add_done_callback(self._resume_with)

    def _set_timer(self, step: IOStep, until: int) -> None:
        self._timer = self._loop.call_later(max(0, until - SYSTEM_CLOCK.steady()) / 1_000_000, self._resume, step)

    def _resume(self, step: IOStep) -> None:
        """Continue after a step that waits, unless the flow has continued before, or was stopped."""
        if self._step is step:
            self.advance()

    def _resume_with(self, function: asyncio.Future[Any]) -> None:
        error = asyncio.CancelledError() if function.cancelled() else function.exception()
        self.advance(None if error else function.result(), error)

    def _clear(self) -> None:
        """End the current step: its callbacks are not called any more, or have no effect."""
        step, self._step = self._step, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if isinstance(step, WaitForSignal):
            step.signal.resume = None
        elif isinstance(step, WaitForSocket):
            self._loop.remove_reader(step.socket)
            if step.write:
                self._loop.remove_writer(step.socket)

    def detach(self) -> asyncio.Future[T]:
        """Return a future of the result: a new one if it was cancelled with the task that waited for it."""
        if self.result.cancelled():
            self.result = self._loop.create_future()
        return self.result

    def stop(self) -> bool:
        """End the flow if it has sent nothing to the server; return whether it did."""
        step = self._step
        if not isinstance(step, GatherCalls) and not (isinstance(step, WaitForSignal) and not step.under_way()):
            return False
        self._clear()
        self._flow.close()
        return True


async def finish(result: asyncio.Future[T]) -> T:
    """Wait for a result even if this task is cancelled: the flow has its own deadline."""
    while not result.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait((result,))
    return result.result()
