"""Shows on a terminal that a command is still working: a line with the time that has passed, after one second."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, TextIO

from tidegate._runtime.clock import SystemClock, ThreadSignal
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
        self._signal = ThreadSignal()
        self._ended = False
        self._started = self._clock.steady()
        self._thread = threading.Thread(target=self._run, name="tidegate-progress", daemon=True)
        self._thread.start()

    def show(self, what: str) -> None:
        """Show this from now on."""
        self._what = what

    def _run(self) -> None:
        due, step = self._started + SHOW_AFTER, 0
        while True:
            self._clock.wait(self._signal, due)
            if self._ended:
                break
            self._signal.clear()
            passed = (self._clock.steady() - self._started) // SECOND
            self._write(f"{CLEAR_LINE}{SIGNS[step % len(SIGNS)]} {self._what}, {passed}s")
            due, step = self._clock.steady() + UPDATE_EVERY, step + 1
        if step:
            self._write(CLEAR_LINE)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def end(self) -> None:
        """Remove the line."""
        self._ended = True
        self._signal.set()
        self._thread.join()
