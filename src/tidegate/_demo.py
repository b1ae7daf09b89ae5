"""A short live demonstration in the terminal: `python -m tidegate._demo`.

Three clients call at different rates through one limiter. The table shows live what each client has left, and how many
of its calls were admitted and denied. Then a fourth client waits for its permits instead.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tidegate import Limiter
from tidegate._policy.durations import format_exact_duration
from tidegate._runtime.clock import SystemClock, ThreadSignal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CALLS_PER_SECOND = {"calm": 2, "busy": 6, "greedy": 40}  # calls per second
LIMITS = "5/1s burst=10"
DEMO_SECONDS = 6
FRAMES_PER_SECOND = 10  # per second
BAR_WIDTH = 30


def main(write: Callable[[str], object] = print) -> dict[str, Any]:
    """Run the demonstration, and return its counts; redraws in place on a terminal, writes a few frames elsewhere."""
    live = write is print and sys.stdout.isatty()
    limiter = Limiter(LIMITS)
    admitted, denied = dict.fromkeys(CALLS_PER_SECOND, 0), dict.fromkeys(CALLS_PER_SECOND, 0)
    write(f'Limiter("{LIMITS}"): 5 permits per second for each client, and a burst of up to 10.\n')
    for frame in range(DEMO_SECONDS * FRAMES_PER_SECOND + 1):
        for client, rate in CALLS_PER_SECOND.items():
            for _ in range(rate * (frame + 1) // FRAMES_PER_SECOND - rate * frame // FRAMES_PER_SECOND):
                counts = admitted if limiter.try_acquire(client) else denied
                counts[client] += 1
        if live or frame % (2 * FRAMES_PER_SECOND) == 0:
            if live and frame:
                write(f"\x1b[{len(CALLS_PER_SECOND) + 2}A")
            for line in draw(limiter, frame / FRAMES_PER_SECOND, admitted, denied):
                write(line)
            if not live:
                write("")
        sleep(1 / FRAMES_PER_SECOND)
    write("\nA client can also wait: acquire() sleeps exactly until its permits are available.\n")
    started = SystemClock.steady()
    waited = []
    for number in range(1, 8):
        limiter.acquire("patient", cost=4)
        waited.append((SystemClock.steady() - started) / 1e6)
        write(f"  call {number} after {format_exact_duration(waited[-1])}")
    write("\nNext: start the service, with its dashboard and demonstration traffic: tidegate start --demo")
    return {"limit": LIMITS, "admitted": admitted, "denied": denied, "waited": waited}


def draw(limiter: Limiter, second: float, admitted: dict[str, int], denied: dict[str, int]) -> Iterator[str]:
    """Draw a line for each client."""
    yield f"  after {format_exact_duration(second):<7} {'permits left':>{BAR_WIDTH - 1}}   admitted  denied"
    for client, rate in CALLS_PER_SECOND.items():
        left = limiter.peek(client, cost=0).remaining
        bar = "█" * (left * BAR_WIDTH // 10)
        yield f"  {client:6} {rate:2}/s  {bar:·<{BAR_WIDTH}} {left:3} {admitted[client]:8} {denied[client]:7}"


def sleep(seconds: float) -> None:
    """Wait in real time."""
    clock = SystemClock()
    clock.wait(ThreadSignal(), clock.steady() + round(seconds * 1_000_000))


if __name__ == "__main__":
    main()
