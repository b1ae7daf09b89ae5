"""Reads single keys from a terminal while a view is shown, and restores the terminal however the command ends."""

from __future__ import annotations

import os
import select
import signal
import sys
from typing import TYPE_CHECKING, Any, Final, Self

from tidegate._runtime.clock import SystemClock, ThreadSignal
from tidegate.core._bounds import SECOND

if TYPE_CHECKING:
    from types import FrameType

    from tidegate._runtime.clock import Clock

END_SIGNALS: Final = ("SIGTERM", "SIGHUP")
SIGNAL_EXIT: Final = 128  # a shell adds the number of the signal


class Keyboard:
    """The keys of the terminal, one at a time and not echoed. A context manager.

    Without a terminal, or on a system without termios, no key is ever read, and `read` only waits. Ctrl-C still raises
    KeyboardInterrupt. SIGTERM and SIGHUP end the command, and Ctrl-Z stops it, after the terminal was restored.
    """

    def __init__(self, clock: Clock | None = None, *, enabled: bool = True) -> None:
        """Read from standard input; `clock` is what `read` waits on without a terminal."""
        self._clock = clock or SystemClock()
        self._enabled = enabled and sys.stdin is not None and sys.stdin.isatty()
        self._saved: list[Any] | None = None
        self._handlers: dict[int, Any] = {}

    @property
    def active(self) -> bool:
        """Whether keys are read."""
        return self._saved is not None

    def __enter__(self) -> Self:
        """Read keys without waiting for the end of the line."""
        if not self._enabled:
            return self
        try:
            import termios  # noqa: PLC0415 - not on Windows
        except ImportError:
            return self
        self._saved = termios.tcgetattr(sys.stdin.fileno())
        try:
            for name in END_SIGNALS:
                self._handle(getattr(signal, name), end_on_signal)
            self._handle(signal.SIGTSTP, self._stop)
            self._set_mode()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _handle(self, number: int, handler: Any) -> None:  # noqa: ANN401 - a function or a constant of `signal`
        self._handlers[number] = signal.signal(number, handler)

    def __exit__(self, *_: object) -> None:
        """Restore the terminal and the handlers of signals."""
        self._restore_mode()
        self._saved = None
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def _set_mode(self) -> None:
        import tty  # noqa: PLC0415 - not on Windows

        tty.setcbreak(sys.stdin.fileno())

    def _restore_mode(self) -> None:
        if self._saved is not None:
            import termios  # noqa: PLC0415 - not on Windows

            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._saved)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        """Stop as Ctrl-Z does; go on when the shell continues the command."""
        self._restore_mode()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, self._stop)
        self._set_mode()

    def read(self, seconds: float) -> str:
        """Return the next key; an empty string if none is pressed within this time."""
        if self._saved is None:
            self._clock.wait(ThreadSignal(), self._clock.steady() + round(seconds * SECOND))
            return ""
        ready, _, _ = select.select([sys.stdin.fileno()], [], [], seconds)
        return os.read(sys.stdin.fileno(), 1).decode("ascii", "replace") if ready else ""


def end_on_signal(number: int, _frame: FrameType | None) -> None:
    """End the command: the exception passes through the block that restores the terminal."""
    raise SystemExit(SIGNAL_EXIT + number)
