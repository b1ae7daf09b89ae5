"""Charges, reservations and corrections at any instant, even of charges never made, compared with counting oracles.

No correction gives back more than the window it names holds, and one that names a window that has gone, or one to come,
changes nothing: so what is admitted in any window is at most the quota and what was given back in it.
"""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate import Denied, Limit, Limiter
from tidegate.testing import ManualClock

START = 1_735_689_600  # 2025-01-01, a whole minute
SECOND = 1_000_000


class FixedModel:
    """One window: it opens at the first charge, and closes at its end or when nothing is used in it."""

    def __init__(self, limit):
        self.limit = limit
        self.start, self.count = 0, 0

    def window(self, now):
        if not self.count or now >= self.start + self.limit.length:
            self.start, self.count = now, 0
        return self.start, self.start + self.limit.length

    def used(self, now):
        self.window(now)
        return self.count

    def charge(self, cost, now):
        self.window(now)
        self.count += cost

    def adjust(self, delta, now, at):
        start, end = self.window(now)
        opens = self.count == 0 and delta > 0 and at is not None and not start <= at <= now
        if (at is None or start <= at < end) and not opens:
            self.count = max(0, self.count + delta)


class CalendarModel(FixedModel):
    """One calendar window."""

    def window(self, now):
        start, end = self.limit.calendar.window(now)
        if start != self.start:
            self.start, self.count = start, 0
        return start, end


class Sliding:
    """Counts by aligned windows; the previous one is weighted by the part of it that a rolling window covers."""

    def __init__(self, limit):
        self.limit = limit
        self.counts = {}

    def used(self, now):
        place, passed = divmod(now, self.limit.length)
        previous = Fraction(self.counts.get(place - 1, 0) * (self.limit.length - passed), self.limit.length)
        return self.counts.get(place, 0) - (-previous // 1)

    def charge(self, cost, now):
        place = now // self.limit.length
        self.counts[place] = self.counts.get(place, 0) + cost

    def adjust(self, delta, now, at):
        present = now // self.limit.length
        place = present if at is None else at // self.limit.length
        if place in (present - 1, present):
            self.counts[place] = max(0, self.counts.get(place, 0) + delta)


class Log:
    """Every charge, until one period later; corrections begin with the latest."""

    oldest_first = False

    def __init__(self, limit):
        self.limit = limit
        self.entries = []  # [time, cost], oldest first

    def used(self, now):
        self.entries = [entry for entry in self.entries if entry[0] > now - self.limit.length and entry[1]]
        return sum(cost for _, cost in self.entries)

    def charge(self, cost, now):
        self.entries.append([now, cost])

    def adjust(self, delta, now, at):
        if not self.used(now):
            if at is None and delta > 0:
                self.charge(delta, now)
            return
        chosen = self.entries if at is None and self.oldest_first else self.entries[::-1]
        if at is not None:
            time = min([time for time, _ in self.entries if time >= at], default=None)
            chosen = [entry for entry in chosen if entry[0] == time and at > now - self.limit.length]
        for entry in chosen:
            change = delta if delta > 0 else max(delta, -entry[1])
            entry[1] += change
            delta -= change
            if delta == 0:
                break


class Slots(Log):
    oldest_first = True


ORACLES = {
    "fixed_window": FixedModel,
    "calendar_window": CalendarModel,
    "sliding_window": Sliding,
    "sliding_log": Log,
    "concurrency": Slots,
}
GAPS = st.one_of(st.sampled_from([0, 0, 1, 9, 10, 11, 59, 60, 61, 120]), st.integers(0, 70))


def period(algorithm):
    return "minute" if algorithm == "calendar_window" else "1m"


def instants(now, charged):
    """Draw an instant to correct: none, that of a charge, or a random one, past or future."""
    seconds = st.sampled_from([-3600, -121, -120, -61, -60, -59, -1, 0, 1, 59, 60, 61, 3600])
    invented = seconds.map(lambda each: now + each * SECOND)
    return st.one_of(st.none(), st.sampled_from(charged), invented) if charged else st.one_of(st.none(), invented)


class ChargeHistory:
    """Calls at one key of one limit, and what was charged."""

    def __init__(self, algorithm, quota, data):
        self.clock = ManualClock(START)
        self.limiter = Limiter(Limit(quota, period(algorithm), algorithm), clock=self.clock)
        self.limit = self.limiter.policy.limits[0]
        self.data = data
        self.open = []
        self.charged = []

    @property
    def now(self):
        return self.clock.ns() // 1000

    def step(self):
        """Make a random call; return (what, cost or difference, instant) if it was made."""
        self.clock.advance(self.data.draw(GAPS, label="seconds"))
        what = self.data.draw(st.sampled_from(["try", "reserve", "reserve", "settle", "settle", "refund", "adjust"]))
        if what in ("try", "reserve"):
            return self.charge(what, self.data.draw(st.integers(1, self.limit.quota)))
        if what == "settle" and self.open:
            held, cost = self.open.pop(self.data.draw(st.integers(0, len(self.open) - 1)))
            actual = self.data.draw(st.integers(0, cost + 3), label="actual")
            if self.limit.algorithm == "concurrency":
                actual = 0  # its slots are free again, whatever it cost
            held.commit(actual)
            return "adjust", actual - cost, held.decision.at
        back = self.data.draw(st.integers(1, 2 * self.limit.quota), label="back")
        if what == "refund":
            self.limiter.refund("k", back)
            return "adjust", -back, None
        delta = self.data.draw(st.sampled_from([-back, -1, 1, 2]), label="delta")
        at = self.data.draw(instants(self.now, tuple(self.charged)), label="at")
        self.limiter.store.apply_one("adjust", self.limiter.policy, "k", (delta,), self.now, at)
        return "adjust", delta, at

    def charge(self, what, cost):
        try:
            if what == "reserve":
                held = self.limiter.reserve("k", cost, ttl=1e6)
                self.open.append((held, cost))
            elif not self.limiter.try_acquire("k", cost):
                return "denied", cost, None
        except Denied:
            return "denied", cost, None
        self.charged.append(self.now)
        return "charged", cost, None


@pytest.mark.parametrize("algorithm", ORACLES)
def test_remaining_agrees_with_the_oracle(algorithm):
    @given(quota=st.integers(1, 12), data=st.data())
    def check(quota, data):
        history = ChargeHistory(algorithm, quota, data)
        oracle = ORACLES[algorithm](history.limit)
        for _ in range(data.draw(st.integers(1, 20))):
            what, number, at = history.step()
            before = oracle.used(history.now)
            if what == "denied":
                assert number > quota - before
            elif what == "charged":
                assert number <= quota - before
                oracle.charge(number, history.now)
            elif number:
                oracle.adjust(number, history.now, at)
                assert oracle.used(history.now) >= before + min(0, number), "more came back than was given"
            assert history.limiter.peek("k", 0).remaining == max(0, quota - oracle.used(history.now))

    check()


@given(quota=st.integers(1, 12), data=st.data())
def test_a_bucket_admits_at_most_its_burst_its_refill_and_its_refunds(quota, data):
    """In any interval. What an instant gives back was taken since it: without a charge from then on, nothing comes."""
    history = ChargeHistory("token_bucket", quota, data)
    events, left = [], Fraction(quota)  # (instant, what was admitted, what came back)

    def level():
        remaining, _, reset = history.limiter.peek("k", 0).views[0]
        missing = Fraction(reset * history.limit.rate, history.limit.scale)
        assert remaining in (int((quota - missing) // 1), int((quota - missing) // 1) + 1)
        return quota - missing

    for _ in range(data.draw(st.integers(1, 20))):
        what, number, at = history.step()
        now, rate = history.now, Fraction(history.limit.rate, history.limit.scale)
        passed = now - events[-1][0] if events else 0
        before, left = min(Fraction(quota), left + passed * rate), level()
        came_back = left - before + (number if what == "charged" else 0)
        if what == "adjust":
            assert came_back <= max(0, -number) + rate, "more came back than was given"
            if at is not None and number < 0 and (at > now or not any(held <= at for held in history.charged)):
                assert came_back <= rate, "an invented instant gave something back"
        events.append((now, number if what == "charged" else 0, max(Fraction(0), came_back)))
        for place, (since, _, _) in enumerate(events):
            admitted = sum(event[1] for event in events[place:])
            assert admitted <= quota + rate * (now - since) + sum(event[2] for event in events[place:])
