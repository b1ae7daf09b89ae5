"""Sliding windows over many histories: charges, corrections, clocks that step back and limits that change."""

import copy
import random
from fractions import Fraction

import pytest

from tests.cases import cases
from tests.core.strategies import START, used
from tests.core.test_bounds import Bounded, strict
from tidegate import Limit
from tidegate.core._bounds import MAX_INTEGER
from tidegate.core._sliding import heaviest
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
    spent = calls.used(limit, now)
    assert left == limit.quota - spent
    allowed = cost <= limit.quota - spent
    assert (limit.charge(state, limit, cost, now) is not None) == allowed
    assert (retry == 0) == allowed
    assert retry >= -1
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
        now = choose(
            [now, now, now + 1, edge + length, edge + length - 1, now + length, now + length // 3, now - 1, edge]
        )
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


COARSE = [
    Limit(10**9, "1h", "sliding_window"),
    Limit(9 * 10**9, "1d", "sliding_window"),
    Limit(10**9, "61s", "sliding_window"),
]


@cases("limit", COARSE)
@cases("part", [0, 1, 3, 10**6 - 1, 10**6])
def test_coarse_ticks_never_count_less_and_hardly_more(limit, part):
    """The previous window weighs what is left of it, or up to one tick more of it."""
    quota, length, tick = limit.quota, limit.length, limit.tick
    start = START - START % length
    previous, count = quota - 7, quota * part // 10**6 // 2
    state = limit.charge(None, limit, previous, start - 1)
    state = limit.charge(state, limit, count, start + length * 3 // 4) or state
    count = dump(state)[0] if dump(state)[2] == start else 0
    for offset in (length * 3 // 4, length * 3 // 4 + tick - 1, length - tick - 1, length - tick, length - 1):
        now = start + offset
        exact = count + Fraction(previous * (length - offset), length)
        for cost in (1, quota // 1000, quota // 2, quota * 3 // 4, quota - count, quota):
            left, retry, reset = limit.rules.view(state, limit, cost, now)
            assert 0 <= quota - left - exact < Fraction(previous * tick, length - tick) + 1
            assert (limit.charge(state, limit, cost, now) is not None) == (retry == 0) == (cost <= left)
            assert reset == (2 * length if count else length) - offset
            if retry > 0:
                assert limit.charge(state, limit, cost, now + retry - 1) is None
                assert limit.charge(state, limit, cost, now + retry) is not None


@cases("limit", [*LIMITS, *COARSE])
def test_a_correction_counts_up_to_what_can_be_weighed(limit):
    most = MAX_INTEGER // (limit.length // limit.tick)
    start = START - START % limit.length
    state = limit.charge(None, limit, 3, start - 1)
    state = limit.charge(state, limit, 1, start + limit.length - 1)
    for delta, left in [(MAX_INTEGER, most), (-1, most - 1), (2, most), (-most, 0)]:
        state = limit.rules.adjust(state, limit, delta, start + limit.length - 1, start - 1)
        assert dump(state)[:3] == [1, left, start]
    for delta, left in [(MAX_INTEGER, most), (-1, most - 1), (2, most), (1 - most, 1)]:
        state = limit.rules.adjust(state, limit, delta, start + limit.length - 1, start)
        assert dump(state)[:3] == [left, 0, start]


def test_the_largest_numbers_of_changed_limits_stay_below_the_bound():
    """And a change of the limit forgets nothing but what could not be weighed."""
    limits = [strict(copy.copy(limit)) for limit in (LIMITS[0], LIMITS[1], LIMITS[2], COARSE[0], COARSE[2])]
    for seed in range(600):
        choose = random.Random(seed).choice
        state, now = None, Bounded(START)
        for _ in range(10):
            limit, cost = choose(limits), Bounded(choose([1, 2**52, MAX_INTEGER - 1, MAX_INTEGER]))
            now = Bounded(choose([now, now + 1, now + limit.length, now - now % limit.length + limit.length]))
            at = choose([None, now, now - limit.length])
            state = limit.rules.adjust(state, limit, choose([cost, cost, -1]), now, at)
            for version in limits:
                left, retry, reset = version.rules.view(state, version, 1, now)
                assert -MAX_INTEGER <= left <= version.quota
                assert 0 <= retry <= reset
            if state is not None:
                count, previous, _, _ = dump(state)
                assert count <= heaviest(limit_of(state))
                assert previous <= heaviest(limit_of(state))


def test_windows_of_another_length_are_counted_together_up_to_what_can_be_weighed():
    before, after = Limit(10, "1s", "sliding_window", name="l"), Limit(10, "1h", "sliding_window", name="l")
    most = heaviest(after)
    assert most < heaviest(before)
    start = START - START % SECOND
    for count, previous in [
        (5, 7),
        (most - 5, 3),
        (most - 5, 5),
        (most - 5, 6),
        (most, most),
        (most + 1, 0),
        (1, most + 1),
    ]:
        state = before.rules.adjust(None, before, previous, start - 1, None)
        state = before.rules.adjust(state, before, count, start, None)
        changed = after.rules.adjust(state, after, -1, start, None)
        assert dump(changed)[0] == min(most, count + previous) - 1
    same = Limit(11, "1s", "sliding_window", name="l")
    most = heaviest(before)
    state = before.rules.adjust(before.rules.adjust(None, before, most, start - 1, None), before, most, start, None)
    assert dump(same.rules.adjust(state, same, -1, start, None))[:2] == [most - 1, most]


def test_what_is_used_of_both_windows_never_exceeds_the_largest_integer():
    limit = Limit(5, "1us", "sliding_window")  # so short that each window may count up to that
    state = None
    for instant in (START, START + 1):
        state = limit.rules.adjust(state, limit, MAX_INTEGER, instant, None)
    assert used(limit, state, START + 1) == MAX_INTEGER
