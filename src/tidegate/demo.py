"""A short live demonstration in the terminal: `python -m tidegate.demo`.

Three clients send at their own pace through one limit; the picture shows what each has left, what was admitted and what
was denied, while it happens. Then a patient client waits for its permits instead.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tidegate import Limiter
from tidegate.clock import SystemClock, ThreadSignal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PACE = {"calm": 2, "busy": 6, "greedy": 40}  # calls per second
RULE = "5/1s burst=10"
SECONDS = 6
FRAMES = 10  # per second
WIDTH = 30


def main(say: Callable[[str], object] = print) -> dict[str, Any]:
    """Play the demonstration; redraw in place on a terminal, print a few frames elsewhere. Gives what came of it."""
    live = say is print and sys.stdout.isatty()
    limiter = Limiter(RULE)
    admitted, denied = dict.fromkeys(PACE, 0), dict.fromkeys(PACE, 0)
    say(f'Limiter("{RULE}"): 5 permits a second per client, 10 saved up at most.\n')
    for frame in range(SECONDS * FRAMES + 1):
        for client, pace in PACE.items():
            for _ in range(pace * (frame + 1) // FRAMES - pace * frame // FRAMES):
                counts = admitted if limiter.try_acquire(client) else denied
                counts[client] += 1
        if live or frame % (2 * FRAMES) == 0:
            if live and frame:
                say(f"\x1b[{len(PACE) + 2}A")
            for line in draw(limiter, frame / FRAMES, admitted, denied):
                say(line)
            if not live:
                say("")
        pause(1 / FRAMES)
    say("\nAnd whoever can wait, waits: acquire() sleeps exactly until its permit is there.\n")
    began = SystemClock.steady()
    waited = []
    for number in range(1, 8):
        limiter.acquire("patient", cost=4)
        waited.append((SystemClock.steady() - began) / 1e6)
        say(f"  permit {number} after {waited[-1]:5.2f} s")
    say("\nRead on in README.md, or see the service and its dashboard: make run")
    return {"limit": RULE, "admitted": admitted, "denied": denied, "waited": waited}


def draw(limiter: Limiter, second: float, admitted: dict[str, int], denied: dict[str, int]) -> Iterator[str]:
    """Draw a line per client."""
    yield f"  after {second:4.1f} s {'permits left':>{WIDTH}}   admitted  denied"
    for client, pace in PACE.items():
        left = limiter.peek(client, cost=0).remaining
        bar = "█" * (left * WIDTH // 10)
        yield f"  {client:6} {pace:2}/s  {bar:·<{WIDTH}} {left:3} {admitted[client]:8} {denied[client]:7}"


def pause(seconds: float) -> None:
    """Let real time pass."""
    clock = SystemClock()
    clock.wait(ThreadSignal(), clock.steady() + round(seconds * 1_000_000))


if __name__ == "__main__":
    main()
