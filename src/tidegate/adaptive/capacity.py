"""The capacity of one resource: an original value, the reductions known, and from these what it is at any instant.

Everything here is pure: a CapacityState is immutable, `now` is an argument, in microseconds of any steady clock.

    capacity = CapacityState(100)                                  nothing reduced
    capacity = capacity.reduce(now, epoch, "me")              now 50: floor(current * terms.reduce), at least 1
    capacity = capacity.merge(now, epoch, "peer", 40)         now 40: another agent says so
    capacity.current(now)                                     40, 44, 48, ... 100: one step each terms.interval
    capacity.frozen_until                                     no call before that instant (Retry-After)
    capacity.next_change(now)                                 when to look again; None: nothing will change by itself

**What it is at an instant.** Each reduction starts a curve: its value, then one step of recovery each interval,
`max(value + 1, floor(value * terms.recover))`, until the original is reached. A freeze holds the curve: its steps count
from the freeze's end. The capacity is the least of all curves, never above the original (unless `terms.beyond`, which
lets the last step overshoot), never below 1.

**Merging.** The state is a set of reductions and merging is union, so the same messages give the same state in whatever
order and however often they come. What needs care is when a reduction began, since clocks of agents disagree: a message
counts from its arrival (less the `age` that its sender or its bus knows of), but never from later than a reduction with
a higher epoch. `epoch` is a logical clock: an agent numbers a reduction above all that it has heard of (`next_epoch`).
So a message that is older than what is known is at least as far recovered as that: repeated, delayed or sent again
after a reconnect, it undoes nothing, and a wrong clock gains nothing.

**Bounded.** The latest `HISTORY` reductions are kept. An older one that still matters is folded into the next, which
then is as low and as long as both; epochs up to it are answered by ignoring them.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from datetime import timedelta
from fractions import Fraction
from typing import Final, NamedTuple

from tidegate.core.bounds import MAX_INTEGER, SECOND
from tidegate.errors import ConfigError

MAX_REDUCTIONS: Final = 32
LONGEST_FREEZE: Final = 86_400 * SECOND  # a server that asks for more is asked again after a day


@dataclass(frozen=True, slots=True)
class RecoverySettings:
    """How capacity shrinks and recovers. Factors are exact fractions, times are microseconds; see `read_terms`.

    Without an `interval` nothing recovers. A reduction of one's own within `cooldown` of the last one is taken as an
    echo of it: answers to calls that were under way.
    """

    reduce: Fraction = Fraction(1, 2)
    recover: Fraction = Fraction(11, 10)
    interval: int | None = 30 * SECOND
    beyond: bool = False
    cooldown: int = 0

    def reduced(self, value: int) -> int:
        """Tell what is left of a value."""
        return max(1, value * self.reduce.numerator // self.reduce.denominator)

    def recovered(self, value: int) -> int:
        """Take one step of recovery: at least 1."""
        return max(value + 1, value * self.recover.numerator // self.recover.denominator)


def read_terms(
    reduce_factor: float | Fraction = 0.5,
    recovery_factor: float | Fraction = 1.1,
    recovery_interval: float | timedelta | None = 30.0,
    *,
    max_recovery: bool = True,
    cooldown: float | timedelta = 0.0,
) -> RecoverySettings:
    """Take terms as people give them: factors as they are written (1.1 is 11/10), times in seconds."""
    reduce = _fraction("reduce_factor", reduce_factor)
    recover = _fraction("recovery_factor", recovery_factor)
    if not 0 < reduce < 1:
        raise ConfigError(f"must be between 0 and 1, such as 0.5, not {reduce_factor!r}", field="reduce_factor")
    if recover <= 1:
        raise ConfigError(f"must be greater than 1, such as 1.1, not {recovery_factor!r}", field="recovery_factor")
    interval = None if recovery_interval is None else _micros("recovery_interval", recovery_interval)
    if interval is not None and interval < 1:
        raise ConfigError(f"must be more than nothing, not {recovery_interval!r}", field="recovery_interval")
    return RecoverySettings(reduce, recover, interval, beyond=not max_recovery, cooldown=_micros("cooldown", cooldown))


def _fraction(name: str, value: float | Fraction) -> Fraction:
    try:
        return Fraction(repr(value) if isinstance(value, float) else value)
    except (ValueError, TypeError, OverflowError, ZeroDivisionError):
        raise ConfigError(f"must be a number, not {value!r}", field=name) from None


def _micros(name: str, value: float | timedelta) -> int:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and 0 <= seconds <= MAX_INTEGER // SECOND:
        return round(seconds * SECOND)
    raise ConfigError(f"must be a number of seconds from 0, not {value!r}", field=name)


class Reduction(NamedTuple):
    """One reduction, ordered by its epoch: to `value`, since an instant, with no call before `until`."""

    epoch: int
    agent: str
    value: int
    since: int
    until: int  # at least `since`: recovery is counted from here


@dataclass(frozen=True, slots=True)
class CapacityState:
    """What is known of one resource's capacity; see above for what it answers."""

    original: int
    terms: RecoverySettings = RecoverySettings()
    reductions: tuple[Reduction, ...] = field(default=())  # by epoch; `since` never falls as epochs rise
    floor: int = 0  # reductions up to this epoch are settled
    # Worked out once: the curves that count, since no newer one is as low and recovers no sooner, with their ends.
    curves: tuple[tuple[Reduction, int | None], ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        """Leave out the curves that a newer one covers."""
        front: list[Reduction] = []
        for reduction in reversed(self.reductions):
            if not any(r.value <= reduction.value and r.until >= reduction.until for r in front):
                front.append(reduction)
        object.__setattr__(self, "curves", tuple((reduction, self._end(reduction)) for reduction in front))

    # ---- what it is --------------------------------------------------------------------------------------------------

    def current(self, now: int) -> int:
        """Tell the capacity at an instant."""
        values = [
            self._value(r, now) for r, end in self.curves if r.value < self.original and (end is None or end > now)
        ]
        return min(values) if values else self._rest(now)

    def next_change(self, now: int) -> int | None:
        """Tell the next instant at which the capacity may be another; None: it stays as it is."""
        interval = self.terms.interval
        if interval is None:
            return None
        steps = [
            r.until + (self._steps(r, now) + 1) * interval
            for r, end in self.curves
            if r.value < self.original and (end is None or end > now)
        ]
        return min(steps, default=None)

    @property
    def frozen_until(self) -> int | None:
        """Tell before which instant no call is to be made; None: none was asked for."""
        ends = [reduction.until for reduction in self.reductions if reduction.until > reduction.since]
        return max(ends, default=None)

    def in_force(self, now: int) -> list[Reduction]:
        """List the reductions that have not recovered or still freeze, oldest first."""
        return [r for r, end in reversed(self.curves) if end is None or end > now]

    def recovered_at(self, now: int) -> int | None:
        """Tell when nothing will be in force any more, if no more is heard; None: never."""
        ends = [end for _, end in self.curves]
        known = [end for end in ends if end is not None]
        return max((now, *known)) if len(known) == len(ends) else None

    @property
    def epoch(self) -> int:
        """The highest epoch heard of."""
        return max(self.floor, self.reductions[-1].epoch if self.reductions else 0)

    def next_epoch(self, wall: int) -> int:
        """Give a new reduction its number: above all heard of and, by the wall clock, above those not heard of."""
        return min(MAX_INTEGER, max(self.epoch + 1, wall))

    def _steps(self, reduction: Reduction, now: int) -> int:
        return max(0, now - reduction.until) // self.terms.interval if self.terms.interval else 0

    def _value(self, reduction: Reduction, now: int) -> int:
        """Walk a curve that has not ended."""
        value = reduction.value
        for _ in range(self._steps(reduction, now)):
            value = self.terms.recovered(value)
        return value

    def _rest(self, now: int) -> int:
        """Tell where recovery has ended: at the original, or past it where that is allowed."""
        if not self.terms.beyond or self.terms.interval is None:
            return self.original
        ends = [self._climb(r.value)[0] for r in self.reductions if r.value < self.original and r.until <= now]
        return max(ends, default=self.original)

    def _end(self, reduction: Reduction) -> int | None:
        if reduction.value >= self.original:
            return reduction.until
        if self.terms.interval is None:
            return None
        return reduction.until + self._climb(reduction.value)[1] * self.terms.interval

    def _climb(self, value: int) -> tuple[int, int]:
        """Recover to the end: the value there, and the steps it takes."""
        steps = 0
        while value < self.original:
            value, steps = self.terms.recovered(value), steps + 1
        return value, steps

    # ---- how it changes ----------------------------------------------------------------------------------------------

    def reduce(self, now: int, epoch: int, agent: str, retry_after: int = 0) -> CapacityState:
        """Reduce by the terms' factor; `retry_after` microseconds without any call. Of an echo only that counts."""
        value = self.current(now)
        if not self.reductions or now - self.reductions[-1].since >= self.terms.cooldown:
            value = self.terms.reduced(value)
        elif not retry_after:
            return self
        return self.merge(now, epoch, agent, value, retry_after=retry_after)

    def merge(
        self, now: int, epoch: int, agent: str, value: int, *, age: int = 0, retry_after: int = 0
    ) -> CapacityState:
        """Learn of a reduction to `value` (at least 1) that is `age` old; the same object if that changes nothing.

        A value above the original is no reduction; nor is the original itself, but its freeze counts.
        """
        if epoch <= self.floor or value > self.original or value < 1 or (value == self.original and not retry_after):
            return self
        since = min((now - max(0, age), *(r.since for r in self.reductions if r.epoch >= epoch)))
        length = max(0, min(LONGEST_FREEZE, retry_after))
        new = Reduction(epoch, agent, value, since, since + length)
        known = [
            r if r.epoch > epoch or r.since <= since else r._replace(since=since, until=since + (r.until - r.since))
            for r in self.reductions
        ]
        place = bisect_left(known, new)
        if any((r.epoch, r.agent, r.value) == new[:3] and r.until >= new.until for r in known):
            merged = tuple(known)
        else:
            merged = (*known[:place], new, *known[place:])
        return self if merged == self.reductions else self._keeping(merged, now)

    def _keeping(self, reductions: tuple[Reduction, ...], now: int) -> CapacityState:
        """Keep the latest reductions; an older one that is in force is folded into the next."""
        after = replace(self, reductions=reductions)
        if len(reductions) <= MAX_REDUCTIONS:
            return after
        first, second, *rest = reductions
        if first in after.in_force(now):
            second = second._replace(value=min(first.value, second.value), until=max(first.until, second.until))
        return replace(self, reductions=(second, *rest), floor=max(self.floor, first.epoch))

    def restart(self, original: int) -> CapacityState:
        """Begin anew with another original: what was reduced before is settled."""
        return CapacityState(original, self.terms, (), self.epoch)
