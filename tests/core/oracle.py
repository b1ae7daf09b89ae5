"""The brute-force oracle: keeps every admitted call and recomputes each answer from that list, in exact fractions.

Nothing here is shared with the implementation but the Limit's plain fields. Each oracle answers three questions about
an instant: what is `left` (a Fraction, negative in debt), whether a cost is `allowed`, and whether all is `fresh`, as
if nothing had ever been spent. `charge` keeps a call; `correct` changes the cost of one that was kept.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from fractions import Fraction
from zoneinfo import ZoneInfo

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Oracle:
    """All admitted calls, as [time, cost]."""

    def __init__(self, limit):
        self.limit = limit
        self.calls = []

    def time(self, now):
        """Return the instant that counts: never before the latest one seen."""
        return max([now, *(time for time, _ in self.calls)])

    def charge(self, cost, now):
        self.calls.append([self.time(now), cost])
        return self.calls[-1]

    def allowed(self, cost, now):
        return cost == 0 or (cost <= self.limit.burst and cost <= self.left(now))

    def remaining(self, now):
        return max(0, int(self.left(now) // 1))

    def left(self, now):
        return self.limit.quota - self.used(now)

    def fresh(self, now):
        return self.used(now) == 0

    def used(self, now):
        raise NotImplementedError

    @staticmethod
    def correct(call, cost):
        """Change the cost of a call, as if it had been so from the start."""
        call[1] = cost


class TokenBucket(Oracle):
    """Replays every charge on a level of Fractions. `test_rates` tests the rate separately."""

    def left(self, now):
        rate = Fraction(self.limit.rate, self.limit.scale)
        level, last = Fraction(self.limit.burst), None
        for time, cost in [*self.calls, [self.time(now), 0]]:
            if last is not None:
                level = min(Fraction(self.limit.burst), level + (time - last) * rate)
            level -= cost
            last = time
        return level

    def fresh(self, now):
        return self.left(now) == self.limit.burst


class FixedWindow(Oracle):
    """Opens a window at the first call outside of one."""

    def used(self, now):
        start, used = None, 0
        for time, cost in [*self.calls, [self.time(now), 0]]:
            if start is None or time >= start + self.limit.length:
                start, used = time, 0
            used += cost
        return used


class CalendarWindow(Oracle):
    """Counts the calls that lie in the same calendar period of the zone, by their local dates."""

    def used(self, now):
        period = self.period(self.time(now))
        return sum(cost for time, cost in self.calls if self.period(time) == period)

    def period(self, instant):
        """Return the local year, month, … of an instant, after moving the reset to midnight of the 1st."""
        name = self.limit.period
        local = (EPOCH + timedelta(microseconds=instant)).astimezone(ZoneInfo(self.limit.timezone))
        local = local.replace(tzinfo=None) - timedelta(hours=self.limit.reset_hour)
        if name == "week":
            return (local - timedelta(days=self.limit.reset_day - 1)).isocalendar()[:2]
        fields = {"year": 1, "month": 2, "day": 3, "hour": 4, "minute": 5}[name]
        if name in ("month", "year"):
            local -= timedelta(days=self.limit.reset_day - 1)  # right for reset days that every month has
        return local.timetuple()[:fields]


class SlidingWindow(Oracle):
    """Weights the calls of the previous aligned window by the part of it within one period."""

    def time(self, now):
        # The state remembers the start of its window, not the last call in it; a step back within the window only
        # makes the previous one weigh more.
        length = self.limit.length
        return max([now, *(time - time % length for time, _ in self.calls)])

    def exact(self, now):
        """Return the value of the formula, unrounded."""
        now, length = self.time(now), self.limit.length
        start = now - now % length
        current = sum(cost for time, cost in self.calls if time >= start)
        previous = sum(cost for time, cost in self.calls if start - length <= time < start)
        return current + previous * Fraction(start + length - now, length)

    def used(self, now):
        return -(-self.exact(now) // 1)


class SlidingLog(Oracle):
    """Counts the calls of one period; a call exactly one period ago does not count."""

    def used(self, now):
        now = self.time(now)
        return sum(cost for time, cost in self.calls if time > now - self.limit.length)


ORACLES = {
    "token_bucket": TokenBucket,
    "fixed_window": FixedWindow,
    "calendar_window": CalendarWindow,
    "sliding_window": SlidingWindow,
    "sliding_log": SlidingLog,
    "concurrency": SlidingLog,
}


def oracle_for(limit):
    return ORACLES[limit.algorithm](limit)
