"""Corrections of buckets, over many histories: never more than had the actual costs been charged from the beginning."""

import random

import pytest

from tests.cases import cases
from tests.core.oracle import TokenBucket
from tests.core.strategies import START
from tests.core.test_adjust import corrected, exact_level, has_own_mark, held, marks, oracle_full_since, remaining
from tidegate import Limit
from tidegate.core._algorithms import MAX_MARKS
from tidegate.core._bucket import mark_bucket
from tidegate.core.codec import dump, load

SECOND = 1_000_000
LIMITS = [Limit(10, "10s"), Limit(3, "1s", burst=7), Limit(7, "3s", burst=20), Limit(1, "1us", burst=5)]


class Walk:
    """A history of one bucket, with the reservations that are open."""

    def __init__(self, limit, choose):
        self.limit, self.choose = limit, choose
        self.state, self.oracle, self.now, self.open, self.exact = None, TokenBucket(limit), START, [], True

    def charge(self):
        cost = self.choose([1, 1, 2, 3, self.limit.burst])
        after = self.limit.charge(self.state, self.limit, cost, self.now)
        assert after is None or self.oracle.allowed(cost, self.now)
        if after is None:
            return
        call = self.oracle.charge(cost, self.now)
        self.state = after
        if self.choose([True, True, False]):
            self.state = mark_bucket(after)
            self.open.append(call)

    def correct(self):
        call = self.open.pop(self.choose(range(len(self.open))))
        actual = self.choose([0, 0, call[1] // 2, call[1] + 1, 2 * call[1]])
        if actual == call[1]:
            return
        more = actual > call[1]
        instants = [time for time, _ in self.oracle.calls] + [self.now]
        own = has_own_mark(self.limit, self.state, call[0], self.now)
        full = any(oracle_full_since(self.oracle, call, time) for time in instants)
        self.state = corrected(self.limit, self.state, actual - call[1], self.now, call[0])
        self.exact = self.exact and not (more and (full or not own))
        self.oracle.correct(call, actual)

    def compare(self):
        level = exact_level(self.limit, self.state, self.now)
        replay = self.oracle.left(self.now) * self.limit.scale
        assert level <= replay, "more than was ever there"
        if self.exact and len(marks(self.state)) < MAX_MARKS:
            assert replay == level


@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_buckets_settle_like_a_replay_with_the_actual_costs(limit):
    for seed in range(250):
        walk = Walk(limit, random.Random(seed).choice)
        step = limit.length // limit.quota
        for _ in range(14):
            full = [] if walk.state is None else [limit.rules.expires(walk.state), limit.rules.expires(walk.state) - 1]
            later = [walk.now + passed for passed in (0, 1, step, step // 3)]
            walk.now = max(walk.now, walk.choose([*later, *full]))
            walk.state = walk.state if walk.state is None else load(limit, dump(walk.state))
            if walk.open and walk.choose([True, False]):
                walk.correct()
            else:
                walk.charge()
            walk.compare()
        while walk.open:
            walk.correct()
            walk.compare()


def test_a_level_that_equals_an_earlier_mark_leaves_both():
    """Bucket of 10 per 10 s: at 4 s the level is 9, as it was before the reservations of 1 s."""
    limit = Limit(10, "10s")
    state = held(limit, None, 2, START)
    for cost in (2, 1):
        state = held(limit, state, cost, START + SECOND)
    now = START + 4 * SECOND
    state = corrected(limit, state, 2, now, START + SECOND)  # the second one cost 3
    state = corrected(limit, state, -2, now, START + SECOND)  # and the first one nothing
    replay = TokenBucket(limit)
    replay.charge(2, START)
    replay.charge(3, START + SECOND)
    assert exact_level(limit, state, now) == replay.left(now) * limit.scale


@cases("least", range(1, MAX_MARKS + 1))
def test_of_too_many_marks_the_one_closest_to_its_predecessor_goes(least):
    limit = Limit(1000, "1h")
    state, instants = None, [START + number for number in range(MAX_MARKS + 1)]
    for number, now in enumerate(instants):
        state = held(limit, state, 1 if number == least else 10, now)
    instants.pop(least)
    assert [since for since, _ in marks(state)] == instants


def test_a_refund_raises_the_marks_before_it():
    """Bucket of 10 per 10 s: had the second reservation cost nothing, the bucket would have been full before 2 s."""
    limit = Limit(10, "10s")
    state = held(limit, None, 2, START)
    state = held(limit, state, 4, START + SECOND)
    now = START + 2 * SECOND
    state = limit.charge(state, limit, 3, now)
    state = corrected(limit, state, -4, now, START + SECOND)
    assert remaining(limit, state, now) == 7
    assert remaining(limit, corrected(limit, state, -2, now, START), now) == 7, "it would have spilled"


def test_a_refund_raises_the_marks_after_it():
    """Bucket of 10 per 10 s: had neither reservation cost anything, it would be full at 3 s, before 4 are taken."""
    limit = Limit(10, "10s")
    state = held(limit, None, 4, START)
    state = held(limit, state, 4, START + 1)
    now = START + 3 * SECOND
    state = limit.charge(state, limit, 4, now)
    for at in (START, START + 1):
        state = corrected(limit, state, -4, now, at)
    assert remaining(limit, state, now) == 6
