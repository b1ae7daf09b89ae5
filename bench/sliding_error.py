"""Measure how far the approximate sliding_window is from an exact rolling window: `python bench/sliding_error.py`.

Each kind of traffic runs in virtual time against a quota of 100 per minute. Counted afterwards, over every rolling
minute: the most calls that were admitted (an exact window never exceeds the quota), and the calls that were denied
although the rolling minute before them held fewer than the quota.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from typing import TYPE_CHECKING

from tidegate import Limiter
from tidegate.testing import ManualClock

if TYPE_CHECKING:
    from collections.abc import Iterator

QUOTA, PERIOD, HOURS = 100, 60.0, 4
START = 1_728_000_000


def poisson(rate: float, rng: random.Random) -> Iterator[float]:
    """Calls at random, `rate` times the quota on average."""
    at = 0.0
    while True:
        at += rng.expovariate(rate * QUOTA / PERIOD)
        yield at


def bursts(rng: random.Random) -> Iterator[float]:
    """A burst of up to the quota every now and then."""
    at = 0.0
    while True:
        at += rng.uniform(5, 90)
        for _ in range(rng.randint(1, QUOTA)):
            at += 0.001
            yield at


def at_the_seam() -> Iterator[float]:
    """The worst there is: the whole quota at the end of a window, then everything that becomes free."""
    at = 0.0
    for minute in range(HOURS * 60):
        at = minute * PERIOD + (PERIOD - 0.2 if minute % 3 == 0 else 0)
        while at < (minute + 1) * PERIOD - (0.3 if minute % 3 == 2 else 0):
            if minute % 3 != 2:  # every third window is a rest
                yield at
            at += 0.001 if minute % 3 == 0 else 0.1


def measure(times: Iterator[float]) -> tuple[int, int, float, float]:
    """Give calls, calls admitted, the most in a rolling period against the quota, and the share denied needlessly."""
    clock = ManualClock(START)
    limiter = Limiter(f"{QUOTA}/1m sliding_window", clock=clock)
    admitted: list[float] = []
    calls = needless = 0
    for at in times:
        if at > HOURS * 3600:
            break
        clock.advance(START + at - clock.now())
        calls += 1
        in_window = len(admitted) - bisect_right(admitted, at - PERIOD)
        if limiter.try_acquire("k"):
            admitted.append(at)
        elif in_window < QUOTA:
            needless += 1
    most = max(len(admitted[: i + 1]) - bisect_right(admitted, at - PERIOD) for i, at in enumerate(admitted))
    return calls, len(admitted), most / QUOTA, needless / calls


def main() -> None:
    """Print a row for each kind of traffic."""
    kinds = {
        "random calls at 0.8 of the quota": poisson(0.8, random.Random(1)),
        "random calls at the quota": poisson(1.0, random.Random(2)),
        "random calls at 1.5 times the quota": poisson(1.5, random.Random(3)),
        "random bursts": bursts(random.Random(4)),
        "quota at the end of a window, then all that is free": at_the_seam(),
    }
    print(f"{'traffic':52} {'calls':>7} {'admitted':>9} {'most/quota':>11} {'denied needlessly':>18}")
    for kind, times in kinds.items():
        calls, admitted, most, needless = measure(times)
        print(f"{kind:52} {calls:7} {admitted:9} {most:11.2f} {needless:18.1%}")


if __name__ == "__main__":
    main()
