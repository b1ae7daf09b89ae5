"""How a capacity is reduced, and the two ways in which it recovers. Everything here is pure.

**gradual**, the default: one step per interval, `max(value + 1, floor(value * recover))`, until the original is
reached. Nothing is remembered, so the capacity grows until calls are refused again, and is then reduced again.

**remember**: a reduction knows the capacity at which calls were refused. For LOW_STEPS intervals the capacity stays at
its reduced value, so that the server's own window can pass. Then it returns to just below the refused capacity, stays
there for HOLD_STEPS intervals, and grows by a 64th of it after every further HOLD_STEPS intervals. Above the refused
capacity each growth is twice as large as the one before: the limit of the server is higher than it was. Refusals of
calls that began within one interval of a reduction belong to that reduction.

A freeze that is at least as long as these LOW_STEPS intervals replaces them: the server's window passes during it, too.
The capacity then returns in RAMP_STEPS steps, each of which halves what is missing, so that a capacity which is still
refused is found with few freezes. A shorter freeze is a part of the LOW_STEPS intervals. No calls are made during a
freeze, so a refusal costs more with one than without. The intervals of its reduction are longer in the same proportion
(up to MAX_STRETCH), and after a long freeze the capacity stays for LONG_HOLD_STEPS intervals, closer to the refused
capacity: calls are refused less often, so that a server that sends Retry-After is used as well as one that does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from typing import TYPE_CHECKING, Final, Literal, get_args

from tidegate.core.bounds import MAX_INTEGER, SECOND, ceil_div
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

Recovery = Literal["gradual", "remember"]
LOW_STEPS: Final = 2  # intervals at the reduced value
HOLD_STEPS: Final = 8  # intervals at each further value
MARGIN_DIVISOR: Final = 16  # the capacity returns to the refused capacity less 1/16 of it
GROWTH_DIVISOR: Final = 64  # and then grows by 1/64 of it at a time
RAMP_STEPS: Final = 3  # intervals of the return after a long freeze
LONG_HOLD_STEPS: Final = 36  # intervals at each value up to the refused capacity, after a long freeze
LONG_MARGIN_DIVISOR: Final = 32  # the capacity returns to the refused capacity less 1/32 of it, after a long freeze
MAX_STRETCH: Final = 10  # intervals after a freeze are at most this many times as long


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

    def interval_after(self, freeze: int) -> int:
        """Return the time between two recovery steps after a freeze of this length; 0: nothing recovers."""
        interval = self.interval or 0
        if not self.remember:
            return interval
        # What a refusal costs: the freeze, and the rest of LOW_STEPS intervals at half the capacity, or the ramp.
        cost = freeze + freeze // 3 if self._is_long(freeze) else interval + freeze // 2
        return min(cost, MAX_STRETCH * interval)

    def recovery_start(self, since: int, until: int) -> int:
        """Return the instant from which steps count, for a reduction since an instant that freezes until another."""
        freeze = until - since
        if not self.remember or self._is_long(freeze):
            return until
        return since + LOW_STEPS * ((self.interval or 0) - self.interval_after(freeze))

    def _is_long(self, freeze: int) -> bool:
        """Return whether a freeze replaces the intervals at the reduced value."""
        return self.remember and freeze >= LOW_STEPS * (self.interval or 0)

    def value_after(self, value: int, refused_at: int, steps: int, freeze: int = 0) -> int:
        """Return a value that was reduced when `refused_at` was refused, after this many recovery steps."""
        if not self.remember:
            for _ in range(steps):
                value = self.recovered(value)
            return value
        low_steps = self._low_steps(freeze)
        if steps < low_steps:
            first, _ = next(self._levels(value, refused_at, freeze))
            return first - (first - value >> steps + 1) if self._is_long(freeze) else value
        steps -= low_steps
        for level, hold in self._levels(value, refused_at, freeze):
            if steps < hold:
                return level
            steps -= hold
        raise AssertionError("levels grow without end")

    def _low_steps(self, freeze: int) -> int:
        return RAMP_STEPS if self._is_long(freeze) else LOW_STEPS

    def _levels(self, value: int, refused_at: int, freeze: int) -> Iterator[tuple[int, int]]:
        """Yield the capacities after the return, and for how many intervals each is held."""
        is_long = self._is_long(freeze)
        margin = refused_at // (LONG_MARGIN_DIVISOR if is_long else MARGIN_DIVISOR)
        level, growth = max(value, refused_at - max(1, margin)), max(1, refused_at // GROWTH_DIVISOR)
        while True:
            yield level, LONG_HOLD_STEPS if is_long and level <= refused_at else HOLD_STEPS
            level += growth
            growth *= 2 if level > refused_at else 1

    def end(self, value: int, refused_at: int, original: int, freeze: int = 0) -> tuple[int, int]:
        """Return the value at the end of the recovery, and the number of steps."""
        steps = 0
        if not self.remember:
            while value < original:
                value, steps = self.recovered(value), steps + 1
            return value, steps
        steps = self._low_steps(freeze)
        for level, hold in self._levels(value, refused_at, freeze):
            if level >= original:
                return level, steps
            steps += hold
        raise AssertionError("levels grow without end")


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
