"""Waiting, in two colours: what talks to the server is written once, as generators of steps, and driven by these."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, NamedTuple, TypeVar

from tidegate.clock import SystemClock

T = TypeVar("T")

CLOCK = SystemClock()  # deadlines are real time, whatever clock decides


class Wait(NamedTuple):
    """A step that waits until a socket can be read (or also written to), or until an instant of steady time."""

    socket: int
    write: bool
    until: int


class Sleep(NamedTuple):
    """A step that waits until a signal is set, or until an instant of steady time; perhaps for what is under way."""

    signal: Any  # a ThreadSignal or a TaskSignal, whichever the loop that waits takes
    until: int
    under_way: Callable[[], bool]


class Work(NamedTuple):
    """A step that blocks for a while, doing this; it is sent what the function returns."""

    function: Callable[[], Any]


Step = Wait | Sleep | Work
Steps = Generator[Step, Any, T]


def drive(steps: Steps[T]) -> T:
    """Take the steps in this thread."""
    answer = None
    with closing(steps):
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]  # a T, by the type of Steps
            answer = None
            if isinstance(step, Wait):
                _wait(step)
            elif isinstance(step, Sleep):
                CLOCK.wait(step.signal, step.until)
            else:
                answer = step.function()


def _wait(step: Wait) -> None:
    poll = select.poll()
    poll.register(step.socket, select.POLLIN | (select.POLLOUT if step.write else 0))
    poll.poll(max(0, step.until - CLOCK.steady()) / 1000)


def readable(socket: int) -> bool:
    """Tell whether something has arrived on a socket, if only its end."""
    poll = select.poll()
    poll.register(socket, select.POLLIN)
    return bool(poll.poll(0))


async def drive_async(steps: Steps[T], *, stubborn: bool = False) -> tuple[T, asyncio.CancelledError | None]:
    """Take the steps in this task; also tell whether the task was cancelled meanwhile.

    What has been sent to the server cannot be called back, so a task that is cancelled then stays until the answer is
    there (it waits no longer than the deadline), and its caller knows what there is to undo. Before that, while it
    waits for a connection, it goes at once, unless it is stubborn or another call has taken its own along.
    """
    answer = None
    cancelled: asyncio.CancelledError | None = None
    with closing(steps):
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as done:
                return done.value, cancelled
            except Exception:
                if cancelled is not None:
                    raise cancelled from None
                raise
            answer = None
            if isinstance(step, Sleep):
                try:
                    await CLOCK.wait_async(step.signal, step.until)
                except asyncio.CancelledError as error:
                    if not stubborn and not step.under_way():
                        raise
                    cancelled = error
                continue
            waiting = _ready(step) if isinstance(step, Wait) else _elsewhere(step)
            while not waiting.done():
                try:
                    await asyncio.shield(waiting)
                except asyncio.CancelledError as error:
                    cancelled = error
            answer = waiting.result()


def _elsewhere(step: Work) -> asyncio.Future[Any]:
    """Let a thread do the work."""
    return asyncio.ensure_future(asyncio.to_thread(step.function))


def _ready(step: Wait) -> asyncio.Future[None]:
    """Give a future that is done when the socket is ready or the time is over."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def done() -> None:
        if not future.done():
            loop.remove_reader(step.socket)
            if step.write:
                loop.remove_writer(step.socket)
            timer.cancel()
            future.set_result(None)

    timer = loop.call_later(max(0, step.until - CLOCK.steady()) / 1_000_000, done)
    loop.add_reader(step.socket, done)
    if step.write:
        loop.add_writer(step.socket, done)
    return future
