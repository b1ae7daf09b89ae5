"""Timeouts for network calls in an event loop that may itself be blocked.

A blocked loop (a long computation, a suspended machine) reads nothing meanwhile, and then finds its timers expired
together with the replies. So a timeout is divided into DEADLINE_STEPS steps. Each starts only after the loop has read
replies since the previous one ended, so a blocked loop uses up at most one step, however long it was blocked.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")
DEADLINE_STEPS: Final = 4


class DeadlineTimer:
    """Calls a function after a timeout, unless it is stopped or started again before."""

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        """Call `expired` after the timeout; `start` starts the timer."""
        self._loop = loop
        self._expired = expired
        self._part = 0.0
        self._left = 0
        self._handle: asyncio.TimerHandle | None = None
        self._end = 0.0

    def start(self, seconds: float) -> None:
        """Expire after this many seconds."""
        self._part = seconds / DEADLINE_STEPS
        self._left = DEADLINE_STEPS
        self._end = self._loop.time() + seconds
        if self._handle is None:  # else the pending handle continues with the new timeout
            self._handle = self._loop.call_later(self._part, self._check)

    def stop(self) -> None:
        """Do not expire."""
        self._left = 0

    def _check(self) -> None:
        self._handle = None
        if not self._left:
            return
        self._left -= 1
        now = self._loop.time()
        if self._left:
            self._handle = self._loop.call_later(self._part, self._check)
        elif now < self._end:
            self._left = 1
            self._handle = self._loop.call_at(self._end, self._check)
        else:
            self._expired()


async def wait_for(call: Coroutine[Any, Any, T], seconds: float, discard: Callable[[T], object]) -> T:
    """Await a call; raise TimeoutError if it takes longer. A result that arrives too late is passed to `discard`."""
    task = asyncio.ensure_future(call)
    try:
        for _ in range(DEADLINE_STEPS):
            await asyncio.wait((task,), timeout=seconds / DEADLINE_STEPS)
            if task.done():
                return task.result()
    except asyncio.CancelledError:
        _abandon(task, discard)
        raise
    _abandon(task, discard)
    raise TimeoutError


def _abandon(task: asyncio.Task[T], discard: Callable[[T], object]) -> None:
    def ended(task: asyncio.Task[T]) -> None:
        if not task.cancelled() and task.exception() is None:
            discard(task.result())

    task.cancel()
    task.add_done_callback(ended)
