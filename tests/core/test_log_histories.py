"""Logs and slots over many histories: charges, corrections, clocks that step back and limits that change."""

import itertools
import random

import pytest

from tests.cases import cases
from tests.core.strategies import START
from tidegate import Limit
from tidegate.core._bounds import MAX_INTEGER
from tidegate.core._log import LogEntries
from tidegate.core.codec import dump, limit_of, load

SECOND = 1_000_000
VERSIONS = [(10, SECOND), (9, SECOND), (12, 3 * SECOND), (40, 10)]
ALGORITHMS = ("sliding_log", "concurrency")


def versions(algorithm):
    return [Limit(quota, f"{length}us", algorithm, name="l") for quota, length in VERSIONS]


class Entries:
    """The oracle: every call that has not left, as [time, cost], and the limit of the last change."""

    def __init__(self):
        self.calls, self.limit = [], None

    def live(self, limit, now):
        """Give the calls that count for a limit: all are forgotten once they had left under the limit before."""
        if not self.calls or (limit is not self.limit and self.calls[-1][0] + self.limit.length <= now):
            return []
        now = max(now, self.calls[-1][0])
        return [call for call in self.calls if call[0] > now - limit.length]

    def used(self, limit, now):
        return sum(cost for _, cost in self.live(limit, now))

    def charge(self, limit, cost, now):
        live = self.live(limit, now)
        last = self.calls[-1][0] if live else now
        self.calls, self.limit = [*live, [max(now, last), cost]], limit

    def correct(self, limit, delta, now, at):
        """Correct the calls of the first instant not before `at`; None: all, from the latest or the oldest slot."""
        live = self.live(limit, now)
        if at is None:
            order = live if limit.algorithm == "concurrency" else live[::-1]
            if not order and delta > 0:
                self.charge(limit, delta, now)
                return
        else:
            seen = max(now, *(time for time, _ in live), now)
            later = [time for time, _ in live if time >= at > seen - limit.length]
            order = [call for call in live[::-1] if call[0] == later[0]] if later else []
            if not order:
                return
        for call in order:
            change = max(delta, -call[1])
            call[1] += change
            delta -= change
            if delta >= 0:
                break
        self.calls, self.limit = [call for call in live if call[1]], limit


def assert_agrees(limit, state, entries, cost, now):
    left, retry, reset = limit.rules.view(state, limit, cost, now)
    used = entries.used(limit, now)
    assert left == limit.quota - used
    assert (retry == 0) == (cost <= limit.quota - used)
    assert retry >= -1
    assert (retry == -1) == (cost > limit.quota)
    if retry > 0:
        assert cost > limit.quota - entries.used(limit, now + retry - 1)
        assert cost <= limit.quota - entries.used(limit, now + retry)
    assert not entries.live(limit, now + reset)
    assert not reset or entries.live(limit, now + reset - 1)
    if state is not None and limit_of(state) is limit and reset:
        assert limit.rules.expires(state) == now + reset
        live = entries.live(limit, now)
        assert dump(state)[-2 * len(live) :] == [number for call in live for number in call]


def walk(choose, limits, steps=14, reloads=(True, False)):
    state, entries, now, limit = None, Entries(), START, limits[0]
    for _ in range(steps):
        leaving = [time + limit.length + beside for time, _ in entries.calls for beside in (0, -1)]
        now = choose([now, now, now + 1, now + limit.length // 3, now + limit.length // 9, now - 1, *leaving[:2]])
        limit = choose([limit, limit, *limits])
        state = state if state is None or not choose(reloads) else load(limit_of(state), dump(state))
        cost = choose([1, 2, 3, limit.quota])
        limit.charge(state, limit, cost, now)  # a state that is dropped has changed nothing
        if choose([True, True, False]):
            after = limit.charge(state, limit, cost, now)
            assert (after is not None) == (entries.used(limit, now) + cost <= limit.quota)
            if after is not None:
                state = after
                entries.charge(limit, cost, now)
        else:
            instants = [now, now - limit.length, *(time for time, _ in entries.calls)]
            at = choose([None, None, *(instant + beside for instant in instants for beside in (0, 0, 1, -1))])
            delta = choose([-cost, -cost, cost])
            state = limit.rules.adjust(state, limit, delta, now, at)
            entries.correct(limit, delta, now, at)
        for version in limits:
            assert_agrees(version, state, entries, choose([1, 3, version.quota, version.quota + 1]), now)


@cases("algorithm", ALGORITHMS)
@cases("number", range(len(VERSIONS)))
def test_every_answer_is_that_of_a_list_of_calls(algorithm, number):
    for seed in range(150):
        walk(random.Random(seed).choice, [versions(algorithm)[number]])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_answer_is_that_of_a_list_of_calls_when_limits_change(algorithm):
    for (one, other), seed in itertools.product(itertools.combinations(versions(algorithm)[:3], 2), range(80)):
        walk(random.Random(seed).choice, [one, other])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_long_logs(algorithm):
    """Long enough that entries that left are dropped from the front, again and again."""
    limit = Limit(40, "10us", algorithm, name="l")
    for seed in range(12):
        walk(random.Random(seed).choice, [limit], 150, [False])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("at", [None, START])
def test_no_correction_counts_beyond_the_bound(algorithm, at):
    limit = Limit(MAX_INTEGER, "1s", algorithm)
    state = limit.charge(None, limit, MAX_INTEGER - 5, START)
    for delta, left in [(3, 2), (2, 0), (7, 0), (MAX_INTEGER, 0), (-4, 4), (5, 0), (-MAX_INTEGER, MAX_INTEGER)]:
        state = limit.rules.adjust(state, limit, delta, START, at)
        assert limit.rules.view(state, limit, 0, START)[0] == left
    assert state is None


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_correction_of_one_of_two_calls_counts_beyond_the_bound(algorithm):
    limit = Limit(MAX_INTEGER, "1s", algorithm)
    state = limit.charge(None, limit, MAX_INTEGER - 10, START)
    state = limit.charge(state, limit, 5, START + 1)
    for delta, left in [(100, 0), (-1, 1), (1, 0)]:
        state = limit.rules.adjust(state, limit, delta, START + 1, START + 1)
        assert limit.rules.view(state, limit, 0, START + 1)[0] == left


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("delta", [-1, 1, -2])
def test_a_small_correction_looks_at_few_entries(algorithm, delta, monkeypatch):
    limit, state = Limit(1000, "1h", algorithm), None
    for number in range(100):
        state = limit.charge(state, limit, 1, START + number)
    looks, plain = [], LogEntries.costs

    def counting(*args):
        for entry in plain(*args):
            looks.append(entry)
            yield entry

    monkeypatch.setattr(LogEntries, "costs", counting)
    limit.rules.adjust(state, limit, delta, START + 100, None)
    assert len(looks) == abs(delta)
