"""Deadlines for what happens elsewhere, in an event loop that may itself be late.

A loop that stands still for a while (a long computation, a suspended machine) hears nothing meanwhile, and finds its
timers due together with the answers. So a deadline here is made of PARTS: each begins only when the loop has come to
look for answers after the one before, and a stop of the loop counts as one part at most, however long it was.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")
PARTS: Final = 4


class DeadlineTimer:
    """Calls a function when so many seconds have passed since `start`, unless it is stopped or started again."""

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        """Wait to be started."""
        self._loop = loop
        self._expired = expired
        self._part = 0.0
        self._left = 0
        self._handle: asyncio.TimerHandle | None = None
        self._end = 0.0

    def start(self, seconds: float) -> None:
        """Expire so many seconds from now."""
        self._part = seconds / PARTS
        self._left = PARTS
        self._end = self._loop.time() + seconds
        if self._handle is None:  # a handle that is under way comes to look in time
            self._handle = self._loop.call_later(self._part, self._look)

    def stop(self) -> None:
        """Do not expire."""
        self._left = 0

    def _look(self) -> None:
        self._handle = None
        if not self._left:
            return
        self._left -= 1
        now = self._loop.time()
        if self._left:
            self._handle = self._loop.call_later(self._part, self._look)
        elif now < self._end:
            self._left = 1
            self._handle = self._loop.call_at(self._end, self._look)
        else:
            self._expired()


async def wait_for(call: Coroutine[Any, Any, T], seconds: float, discard: Callable[[T], object]) -> T:
    """Await a call; raise TimeoutError when it takes longer. A result that comes too late to be used is discarded."""
    task = asyncio.ensure_future(call)
    try:
        for _ in range(PARTS):
            await asyncio.wait((task,), timeout=seconds / PARTS)
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
