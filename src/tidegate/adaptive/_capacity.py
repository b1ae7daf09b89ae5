"""The capacity of one resource: computed from an original value and the known reductions, for any instant.

Everything here is pure: a CapacityState is immutable, and `now` is an argument, in microseconds of any steady clock.

    capacity = CapacityState(100)                             not reduced
    capacity = capacity.reduce(now, epoch, "me")              now 50: floor(current * settings.reduce), at least 1
    capacity = capacity.merge(now, epoch, "peer", 40)         now 40: reduced by another agent
    capacity.current(now)                                     40, 44, 48, ... 100: one step per settings.interval
    capacity.frozen_until                                     no calls before that instant (Retry-After)
    capacity.next_change(now)                                 when it changes next; None: never by itself

**Value at an instant.** Each reduction starts a curve: its value, then one recovery step per interval (see `recovery`),
until the original is reached. A freeze delays the curve: its steps count from the end of the freeze (for `remember`:
see `recovery`). The capacity is the minimum of all curves, never above the original (unless `settings.beyond`, which
lets the last step exceed it), never below 1.

**Merging.** The state is a set of reductions and merging is union, so the same messages produce the same state in any
order and with any repetition. The start of a reduction needs care, because the clocks of agents differ: a message
counts from its arrival (less the `age` that its sender or its bus reports), but never from later than a reduction with
a higher epoch. `epoch` is a logical clock: an agent numbers a reduction above all that it has received (`next_epoch`).
So an older message has recovered at least as far as the newer ones: repeated, delayed or sent again after a reconnect,
it undoes nothing, and a wrong clock has no advantage.

**Bounded.** The latest `MAX_REDUCTIONS` reductions are kept. An older one that still has an effect is merged into the
next, which then has the lower value and the longer freeze of the two; later messages with epochs up to it are ignored.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.adaptive._recovery import RecoverySettings
from tidegate.core._bounds import MAX_INTEGER, SECOND

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidegate.adaptive._recovery import HeldLevel

GRADUAL: Final = RecoverySettings()
MAX_REDUCTIONS: Final = 32
MAX_FREEZE: Final = 86_400 * SECOND  # a longer Retry-After is cut to a day


class Reduction(NamedTuple):
    """One reduction, ordered by its epoch: to `value`, since an instant, with no calls before `until`.

    `refused_at` is the capacity at which calls were refused.
    """

    epoch: int
    agent: str
    value: int
    since: int
    until: int  # at least `since`: recovery starts here
    refused_at: int = 0  # used by the recovery "remember" only

    @property
    def freeze(self) -> int:
        """For how long no calls are made."""
        return self.until - self.since


@dataclass(frozen=True, slots=True)
class CapacityState:
    """The known reductions of one resource; see the module for the rules."""

    original: int
    settings: RecoverySettings = GRADUAL
    reductions: tuple[Reduction, ...] = field(default=())  # by epoch; `since` never falls as epochs rise
    floor: int = 0  # reductions up to this epoch are ignored
    # Computed once: the curves and their ends, without those that a newer one covers (as low, and recovers no sooner).
    curves: tuple[tuple[Reduction, int | None], ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        """Compute the curves, without those that a newer one covers."""
        relevant: list[Reduction] = []
        for reduction in reversed(self.reductions):
            if not any(
                r.value <= reduction.value
                and r.until >= reduction.until
                and r.refused_at <= reduction.refused_at
                and self._interval(r) >= self._interval(reduction)
                for r in relevant
            ):
                relevant.append(reduction)
        object.__setattr__(self, "curves", tuple((reduction, self._end(reduction)) for reduction in relevant))

    # ---- reading -----------------------------------------------------------------------------------------------------

    def current(self, now: int) -> int:
        """Return the capacity at an instant."""
        values = [
            self._value(r, now) for r, end in self.curves if r.value < self.original and (end is None or end > now)
        ]
        return min(values) if values else self._recovered_value(now)

    def next_change(self, now: int) -> int | None:
        """Return the next instant at which the capacity may change; None: never by itself."""
        if self.settings.interval is None:
            return None
        steps = [
            self._start(r) + (self._steps(r, now) + 1) * self._interval(r)
            for r, end in self.curves
            if r.value < self.original and (end is None or end > now)
        ]
        return min(steps, default=None)

    @property
    def frozen_until(self) -> int | None:
        """The instant before which no call may be made; None: not frozen."""
        ends = [reduction.until for reduction in self.reductions if reduction.until > reduction.since]
        return max(ends, default=None)

    def in_force(self, now: int) -> list[Reduction]:
        """List the reductions that have not recovered or still freeze, oldest first."""
        return [r for r, end in reversed(self.curves) if end is None or end > now]

    def recovered_at(self, now: int) -> int | None:
        """Return when all known reductions will have recovered; None: never."""
        ends = [end for _, end in self.curves]
        known = [end for end in ends if end is not None]
        return max((now, *known)) if len(known) == len(ends) else None

    @property
    def epoch(self) -> int:
        """The highest epoch received."""
        return max(self.floor, self.reductions[-1].epoch if self.reductions else 0)

    def next_epoch(self, wall: int) -> int:
        """Return the epoch of a new reduction: the wall clock's time, but above every epoch received."""
        return min(MAX_INTEGER, max(self.epoch + 1, wall))

    def _interval(self, reduction: Reduction) -> int:
        """Return the time between two recovery steps of a reduction; 0: there are none."""
        return self.settings.interval_after(reduction.freeze)

    def _start(self, reduction: Reduction) -> int:
        """Return the instant from which the recovery steps of a reduction count."""
        return self.settings.recovery_start(reduction.since, reduction.until)

    def _steps(self, reduction: Reduction, now: int) -> int:
        return max(0, now - self._start(reduction)) // self._interval(reduction) if self.settings.interval else 0

    def _value(self, reduction: Reduction, now: int) -> int:
        """Return the value of a curve that has not ended."""
        steps = self._steps(reduction, now)
        return self.settings.value_after(reduction.value, reduction.refused_at, steps, reduction.freeze)

    def _recovered_value(self, now: int) -> int:
        """Return the capacity after recovery: the original, or more if that is allowed."""
        if not self.settings.beyond or self.settings.interval is None:
            return self.original
        ends = [self._recovery_end(r)[0] for r in self.reductions if r.value < self.original and r.until <= now]
        return max(ends, default=self.original)

    def _end(self, reduction: Reduction) -> int | None:
        if reduction.value >= self.original:
            return reduction.until
        if self.settings.interval is None:
            return None
        return self._start(reduction) + self._recovery_end(reduction)[1] * self._interval(reduction)

    def _recovery_end(self, reduction: Reduction) -> tuple[int, int]:
        """Return the value at the end of recovery, and the number of steps."""
        return self.settings.end(reduction.value, reduction.refused_at, self.original, reduction.freeze)

    # ---- changing ----------------------------------------------------------------------------------------------------

    def reduce(self, now: int, epoch: int, agent: str, retry_after: int = 0, began: int | None = None) -> CapacityState:
        """Reduce by the factor of the settings, and freeze for `retry_after` microseconds; a duplicate only freezes.

        The refusal of a call that `began` before the latest reduction took effect is a duplicate: it has the same
        cause. Without `began`, only the settings say how long refusals are duplicates.
        """
        current = self.current(now)
        if not self._has_same_cause(now, began):
            reduced = self.settings.after_refusal(current, retry_after, self._levels_before(now))
            return self.merge(now, epoch, agent, reduced, retry_after=retry_after, refused_at=current)
        return self.merge(now, epoch, agent, self.original, retry_after=retry_after)

    def _levels_before(self, now: int) -> Iterator[list[HeldLevel]]:
        """Yield the levels that were held after each reduction, the latest first. Each ends those of the one before."""
        if not self.settings.remember or self.settings.interval is None:
            return
        for reduction in reversed(self.reductions):
            if reduction.value < self.original:
                elapsed = max(0, now - self._start(reduction))
                yield self.settings.levels_until(reduction.value, reduction.refused_at, elapsed, reduction.freeze)
                now = reduction.since

    def _has_same_cause(self, now: int, began: int | None) -> bool:
        """Return whether a refusal has the same cause as the latest reduction."""
        latest = next((r for r in reversed(self.reductions) if r.value < self.original), None)
        if latest is None:
            return False
        # What is remembered is compared after the freeze, when the server is expected to admit calls again.
        start = latest.until if self.settings.remember else latest.since
        instant = now if began is None else began
        return (began is not None and began < latest.since) or instant - start < self.settings.same_cause(latest.freeze)

    def merge(
        self,
        now: int,
        epoch: int,
        agent: str,
        value: int,
        *,
        age: int = 0,
        retry_after: int = 0,
        refused_at: int = 0,
    ) -> CapacityState:
        """Add a reduction to `value` (at least 1) that is `age` old; returns the same object if nothing changes.

        A value above the original is not a reduction; neither is the original itself, but its freeze applies.
        `refused_at` is the capacity that was refused; 0: it is not known.
        """
        if epoch <= self.floor or value > self.original or value < 1 or (value == self.original and not retry_after):
            return self
        since = min((now - max(0, age), *(r.since for r in self.reductions if r.epoch >= epoch)))
        length = max(0, min(MAX_FREEZE, retry_after))
        new = Reduction(epoch, agent, value, since, since + length, self._refused_at(value, refused_at))
        known = [
            r if r.epoch > epoch or r.since <= since else r._replace(since=since, until=since + (r.until - r.since))
            for r in self.reductions
        ]
        place = bisect_left(known, new)
        if any((r.epoch, r.agent, r.value) == new[:3] and r.until >= new.until for r in known):
            merged = tuple(known)
        else:
            merged = (*known[:place], new, *known[place:])
        return self if merged == self.reductions else self._bounded(merged, now)

    def _refused_at(self, value: int, refused_at: int) -> int:
        """Return the refused capacity to remember: never above the original."""
        if not self.settings.remember:
            return 0
        return min(self.original, max(value, refused_at or self.settings.refused_value(value)))

    def _bounded(self, reductions: tuple[Reduction, ...], now: int) -> CapacityState:
        """Keep the latest reductions; an older one in force is merged into the next.

        If there are too many, what only freezes, and not for longer than a later one, is dropped first.
        """
        if len(reductions) > MAX_REDUCTIONS:
            reductions = tuple(
                r
                for place, r in enumerate(reductions)
                if r.value < self.original or all(later.until < r.until for later in reductions[place + 1 :])
            )
        after = replace(self, reductions=reductions)
        if len(reductions) <= MAX_REDUCTIONS:
            return after
        first, second, *rest = reductions
        if first in after.in_force(now):
            second = second._replace(
                value=min(first.value, second.value),
                until=max(first.until, second.until),
                refused_at=min(first.refused_at, second.refused_at),
            )
        return replace(self, reductions=(second, *rest), floor=max(self.floor, first.epoch))

    def clear(self, epoch: int) -> CapacityState:
        """Return a state without the reductions up to an epoch; later messages about them are ignored."""
        kept = tuple(reduction for reduction in self.reductions if reduction.epoch > epoch)
        return replace(self, reductions=kept, floor=max(self.floor, epoch))

    def restart(self, original: int) -> CapacityState:
        """Return a state with another original and without the previous reductions."""
        return CapacityState(original, self.settings, (), self.epoch)
