"""Writes durations as settings and options have them: 500ms, 30s, 5m, 1h30m."""

from __future__ import annotations

from typing import Final

from tidegate.core._bounds import SECOND, ceil_div

MILLISECONDS_PER_SECOND: Final = 1000
UNITS: Final = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", MILLISECONDS_PER_SECOND), ("ms", 1))


def format_duration(seconds: float) -> str:
    """Write a duration in its two largest units, rounded up; above a second, in whole seconds."""
    milliseconds = max(1, ceil_div(round(seconds * SECOND), 1000))
    if milliseconds < MILLISECONDS_PER_SECOND:
        return _join_units(milliseconds)
    whole = _round_up(milliseconds, MILLISECONDS_PER_SECOND)
    shown = [size for _, size in UNITS if MILLISECONDS_PER_SECOND <= size <= whole][:2]  # the largest first
    return _join_units(_round_up(whole, shown[-1]))


def format_exact_duration(seconds: float) -> str:
    """Write a duration to the millisecond, rounded up: 1s500ms."""
    return _join_units(ceil_div(round(seconds * SECOND), 1000)) or "0s"


def _round_up(milliseconds: int, unit: int) -> int:
    return ceil_div(milliseconds, unit) * unit


def _join_units(left: int) -> str:
    """Write milliseconds as a number of each unit, without those that are 0."""
    parts = []
    for unit, size in UNITS:
        count, left = divmod(left, size)
        parts += [f"{count}{unit}"] if count else []
    return "".join(parts)
