"""Draws what each algorithm admits over time, as SVG. The decisions are those of the real core, in virtual time.

    python tools/site_pictures.py FOLDER

`make site` inserts the pictures into docs/concepts/algorithms.md where it says `<!-- picture: NAME -->`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final, NamedTuple

from tidegate import Limit, Limiter
from tidegate.testing import ManualClock

START: Final = 1_728_000_000  # the start of a minute, hour and day in UTC
SECONDS: Final = 210  # that a picture shows
WINDOW: Final = 60
CALL_DURATION: Final = 12  # of a call that holds a slot, in seconds
# When the calls arrive: a burst before the end of a minute, a burst after it, then one call every four seconds.
BURSTS: Final = (*(45 + 1.1 * n for n in range(13)), *(62 + 1.1 * n for n in range(13)))
CALLS: Final = (*BURSTS, *(float(second) for second in range(80, SECONDS - 4, 4)))

LIMITS: Final = {
    "token_bucket": Limit(10, "1m"),
    "fixed_window": Limit(10, "1m", "fixed_window"),
    "calendar_window": Limit(10, "minute", "calendar_window"),
    "sliding_window": Limit(10, "1m", "sliding_window"),
    "sliding_log": Limit(10, "1m", "sliding_log"),
    "concurrency": Limit(4, "1m", "concurrency"),
}

WIDTH, HEIGHT = 720, 190
LEFT, RIGHT, TOP, FLOOR = 36, 696, 34, 118  # of the chart of permits
CALLS_TOP, CALLS_FLOOR = 128, 156  # of the row of calls
ALLOWED, DENIED = "#2a9d6f", "#d1495b"


class Call(NamedTuple):
    """A call, and what the core decided."""

    at: float
    allowed: bool
    remaining: int


def simulate(limit: Limit) -> tuple[list[Call], list[tuple[float, int]]]:
    """Return the decisions on all calls, and the permits that are left in each half second."""
    clock = ManualClock(start=START)
    limiter = Limiter(limit, clock=clock)
    decided: list[Call] = []
    levels: list[tuple[float, int]] = []
    ends: list[float] = []
    moments = sorted([*((at, True) for at in CALLS), *((step / 2, False) for step in range(2 * SECONDS))])
    now = 0.0
    for at, is_call in moments:
        while ends and ends[0] <= at:  # a call that holds a slot ends
            clock.advance(ends[0] - now)
            now = ends.pop(0)
            limiter.release("key")
        clock.advance(at - now)
        now = at
        if is_call:
            decision = limiter.try_acquire("key")
            decided.append(Call(at, decision.allowed, decision.remaining))
            if decision.allowed and limit.algorithm == "concurrency":
                ends.append(at + CALL_DURATION)
        levels.append((at, limiter.usage("key")[limit.name].remaining))
    limiter.close()
    return decided, levels


def most_in_a_window(calls: list[Call]) -> int:
    """Return how many calls are admitted in the minute with the most."""
    times = [call.at for call in calls if call.allowed]
    return max(sum(1 for other in times if at <= other < at + WINDOW) for at in times)


def draw(name: str) -> str:
    """Return the picture of an algorithm."""
    limit = LIMITS[name]
    calls, levels = simulate(limit)
    admitted = sum(call.allowed for call in calls)
    counts = f"{admitted} of {len(calls)} calls admitted"
    title = f"{name}, {limit.quota} per minute: {counts}, at most {most_in_a_window(calls)} in any minute"
    if name == "concurrency":
        title = f"{name}, {limit.quota} slots, calls of {CALL_DURATION} s: {counts}"
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}" '
            'style="width:100%;max-width:60rem" fill="currentColor" font-family="sans-serif" font-size="11">'
        ),
        f'<text x="{LEFT}" y="16" font-size="12">{title}</text>',
    ]
    for second in range(0, SECONDS + 1, 30):
        width = 1 if second % WINDOW == 0 else 0.4
        parts.append(
            f'<line x1="{x(second):.1f}" x2="{x(second):.1f}" y1="{TOP}" y2="{CALLS_FLOOR}" stroke="currentColor" '
            f'stroke-opacity=".3" stroke-width="{width}"/>'
            f'<text x="{x(second):.1f}" y="{CALLS_FLOOR + 16}" text-anchor="middle">{second} s</text>'
        )
    for level in (0, limit.burst):
        y = height(level, limit.burst)
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{level}</text>')
    path = " ".join(f"{x(at):.1f},{height(level, limit.burst):.1f}" for at, level in steps(levels))
    parts.append(f'<polyline points="{path}" fill="none" stroke="{ALLOWED}" stroke-width="1.5"/>')
    parts.append(f'<text x="{LEFT}" y="{TOP - 6}" font-size="10" opacity=".8">permits left</text>')
    for call in calls:
        top = CALLS_TOP if call.allowed else (CALLS_TOP + CALLS_FLOOR) / 2
        stroke = f'stroke="{ALLOWED}"' if call.allowed else f'stroke="{DENIED}" stroke-dasharray="2 2"'
        place = f'x1="{x(call.at):.1f}" x2="{x(call.at):.1f}" y1="{top}" y2="{CALLS_FLOOR}"'
        parts.append(f'<line {place} {stroke} stroke-width="2"/>')
    parts.append(
        f'<text x="{LEFT}" y="{HEIGHT - 2}" font-size="10" opacity=".8">calls: long lines are admitted, short dashed '
        "lines are denied</text></svg>"
    )
    return "".join(parts)


def x(second: float) -> float:
    """Return the place of a time."""
    return LEFT + (RIGHT - LEFT) * second / SECONDS


def height(level: float, most: int) -> float:
    """Return the place of a number of permits."""
    return FLOOR - (FLOOR - TOP) * level / most


def steps(levels: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return the corners of a line that is constant between changes."""
    corners = [levels[0]]
    for at, level in levels[1:]:
        if level != corners[-1][1]:
            corners += [(at, corners[-1][1]), (at, level)]
    return [*corners, (levels[-1][0], corners[-1][1])]


def main(folder: str) -> None:
    """Write the pictures into a folder, to look at them."""
    for name in LIMITS:
        Path(folder, f"{name}.svg").write_text(draw(name), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
