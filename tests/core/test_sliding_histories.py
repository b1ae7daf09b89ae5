"""Sliding windows over many histories: charges, corrections, clocks that step back and limits that change."""

import random
from fractions import Fraction

import pytest

from tests.core.strategies import START
from tidegate import Limit
from tidegate.core.codec import dump, limit_of, load

SECOND = 1_000_000
LIMITS = [
    Limit(quota, f"{length}us", "sliding_window", name="l")
    for quota, length in [(10, SECOND), (9, SECOND), (7, 3 * SECOND), (12, 4 * SECOND), (5, 997), (30, 10)]
]


class Calls:
    """The oracle: every call as [time, cost], a correction as a call of its own, and the length of the last limit.

    When a limit of another length is charged or corrected, all that counted until then counts in its present window.
    """

    def __init__(self):
        self.calls = []
        self.length = 0

    def time(self, now):
        """Give the instant that counts: never before the window of the last call."""
        return max([now, *(time - time % self.length for time, _ in self.calls)])

    def in_windows(self, now):
        """Give the start of the present window, and what was used in it and in the one before."""
        now = self.time(now)
        start = now - now % self.length
        count = sum(cost for time, cost in self.calls if time >= start)
        return start, count, sum(cost for time, cost in self.calls if start - self.length <= time < start)

    def used(self, limit, now):
        if not self.calls:
            return 0
        start, count, previous = self.in_windows(now)
        if limit.length != self.length:
            return count + previous
        weight = Fraction(start + self.length - self.time(now), self.length) if now >= start else Fraction(1)
        return count - (-previous * weight // 1)

    def unused(self, now):
        return not self.calls or self.in_windows(now)[1:] == (0, 0)

    def change_to(self, limit, now):
        if self.calls and limit.length != self.length:
            start, count, previous = self.in_windows(now)
            alive = not self.unused(now)
            self.calls = [[max(now, start), count + previous]] if alive else []
        self.length = limit.length

    def charge(self, limit, cost, now):
        self.change_to(limit, now)
        self.calls.append([self.time(now), cost])

    def correct(self, limit, delta, now, at):
        """Correct the window that holds `at` (None: the present one), if it is the present or the previous one."""
        kept = [list(call) for call in self.calls], self.length
        self.change_to(limit, now)
        start, count, previous = self.in_windows(now)
        if at is None or start <= at < start + limit.length:
            self.calls.append([self.time(now), max(delta, -count)])
        elif start - limit.length <= at < start:
            self.calls += [[start - 1, max(delta, -previous)], [start, 0]]
        else:
            self.calls, self.length = kept
            return
        if self.unused(now):
            self.calls.clear()


def assert_agrees(limit, state, calls, cost, now):
    left, retry, reset = limit.rules.view(state, limit, cost, now)
    used = calls.used(limit, now)
    assert left == max(0, limit.quota - used)
    allowed = cost <= limit.quota - used
    assert (limit.charge(state, limit, cost, now) is not None) == allowed
    assert (retry == 0) == allowed
    assert (retry == -1) == (cost > limit.quota)
    if retry > 0:
        assert cost > limit.quota - calls.used(limit, now + retry - 1)
        assert cost <= limit.quota - calls.used(limit, now + retry)
    assert calls.unused(now + reset)
    assert not reset or not calls.unused(now + reset - 1)
    if state is not None and limit_of(state) is limit and reset:
        assert limit.rules.expires(state) == now + reset


def walk(choose, limits):
    state, calls, now, limit = None, Calls(), START, limits[0]
    for _ in range(14):
        length = limit.length
        edge = now - now % length
        now = choose([now, now, now + 1, edge + length, edge + length - 1, now + length, now + length // 3, now - 1, edge])
        limit = choose([limit, limit, *limits])
        state = state if state is None else load(limit_of(state), dump(state))
        cost = choose([1, 2, 3, limit.quota, limit.quota + 1])
        if choose([True, True, False]):
            after = limit.charge(state, limit, cost, now)
            assert (after is not None) == (calls.used(limit, now) + cost <= limit.quota)
            if after is not None:
                state = after
                calls.charge(limit, cost, now)
        else:
            start = now - now % limit.length
            edges = [start, start - limit.length, start + limit.length, start - 2 * limit.length]
            at = choose([None, now, *edges, *(edge - 1 for edge in edges)])
            delta = choose([-cost, -cost, cost])
            state = limit.rules.adjust(state, limit, delta, now, at)
            calls.correct(limit, delta, now, at)
        for version in limits:
            assert_agrees(version, state, calls, choose([1, 3, version.quota, version.quota + 1]), now)


@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_every_answer_is_that_of_a_list_of_calls(limit):
    for seed in range(150):
        walk(random.Random(seed).choice, [limit])


@pytest.mark.parametrize("limits", [LIMITS[:2], LIMITS[1:3], LIMITS[2:4], LIMITS[:4]], ids=str)
def test_every_answer_is_that_of_a_list_of_calls_when_limits_change(limits):
    for seed in range(150):
        walk(random.Random(seed).choice, limits)
