"""Shows on a terminal that a command is still working: a line with the time that has passed, after one second."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TextIO

from tidegate._runtime.background_thread import BackgroundThread
from tidegate._runtime.clock import SystemClock
from tidegate.core._bounds import SECOND

if TYPE_CHECKING:
    from tidegate._runtime.clock import Clock

SHOW_AFTER: Final = SECOND  # microseconds
UPDATE_EVERY: Final = SECOND // 4
SIGNS: Final = "⠋⠙⠸⠴⠦⠇"
CLEAR_LINE: Final = "\r\x1b[K"


class Progress:
    """A line that a thread updates until `end`."""

    def __init__(self, what: str, stream: TextIO, clock: Clock | None = None) -> None:
        """Start measuring the time."""
        self._what = what
        self._stream = stream
        self._clock = clock or SystemClock()
        self._ended = False
        self._steps = 0
        self._started = self._clock.steady()
        self._thread = BackgroundThread(self._update, "tidegate-progress", delay=SHOW_AFTER / SECOND, clock=self._clock)
        self._thread.start()

    def show(self, what: str) -> None:
        """Show this from now on."""
        self._what = what

    def _update(self) -> int | None:
        if self._ended:
            if self._steps:
                self._write(CLEAR_LINE)
            return None
        passed = (self._clock.steady() - self._started) // SECOND
        self._write(f"{CLEAR_LINE}{SIGNS[self._steps % len(SIGNS)]} {self._what}, {passed}s")
        self._steps += 1
        return self._clock.steady() + UPDATE_EVERY

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def end(self) -> None:
        """Remove the line."""
        self._ended = True
        self._thread.stop()
