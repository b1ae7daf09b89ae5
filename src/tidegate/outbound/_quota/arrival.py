"""When a permit counts: the time between a charge here and the arrival of its request at the provider.

The provider counts a request when it arrives, at an unknown instant after it was sent and before its response. A permit
is charged before the request is sent, so it could expire here while it still counts there.

    quick responses       a permit counts a two-hundredth of the period longer: this covers them and killed processes
    slower responses      the permit is charged again when the response arrives, and the first charge is returned
    longer than a period  the permit of a request still in flight is charged again before it could be reused
    into another window   the same, before permits of the next window are used, however short the delay was

So no window of the provider exceeds its limit, whatever the network delays. In return, each permit counts longer by
the duration of its response. For slow responses that would be too much, although their requests arrive as quickly as
others. So when an account has lost a whole quota in this way (`DelayAllowance`), its permits count a fortieth of the
period longer instead (100 ms at least, if that is no more than a tenth), which covers network delays. Permits that were
charged before are still charged again, and the
larger margin ends only when the permits charged meanwhile have expired. Only the process that sent a request knows that
it has been in flight for more than a period.

Permits of limits of more than `MAX_MOVED_QUOTA`, such as tokens, are not charged again after a response: the responses
of language models take so long that most of the quota would be lost. Instead, an adapter checks the age of a permit
when it has written the request. If the permit was charged much earlier, because the store was slow or the request
waited for a connection or for other tasks, all limits are charged again from then on. What is left of the margin covers
the network delay: two thirds of a two-hundredth of the period, 0.2 s of a minute. If nothing reports the write, the
gate checks the permit when the store has responded: if it is too old (`is_stale`), it takes another instead, once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tidegate._policy.units import is_money
from tidegate.core._algorithms import View
from tidegate.core._bounds import MAX_INTEGER, SECOND

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate._runtime.clock import Clock
    from tidegate.core import Limit
    from tidegate.outbound._quota.charge import Charge

MAX_MOVED_QUOTA: Final = 2000
MAX_DELAY: Final = 5 * SECOND  # of a network
KEEP_STALE: Final = 60 * SECOND
MAX_CLOCK_READS: Final = 1000  # to see whether time passes by itself


class DelayAllowance:
    """How much of a quota may still be spent on exact counting, in permits times microseconds.

    Starts with a quota for one period; each response costs its duration, less a thirtieth of the period.
    """

    def __init__(self, limit: Limit) -> None:
        """Start with the whole allowance."""
        self._free = limit.length // 33
        self._most = self._left = limit.quota * limit.length
        self.exhausted: bool = False

    def spend(self, flight: int) -> bool:
        """Return whether to charge a permit again after a response that took this number of microseconds."""
        self._left = min(self._most, self._left + self._free - flight)
        if self.exhausted and flight > self._free:
            self._left = min(self._left + flight, self._most // 2)  # not spent: it recovers when responses are quick
        if self._left < 0:
            self.exhausted, self._left = True, 0
        elif self._left > self._most // 2:
            self.exhausted = False
        return not self.exhausted


class ArrivalDelays:
    """The delays of one account's requests; `changed` is called when `stretched` changes."""

    def __init__(
        self,
        limits: tuple[Limit, ...],
        narrowest: Limit,
        clock: Clock,
        changed: Callable[[], None],
        in_flight: deque[Charge] | None = None,
    ) -> None:
        """Start with the requests `in_flight`, or none; `narrowest` is the limit that the allowance is based on."""
        self._limits = limits
        self._length = narrowest.length
        rolling = [limit.length for limit in limits if limit.rules.rolling]
        self._max_length = max(rolling, default=0) + MAX_DELAY  # for which a permit counts
        self._clock = clock
        self._changed = changed
        self._clock_runs = clock_runs(clock)
        self._allowance = DelayAllowance(narrowest)
        self._wide = False  # whether permits count a fortieth longer
        self._wide_since = -1
        self._wide_until = 0
        self.has_movable: bool = any(map(is_movable, limits))
        self._min_covered_age = min((self._covered_age(limit) for limit in limits if is_movable(limit)), default=0)
        watched = [limit for limit in limits if limit.rules.rolling and limit.quota > MAX_MOVED_QUOTA]
        self.watches_writes: bool = any(not is_money(limit.unit) for limit in watched)
        self._max_write_delay = min((margin(limit) // 3 for limit in watched), default=0)
        self._stale_from = 0  # when permits that are too old are replaced, by our clock
        self._max_age = min((limit.length // 40 for limit in limits if limit.rules.rolling), default=MAX_INTEGER)
        self._windows = [place for place, limit in enumerate(limits) if limit.rules.windowed and is_movable(limit)]
        self.in_flight: deque[Charge] = (
            deque() if in_flight is None else in_flight
        )  # in flight, in the order of their charges

    def stretched(self) -> list[Limit]:
        """Return the limits with permits that count a little longer, where permits are counted individually."""
        return [self._stretched(limit) for limit in self._limits]

    def _stretched(self, limit: Limit) -> Limit:
        if not limit.rules.rolling:
            return limit
        if self._wide:
            longer = wide_margin(limit)
        elif self._clock_runs or limit.quota > MAX_MOVED_QUOTA:
            longer = margin(limit)
        else:
            return limit
        return replace(limit, margin=longer)

    def _covered_age(self, limit: Limit) -> int:
        """Return how old a charge may be at its response without being made again."""
        return margin(limit) if self._clock_runs and limit.rules.rolling else 0

    def recharge_costs(self, charge: Charge, at: int = 0) -> tuple[int, ...]:
        """Return the costs to charge again from now on, by limit; empty: the charge is correct.

        `at` is an instant of the store's clock that has passed.
        """
        flight = self._clock.steady() - charge.since
        if not self.has_movable or flight <= 0:
            return ()
        recharge = self._allowance.spend(flight)
        self._choose_margin()
        recharge = recharge or charge.since <= self._wide_since  # it was charged with the smaller margin
        age = max(self._age(charge), at - charge.at)
        return (
            self._expired_costs(charge, age, recharge=recharge)
            if (recharge or self._windows) and age > self._min_covered_age
            else ()
        )

    def _choose_margin(self) -> None:
        """Use the larger margin while the allowance is exhausted, and for as long as permits of that time count."""
        now = self._clock.steady()
        if self._allowance.exhausted:
            self._wide_until = now + self._max_length
        wide = now < self._wide_until
        if wide == self._wide:
            return
        self._wide = wide
        if wide:
            self._wide_since = now
        self._changed()

    def _age(self, charge: Charge) -> int:
        """Return how long ago a permit was charged.

        That was before `since`, when this process learned of it: the store's response, or the task that waited for it,
        may have been slow. The store's clock tells how long before, if it agrees with ours.
        """
        return max(self._clock.steady() - charge.since, self._clock.ns() // 1000 - charge.at)

    def is_late(self, charge: Charge) -> bool:
        """Return whether a permit was charged too long before its request is written, which is now."""
        return self._age(charge) > self._max_write_delay

    def is_stale(self, charge: Charge, *, checked_later: bool) -> bool:
        """Return whether a permit is too old to be used, because the store's response was slow: take another one.

        `checked_later`: when its request was written, `is_late` is checked.
        """
        age = self._age(charge)
        too_old = age > self._max_age or (self.watches_writes and not checked_later and age > self._max_write_delay)
        if too_old and self._clock.steady() >= self._stale_from:
            return True
        return bool(self._windows) and charge.at + age >= self._window_end(charge)

    def keep_stale(self) -> None:
        """Use permits that are too old for a while: the one that replaced another was no younger.

        The store is always slow, or its clock is behind ours.
        """
        self._stale_from = self._clock.steady() + KEEP_STALE

    def written_costs(self, charge: Charge) -> tuple[int, ...]:
        """Return the costs to charge again when a request was written late, by limit."""
        limits, costs, views = self._limits, charge.costs, (charge.recharged or charge.decision).views
        if not len(limits) == len(costs) == len(views):  # the file has changed in the meantime
            return ()
        age = self._age(charge)
        return tuple(
            cost
            if (age >= view[2] if limit.rules.windowed else limit.rules.rolling) and not is_money(limit.unit)
            else 0
            for limit, cost, view in zip(limits, costs, views, strict=True)
        )

    def _expired_costs(self, charge: Charge, age: int, *, recharge: bool) -> tuple[int, ...]:
        limits, costs, views = self._limits, charge.costs, (charge.recharged or charge.decision).views
        if not views:  # a charge restored from its id: to move it within its window changes nothing
            views = (View((0, 0, 0)),) * len(limits)
        if not len(limits) == len(costs) == len(views):  # the file has changed in the meantime
            return ()
        # A charge in a window that has not ended is correct; moving it into the next window costs no allowance.
        found = tuple(
            cost
            if (
                age >= view[2]
                if limit.rules.windowed and is_movable(limit)
                else recharge and is_movable(limit) and age > self._covered_age(limit)
            )
            else 0
            for limit, cost, view in zip(limits, costs, views, strict=True)
        )
        return found if any(found) else ()

    # ---- in flight ---------------------------------------------------------------------------------------------------

    def track(self, charge: Charge) -> None:
        """Track a request that is about to be sent, or was charged again."""
        if not self.has_movable:
            return
        if self._windows:
            charge.window_end = self._window_end(charge)
        self.in_flight.append(charge)

    def _window_end(self, charge: Charge) -> int:
        """Return when the first of its windows ends, by the store's clock."""
        views = (charge.recharged or charge.decision).views
        return min((charge.at + views[place][2] for place in self._windows if place < len(views)), default=MAX_INTEGER)

    def find_expired(self, at: int) -> Charge | None:
        """Return the oldest request in flight if its permit has expired before a charge made `at`.

        That is after a period, or when a window has ended: its permits would count in the previous window.
        """
        in_flight = self.in_flight
        try:
            while (charge := in_flight[0]).answered or self._clock.steady() >= charge.tracked_until:
                in_flight.remove(charge)
        except (IndexError, ValueError):  # there is none, or another thread removed it
            return None
        age = max(self._clock.steady() - charge.since, at - charge.at)
        return charge if at >= charge.window_end or age >= self._length else None

    @property
    def busy(self) -> bool:
        """Whether any request is in flight."""
        now = self._clock.steady()
        return not all(charge.answered or now >= charge.tracked_until for charge in self.in_flight.copy())

    def track_again(self, charge: Charge) -> None:
        """Track a request as before: it could not be charged again."""
        self.in_flight.appendleft(charge)

    def untrack(self, charge: Charge) -> bool:
        """Stop tracking a request; returns whether no other thread has done so before."""
        try:
            self.in_flight.remove(charge)
        except ValueError:
            return False
        return True


def is_movable(limit: Limit) -> bool:
    """Return whether permits of a limit are charged again after a slow response.

    Money is not: a ceiling is ours, not the provider's, and a call counts in the window in which it was reserved.
    """
    if is_money(limit.unit):
        return False
    return limit.rules.windowed or (limit.rules.rolling and limit.quota <= MAX_MOVED_QUOTA)


def margin(limit: Limit) -> int:
    """Return how much longer than the period the permits of a log count."""
    return min(limit.length // 200, SECOND)


def wide_margin(limit: Limit) -> int:
    """Return how much longer they count while slow responses cost too much; 100 ms at least, if a tenth allows it."""
    return min(max(limit.length // 40, min(SECOND // 10, limit.length // 10)), MAX_DELAY)


def clock_runs(clock: Clock) -> bool:
    """Return whether time passes by itself: in a test clock it does not, and no margin is needed."""
    began = clock.steady()
    return any(clock.steady() > began for _ in range(MAX_CLOCK_READS))
