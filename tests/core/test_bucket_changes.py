"""Buckets whose limit changes, and debts at their floor: against exact fractions."""

import copy
import itertools
import random
from fractions import Fraction

from tests.cases import cases
from tests.core.oracle import TokenBucket
from tests.core.strategies import START
from tests.core.test_adjust import corrected, held, marks
from tests.core.test_bounds import Bounded, strict
from tidegate import Limit
from tidegate.core._bounds import MAX_INTEGER
from tidegate.core._bucket import mark_bucket, rescale
from tidegate.core.codec import dump, load

SECOND = 1_000_000
LIMITS = [
    Limit(quota, f"{length}us", burst=burst, name="x")
    for quota, length, burst in [
        (10, 10 * SECOND, 10),
        (3, SECOND, 7),
        (7, 3 * SECOND, 20),
        (1, 1, 5),
        (10**6, 1, 10),
        (1, 1000 * SECOND, 10),
        (1, MAX_INTEGER // SECOND, 1),  # its scale times a million just fits
        (1, MAX_INTEGER // SECOND + 1, 1),  # and this one does not
        (1, SECOND, 12),
        (3, SECOND, MAX_INTEGER // SECOND),
        (1, 10, MAX_INTEGER // SECOND + 5),
    ]
]


def levels(old, new):
    """Give levels of one limit at which something changes for another: around its burst, its floor and nothing."""
    edges = [new.burst * old.scale, new.floor // new.scale * old.scale, 0, old.scale, old.capacity, old.floor]
    parts = [0, 1, old.scale // 2, old.scale - 1, -1]
    return [edge + part for edge in edges for part in parts if old.floor <= edge + part <= old.capacity]


@cases(("old", "new"), list(itertools.permutations(LIMITS, 2)))
def test_a_level_is_carried_over_exactly_or_loses_less_than_a_permit(old, new):
    for level in levels(old, new):
        exact = min(max(Fraction(level, old.scale) * new.scale, new.floor), new.capacity)
        carried = rescale(Bounded(level), strict(copy.copy(old)), strict(copy.copy(new)))
        assert new.floor <= carried <= exact
        assert exact - carried < new.scale
        if old.scale * new.scale <= MAX_INTEGER and level // old.scale > new.floor // new.scale:
            assert carried == exact // 1


class ChangingBucket:
    """The oracle: a level in permits, refilled at the slower of two rates until the first charge of a changed limit."""

    def __init__(self):
        self.limit, self.level, self.at = None, Fraction(0), 0

    def full(self, now):
        if self.limit is None:
            return True
        return self.level + (now - self.at) * Fraction(self.limit.rate, self.limit.scale) >= self.limit.burst

    def left(self, limit, now):
        now = max(now, self.at)
        if self.full(now):
            return Fraction(limit.burst)
        refilled = [
            min(other.burst, self.level + (now - self.at) * Fraction(other.rate, other.scale))
            for other in (self.limit, limit)
        ]
        return min(*refilled, Fraction(limit.burst))

    def charge(self, limit, cost, now):
        self.level, self.limit, self.at = self.left(limit, now) - cost, limit, max(now, self.at)


def test_every_answer_of_a_changed_bucket_is_that_of_fractions():
    """Never more than exactly what is there, less than a permit less; refilled from the instant of the last charge."""
    for seed in range(300):
        choose = random.Random(seed).choice
        limits = [choose(LIMITS[:3]), choose(LIMITS[:3])]
        state, oracle, now = None, ChangingBucket(), START
        for _ in range(12):
            now += choose([0, 1, 1000, SECOND // 3, SECOND, 3 * SECOND, -1])
            limit = choose(limits)
            cost = choose([1, 2, 3, limit.burst])
            left, retry, reset = limit.rules.view(state, limit, cost, now)
            exact = oracle.left(limit, now)
            assert exact - Fraction(12, limit.scale) < left + 1
            assert left <= exact
            if retry and retry > 0:
                assert limit.charge(state, limit, cost, now + retry - 1) is None
                assert limit.charge(state, limit, cost, now + retry) is not None
            assert oracle.full(now + reset + 1)
            after = limit.charge(state, limit, cost, now)
            assert (after is not None) == (cost <= left)
            if after is not None:
                oracle.charge(limit, cost, now)
                state = load(limit, dump(after))
                assert 0 <= oracle.level - Fraction(state[1], limit.scale) < Fraction(12, limit.scale)


@cases("limit", LIMITS)
def test_a_bucket_refills_exactly(limit):
    """The level is that of fractions at every instant, the last one before the bucket is full among them."""
    for seed in range(60):
        choose = random.Random(seed).choice
        state, oracle, now = None, TokenBucket(limit), START
        for _ in range(8):
            full = now if state is None else limit.rules.expires(state)
            now = choose([now, now + 1, now + limit.length // limit.quota, now - 1, full - 1, full - 2, full])
            cost = choose([1, 2, min(3, limit.burst), limit.burst])
            state = state if choose([True, False]) or state is None else load(limit, dump(state))
            left, retry, reset = limit.rules.view(state, limit, cost, now)
            assert left == oracle.remaining(now)
            assert (retry == 0) == oracle.allowed(cost, now)
            assert retry <= 0 or oracle.left(now + retry - 1) < cost <= oracle.left(now + retry)
            assert oracle.fresh(now + reset)
            assert not reset or not oracle.fresh(now + reset - 1)
            after = limit.charge(state, limit, cost, now)
            assert (after is not None) == oracle.allowed(cost, now)
            if after is not None:
                state = mark_bucket(after) if choose([True, False]) else after
                oracle.charge(cost, now)
                assert state[1:3] == (oracle.left(now) * limit.scale, oracle.time(now))


@cases("limit", LIMITS)
@cases("start", [START, START + 1])
def test_a_debt_stops_at_the_floor(limit, start):
    """Whatever is taken, the level is what is left of it, or the floor."""
    state = held(limit, None, 1, START)
    level = limit.rules.adjust(state, limit, 1, start, None)[1] + limit.scale
    most = (level - limit.floor) // limit.scale
    for delta in (1, 2, most - 1, most, most + 1, most + 2, MAX_INTEGER):
        for at in (None, START):
            if 1 <= delta <= MAX_INTEGER:
                state_after = limit.rules.adjust(state, limit, delta, start, at)
                assert state_after[1] == max(limit.floor, level - delta * limit.scale)


def test_a_bucket_keeps_four_marks():
    """As many as the Lua and SQL ports keep."""
    limit = Limit(1000, "1h")
    state = None
    for number in range(40):
        state = held(limit, state, 1, START + number)
        assert len(marks(state)) == min(number + 1, 4)


def test_marks_are_gone_once_the_bucket_was_full():
    limit = Limit(10, "10s")
    state = held(limit, None, 2, START)
    for now, number in [(START + 2 * SECOND - 1, 1), (START + 2 * SECOND, 0), (START + 3 * SECOND, 0)]:
        after = limit.charge(state, limit, 1, now)
        assert len(marks(after)) == number
        full = corrected(limit, after, 1, now, START)
        assert dump(corrected(limit, full, -1, now, now)) == dump(full) or number
