"""Reads arguments of limiters: numbers of seconds, and priorities."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from tidegate.errors import ConfigError

MAX_SECONDS: Final = 3e10


def seconds(name: str, value: object, expected: str = "a number of seconds") -> float:
    """Read a number of seconds or a timedelta, capped at about a thousand years."""
    if (value.__class__ is float or value.__class__ is int) and -MAX_SECONDS <= value <= MAX_SECONDS:
        return value
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value:  # noqa: PLR0124 - not NaN
        return max(-MAX_SECONDS, min(MAX_SECONDS, value))
    raise ConfigError(f"must be {expected}, not {value!r}", field=name)


def check_priority(priority: object, max_priority: float) -> float:
    """Raise ConfigError for a priority that could overtake other calls indefinitely."""
    number = seconds("priority", priority, "a number")
    if abs(number) > max_priority:
        bound = f"{max_priority:g}"
        raise ConfigError(f"must be from -{bound} to {bound} (max_priority), not {priority!r}", field="priority")
    return number


def at_least_zero(name: str, value: object) -> float:
    """Read a finite number that is not negative."""
    number = seconds(name, value, "a number")
    if not 0 <= number < MAX_SECONDS:
        raise ConfigError(f"must be a finite number >= 0, not {value!r}", field=name)
    return number
