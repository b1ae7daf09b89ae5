"""Repeats a view until q or Ctrl-C is pressed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate._cli.keyboard import Keyboard
from tidegate._runtime.clock import SystemClock
from tidegate.core._bounds import SECOND

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate._cli.output import Output
    from tidegate._runtime.clock import Clock

QUIT_KEYS: Final = ("q", "Q", "\x04")  # \x04 is Ctrl-D
QUIT_HELP: Final = "q quits"


def watch(
    show: Callable[[], object],
    output: Output,
    interval: float | None,
    *,
    press: Callable[[str], bool] | None = None,
    footer: Callable[[], str] = str,
    clock: Clock | None = None,
    rounds: int | None = None,
) -> None:
    """Call `show` once (`interval` None), or every `interval` seconds until q is pressed, in place on a terminal.

    `press` is called for other keys and returns whether the view changes. `footer` returns the help of these keys.
    `rounds` ends the view after that many updates.
    """
    if interval is None:
        show()
        return
    clock = clock or SystemClock()
    shown = 0
    with Keyboard(clock, enabled=output.live) as keyboard:
        while True:
            help_ = "  ".join(filter(None, (QUIT_HELP if keyboard.active else "Ctrl-C ends", footer())))
            with output.frame(help_):
                show()
            shown += 1
            if shown == rounds or _quits(keyboard, clock, interval, press):
                return


def _quits(keyboard: Keyboard, clock: Clock, interval: float, press: Callable[[str], bool] | None) -> bool:
    """Wait until the next update is due; return whether the user quits."""
    due = clock.steady() + round(interval * SECOND)
    while (left := due - clock.steady()) > 0:
        key = keyboard.read(left / SECOND)
        if key in QUIT_KEYS:
            return True
        if key and press is not None and press(key):
            return False
    return False
