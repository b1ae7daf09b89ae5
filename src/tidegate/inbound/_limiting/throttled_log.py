"""Logs messages that any client can cause, at a limited rate."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tidegate.observe.logs import LogThrottle

if TYPE_CHECKING:
    from collections.abc import Callable

log: logging.Logger = logging.getLogger("tidegate.inbound")


class ThrottledLog:
    """Writes a number of lines per second for each message, and how many others there were."""

    def __init__(self, burst: int, now: Callable[[], int]) -> None:
        """Write at most this many lines per second for each message; `now` returns the time in microseconds."""
        self._throttle = LogThrottle(burst)
        self._now = now

    def log_throttled(self, level: int, message: str, *args: object) -> None:
        """Write a line, unless there were too many of its message."""
        now = self._now()
        self._write_suppressed(now)
        if self._throttle.may_write((level, message), now):
            log.log(level, message, *args)

    def flush(self) -> None:
        """Write how many lines were suppressed."""
        self._write_suppressed(None)

    def _write_suppressed(self, now: int | None) -> None:
        for name, lines in self._throttle.unwritten(now):
            level, message = name if isinstance(name, tuple) else (logging.WARNING, "other messages")
            log.log(level, "%s: %d more within one second", message.replace("%s", "…"), lines)
