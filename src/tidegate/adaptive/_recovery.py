"""How a capacity is reduced, and the two ways in which it recovers. Everything here is pure.

**gradual**, the default: one step per interval, `max(value + 1, floor(value * recover))`, until the original is
reached. Nothing is remembered, so the capacity grows until calls are refused again, and is then reduced again.

**remember**: a reduction knows the capacity at which calls were refused. For LOW_STEPS intervals the capacity stays at
its reduced value, so that the server's own window can pass. Then it returns to just below the refused capacity, stays
there for HOLD_STEPS intervals, and grows by a 64th of it after every further HOLD_STEPS intervals. Above the refused
capacity each growth is twice as large as the one before: the limit of the server is higher than it was. Refusals of
calls that began within one interval of a reduction belong to that reduction.

A freeze of at least half an interval replaces these LOW_STEPS intervals: the server has said when it admits calls
again. So calls go on at once when it ends, and a call that begins after that
and is refused is evidence of its own. No calls are made during a freeze, so the limit is searched with few refusals:
between what the server has served, less an assumed burst (`after_refusal`), and the refused capacity (`_search`). The
smaller the difference, the longer a server with a burst takes to refuse it, so the longer a value is held. The
intervals are longer in proportion to the freeze (up to MAX_STRETCH), and just below the refused capacity the capacity
stays for LONG_HOLD_STEPS of them. A shorter freeze is a part of the LOW_STEPS intervals.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, get_args

from tidegate.core._bounds import MAX_INTEGER, SECOND, ceil_div
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Recovery = Literal["gradual", "remember"]
LOW_STEPS: Final = 2  # intervals at the reduced value
HOLD_STEPS: Final = 8  # intervals at each further value
MARGIN_DIVISOR: Final = 16  # the capacity returns to the refused capacity less 1/16 of it
GROWTH_DIVISOR: Final = 64  # and then grows by 1/64 of it at a time
SEARCH_DIVISOR: Final = 20  # a capacity that misses 1/n is held for n * n / 20 intervals, after a long freeze
LONG_HOLD_STEPS: Final = 36  # intervals at each value up to the refused capacity, after a long freeze
LONG_MARGIN_DIVISOR: Final = 32  # the capacity returns to the refused capacity less 1/32 of it, after a long freeze
BURST_DIVISOR: Final = 6  # the assumed burst of a server: a sixth of what is called during a freeze
MAX_STRETCH: Final = 10  # intervals after a freeze are at most this many times as long


class HeldLevel(NamedTuple):
    """A value of the recovery `remember`, and for how long it was held (microseconds)."""

    value: int
    length: int


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

    def same_cause(self, freeze: int) -> int:
        """Return how long after a reduction refused calls still have the same cause (microseconds).

        For `remember`, the time counts from the end of the freeze.
        """
        return max(self.cooldown, self.interval or 0) if self.remember and not self.is_long(freeze) else self.cooldown

    def reduced(self, value: int) -> int:
        """Return a value after a reduction."""
        return max(1, value * self.reduce.numerator // self.reduce.denominator)

    def after_refusal(self, refused: int, freeze: int, curves: Iterable[Sequence[HeldLevel]]) -> int:
        """Return the reduced value when `refused` is refused, after these levels since each freeze, latest first.

        A server with a burst refuses a value that is just above its limit late, so what was held for long is reduced
        less, and a value that was held for a moment is no proof that the server allows it.
        """
        lowest = self.reduced(refused)
        if not self.is_long(freeze):
            return lowest
        burst = refused * freeze // BURST_DIVISOR
        allowed = max((value for levels in curves if (value := _allowed(levels, burst)) < refused), default=0)
        return max(1, min(refused - self._margin(refused, freeze), max(lowest, allowed)))

    def _margin(self, refused_at: int, freeze: int) -> int:
        """Return how far below the refused capacity a value is held."""
        return max(1, refused_at // (LONG_MARGIN_DIVISOR if self.is_long(freeze) else MARGIN_DIVISOR))

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
        # What a refusal costs: the freeze, and the rest of LOW_STEPS intervals at half the capacity, or of the search.
        cost = freeze + freeze // 3 if self.is_long(freeze) else interval + freeze // 2
        return min(cost, MAX_STRETCH * interval)

    def recovery_start(self, since: int, until: int) -> int:
        """Return the instant from which steps count, for a reduction since an instant that freezes until another."""
        freeze = until - since
        if not self.remember or self.is_long(freeze):
            return until
        return since + LOW_STEPS * ((self.interval or 0) - self.interval_after(freeze))

    def is_long(self, freeze: int) -> bool:
        """Return whether a freeze replaces the intervals at the reduced value."""
        return self.remember and self.interval is not None and 2 * freeze >= self.interval

    def value_after(self, value: int, refused_at: int, steps: int, freeze: int = 0) -> int:
        """Return a value that was reduced when `refused_at` was refused, after this many recovery steps."""
        if not self.remember:
            for _ in range(steps):
                value = self.recovered(value)
            return value
        return self.levels_until(value, refused_at, steps * self.interval_after(freeze), freeze)[-1].value

    def levels_until(self, value: int, refused_at: int, elapsed: int, freeze: int) -> list[HeldLevel]:
        """List the levels of the recovery `remember` until a time after its start (microseconds)."""
        found: list[HeldLevel] = []
        interval = self.interval_after(freeze)
        for level, hold in self._levels(value, refused_at, freeze):
            found.append(HeldLevel(level, max(0, min(elapsed, hold * interval))))
            elapsed -= hold * interval
            if elapsed < 0:
                return found
        raise AssertionError("levels grow without end")

    def _levels(self, value: int, refused_at: int, freeze: int) -> Iterator[tuple[int, int]]:
        """Yield the capacities of the recovery `remember`, and for how many intervals each is held."""
        is_long = self.is_long(freeze)
        level = max(value, refused_at - self._margin(refused_at, freeze))
        if is_long:
            yield from self._search(value, level, refused_at)
        else:
            yield value, LOW_STEPS
        growth = max(1, refused_at // GROWTH_DIVISOR)
        while True:
            yield level, LONG_HOLD_STEPS if is_long and level <= refused_at else HOLD_STEPS
            level += growth
            growth *= 2 if level > refused_at else 1

    def _search(self, value: int, target: int, refused_at: int) -> Iterator[tuple[int, int]]:
        """Yield the values from the reduced value to just below the target: each halves what is missing."""
        missing = target - value
        smallest = refused_at // LONG_MARGIN_DIVISOR
        while missing > 0:
            hold = refused_at**2 // (SEARCH_DIVISOR * missing**2)
            yield target - missing, max(1, min(LONG_HOLD_STEPS, hold))
            missing = missing // 2 if missing > smallest else 0

    def end(self, value: int, refused_at: int, original: int, freeze: int = 0) -> tuple[int, int]:
        """Return the value at the end of the recovery, and the number of steps."""
        steps = 0
        if not self.remember:
            while value < original:
                value, steps = self.recovered(value), steps + 1
            return value, steps
        for level, hold in self._levels(value, refused_at, freeze):
            if level >= original:
                return level, steps
            steps += hold
        raise AssertionError("levels grow without end")


def _allowed(levels: Sequence[HeldLevel], burst: int) -> int:
    """Return the limit that a server has at least, if it served these levels: their mean, less its assumed burst.

    The best of the means that include the last level; `burst` is calls times microseconds of a window.
    """
    best = served = length = 0
    for level in reversed(levels):
        served += level.value * level.length
        length += level.length
        if length:
            best = max(best, (2 * (served - burst) + length) // (2 * length))  # rounded to the nearest
    return best


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
