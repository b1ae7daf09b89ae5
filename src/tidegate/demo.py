"""A short live demonstration in the terminal: `python -m tidegate.demo`.

Three clients call at different rates through one limiter. The table shows live what each client has left, and how many
of its calls were admitted and denied. Then a fourth client waits for its permits instead.
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


def main(write: Callable[[str], object] = print) -> dict[str, Any]:
    """Run the demonstration, and return its counts; redraws in place on a terminal, writes a few frames elsewhere."""
    live = write is print and sys.stdout.isatty()
    limiter = Limiter(RULE)
    admitted, denied = dict.fromkeys(PACE, 0), dict.fromkeys(PACE, 0)
    write(f'Limiter("{RULE}"): 5 permits per second for each client, and a burst of up to 10.\n')
    for frame in range(SECONDS * FRAMES + 1):
        for client, rate in PACE.items():
            for _ in range(rate * (frame + 1) // FRAMES - rate * frame // FRAMES):
                counts = admitted if limiter.try_acquire(client) else denied
                counts[client] += 1
        if live or frame % (2 * FRAMES) == 0:
            if live and frame:
                write(f"\x1b[{len(PACE) + 2}A")
            for line in draw(limiter, frame / FRAMES, admitted, denied):
                write(line)
            if not live:
                write("")
        sleep(1 / FRAMES)
    write("\nA client can also wait: acquire() sleeps exactly until its permits are available.\n")
    started = SystemClock.steady()
    waited = []
    for number in range(1, 8):
        limiter.acquire("patient", cost=4)
        waited.append((SystemClock.steady() - started) / 1e6)
        write(f"  call {number} after {waited[-1]:5.2f} s")
    write("\nNext: read README.md, or start the service with its dashboard: make run")
    return {"limit": RULE, "admitted": admitted, "denied": denied, "waited": waited}


def draw(limiter: Limiter, second: float, admitted: dict[str, int], denied: dict[str, int]) -> Iterator[str]:
    """Draw a line for each client."""
    yield f"  after {second:4.1f} s {'permits left':>{WIDTH}}   admitted  denied"
    for client, rate in PACE.items():
        left = limiter.peek(client, cost=0).remaining
        bar = "█" * (left * WIDTH // 10)
        yield f"  {client:6} {rate:2}/s  {bar:·<{WIDTH}} {left:3} {admitted[client]:8} {denied[client]:7}"


def sleep(seconds: float) -> None:
    """Wait in real time."""
    clock = SystemClock()
    clock.wait(ThreadSignal(), clock.steady() + round(seconds * 1_000_000))


if __name__ == "__main__":
    main()
