"""Limits in words: "5 per minute", "9,000 tokens per day", "2 at a time"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate.core._bounds import SECOND

if TYPE_CHECKING:
    from tidegate.core import Limit

PERIODS: Final = (
    (604_800, "week"),
    (86_400, "day"),
    (3600, "hour"),
    (60, "minute"),
    (1, "second"),
)  # seconds


def describe_limit(limit: Limit) -> str:
    """Return a limit in words."""
    unit = "" if limit.unit in ("requests", "concurrent-requests") else f" {limit.unit}"
    if limit.rules.holds_slots:
        return f"{limit.quota:,}{unit} at a time"
    return f"{limit.quota:,}{unit} per {describe_period(limit)}"


def describe_period(limit: Limit) -> str:
    """Return a period in words: "minute", "10 seconds", "calendar month"."""
    if limit.calendar is not None:
        return f"calendar {limit.period}"
    length = limit.length - limit.margin
    for seconds, name in PERIODS:
        number, rest = divmod(length, seconds * SECOND)
        if number and not rest:
            return name if number == 1 else f"{number} {name}s"
    return str(limit.period)
