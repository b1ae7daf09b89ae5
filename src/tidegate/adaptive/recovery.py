"""How a capacity is reduced, and the two ways in which it recovers. Everything here is pure.

**gradual**, the default: one step per interval, `max(value + 1, floor(value * recover))`, until the original is
reached. Nothing is remembered, so the capacity grows until calls are refused again, and is then reduced again.

**remember**: a reduction knows the capacity at which calls were refused. For LOW_STEPS intervals the capacity stays at
its reduced value, so that the server's own window can pass. Then it returns to just below the refused capacity, stays
there for HOLD_STEPS intervals, and grows by a 64th of it after every further HOLD_STEPS intervals. Above the refused
capacity each growth is twice as large as the one before: the limit of the server is higher than it was. Refusals of
calls that began within one interval of a reduction belong to that reduction.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from typing import Final, Literal, get_args

from tidegate.core.bounds import MAX_INTEGER, SECOND, ceil_div
from tidegate.errors import ConfigError

Recovery = Literal["gradual", "remember"]
LOW_STEPS: Final = 2  # intervals at the reduced value
HOLD_STEPS: Final = 8  # intervals at each further value
MARGIN_DIVISOR: Final = 16  # the capacity returns to the refused capacity less 1/16 of it
GROWTH_DIVISOR: Final = 64  # and then grows by 1/64 of it at a time


@dataclass(frozen=True, slots=True)
class RecoverySettings:
    """How capacity is reduced and recovers. Factors are exact fractions, times are microseconds.

    Without an `interval` nothing recovers. A local reduction within `cooldown` of the last one is treated as its
    duplicate: a response to a call that was in flight.
    """

    reduce: Fraction = Fraction(1, 2)
    recover: Fraction = Fraction(11, 10)
    interval: int | None = 30 * SECOND
    beyond: bool = False
    cooldown: int = 0
    remember: bool = False

    @property
    def same_cause(self) -> int:
        """A refused call that begins within this time after a reduction has the same cause (microseconds)."""
        return max(self.cooldown, self.interval or 0) if self.remember else self.cooldown

    def reduced(self, value: int) -> int:
        """Return a value after a reduction."""
        return max(1, value * self.reduce.numerator // self.reduce.denominator)

    def recovered(self, value: int) -> int:
        """Return a value after one recovery step, of at least 1."""
        return max(value + 1, value * self.recover.numerator // self.recover.denominator)

    def refused_value(self, value: int) -> int:
        """Return the capacity that was probably refused, for a reduction that does not report it."""
        return ceil_div(value * self.reduce.denominator, self.reduce.numerator)

    def value_after(self, value: int, refused_at: int, steps: int) -> int:
        """Return a value that was reduced when `refused_at` was refused, after this many recovery steps."""
        if not self.remember:
            for _ in range(steps):
                value = self.recovered(value)
            return value
        if steps < LOW_STEPS:
            return value
        level, growth = self._first_level(value, refused_at)
        for _ in range((steps - LOW_STEPS) // HOLD_STEPS):
            level, growth = _grown(level, growth, refused_at)
        return level

    def end(self, value: int, refused_at: int, original: int) -> tuple[int, int]:
        """Return the value at the end of the recovery, and the number of steps."""
        steps = 0
        if not self.remember:
            while value < original:
                value, steps = self.recovered(value), steps + 1
            return value, steps
        level, growth = self._first_level(value, refused_at)
        steps = LOW_STEPS
        while level < original:
            level, growth = _grown(level, growth, refused_at)
            steps += HOLD_STEPS
        return level, steps

    @staticmethod
    def _first_level(value: int, refused_at: int) -> tuple[int, int]:
        level = max(value, refused_at - max(1, refused_at // MARGIN_DIVISOR))
        return level, max(1, refused_at // GROWTH_DIVISOR)


def _grown(level: int, growth: int, refused_at: int) -> tuple[int, int]:
    level += growth
    return level, 2 * growth if level > refused_at else growth


def read_recovery_settings(
    reduce_factor: float | Fraction = 0.5,
    recovery_factor: float | Fraction = 1.1,
    recovery_interval: float | timedelta | None = 30.0,
    *,
    max_recovery: bool = True,
    cooldown: float | timedelta = 0.0,
    recovery: Recovery = "gradual",
) -> RecoverySettings:
    """Build settings from the arguments of a limiter: factors exactly as written (1.1 is 11/10), times in seconds."""
    reduce = _fraction("reduce_factor", reduce_factor)
    recover = _fraction("recovery_factor", recovery_factor)
    if not 0 < reduce < 1:
        raise ConfigError(f"must be between 0 and 1, such as 0.5, not {reduce_factor!r}", field="reduce_factor")
    if recover <= 1:
        raise ConfigError(f"must be greater than 1, such as 1.1, not {recovery_factor!r}", field="recovery_factor")
    interval = None if recovery_interval is None else _micros("recovery_interval", recovery_interval)
    if interval is not None and interval < 1:
        raise ConfigError(f"must be greater than 0, not {recovery_interval!r}", field="recovery_interval")
    if recovery not in get_args(Recovery):
        raise ConfigError(f"must be 'gradual' or 'remember', not {recovery!r}", field="recovery")
    return RecoverySettings(
        reduce,
        recover,
        interval,
        beyond=not max_recovery,
        cooldown=_micros("cooldown", cooldown),
        remember=recovery == "remember",
    )


def _fraction(name: str, value: float | Fraction) -> Fraction:
    try:
        return Fraction(repr(value) if isinstance(value, float) else value)
    except (ValueError, TypeError, OverflowError, ZeroDivisionError):
        raise ConfigError(f"must be a number, not {value!r}", field=name) from None


def _micros(name: str, value: float | timedelta) -> int:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and 0 <= seconds <= MAX_INTEGER // SECOND:
        return round(seconds * SECOND)
    raise ConfigError(f"must be a non-negative number of seconds, not {value!r}", field=name)
