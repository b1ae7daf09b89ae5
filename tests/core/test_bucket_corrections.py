"""Corrections of buckets, over many histories: never more than had the actual costs been charged from the beginning."""

import random

import pytest

from tests.core.oracle import TokenBucket
from tests.core.strategies import START
from tests.core.test_adjust import corrected, exact_level, has_own_mark, marks, oracle_full_since
from tidegate import Limit
from tidegate.core.algorithms import MAX_PEAKS
from tidegate.core.bucket import mark_bucket
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
        if self.exact and len(marks(self.state)) < MAX_PEAKS:
            assert replay == level


@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_buckets_settle_like_a_replay_with_the_actual_costs(limit):
    for seed in range(250):
        walk = Walk(limit, random.Random(seed).choice)
        step = limit.length // limit.quota
        for _ in range(14):
            full = [] if walk.state is None else [limit.rules.expires(walk.state), limit.rules.expires(walk.state) - 1]
            walk.now = max(walk.now, walk.choose([walk.now, walk.now + 1, walk.now + step, walk.now + step // 3, *full]))
            walk.state = walk.state if walk.state is None else load(limit, dump(walk.state))
            if walk.open and walk.choose([True, False]):
                walk.correct()
            else:
                walk.charge()
            walk.compare()
