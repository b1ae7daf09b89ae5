"""A deadline for each call, with one timer for all: a timer per call would cost a tenth of a call."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


class CallDeadlines:
    """Ends calls that take longer than a fixed time. Use one object for each length of time, in one event loop."""

    def __init__(self, seconds: float) -> None:
        """Allow each call this many seconds."""
        self.seconds = seconds
        self.active: dict[CallDeadline, None] = {}  # in the order of their deadlines, since all are equally long
        self._timer: asyncio.TimerHandle | None = None

    def start_timer(self, loop: asyncio.AbstractEventLoop, at: float) -> None:
        """Check at this time, if no earlier check is due."""
        if self._timer is None:
            self._timer = loop.call_at(at, self._check, loop)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        for deadline in list(self.active):
            if deadline.at > loop.time():
                self.start_timer(loop, deadline.at)
                return
            deadline.expire()


class CallDeadline:
    """The deadline of one call: `with CallDeadline(deadlines): …` raises TimeoutError, as `asyncio.timeout` does."""

    __slots__ = ("_deadlines", "_expired", "_task", "at")

    def __init__(self, deadlines: CallDeadlines) -> None:
        """Use the time of these deadlines."""
        self._deadlines = deadlines

    def __enter__(self) -> None:
        """Begin."""
        loop = asyncio.get_running_loop()
        self._task: asyncio.Task[object] | None = asyncio.current_task(loop)
        self._expired = False
        self.at: float = loop.time() + self._deadlines.seconds
        self._deadlines.active[self] = None
        self._deadlines.start_timer(loop, self.at)

    def expire(self) -> None:
        """Cancel the call."""
        self._deadlines.active.pop(self, None)
        if self._task is not None:
            self._expired = True
            self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """End; raise TimeoutError if the deadline, and nothing else, has cancelled the call."""
        self._deadlines.active.pop(self, None)
        ended = self._expired and self._task is not None and self._task.uncancel() == 0
        if ended and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise TimeoutError from error
