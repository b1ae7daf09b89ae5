"""Corrections of long logs: exact, cheap at any length, and without effect on the states before them."""
# ruff: noqa: SLF001 - what a correction copies is what is tested

import random

from tests.core.strategies import START, used
from tidegate import Limit
from tidegate.core._log import CHUNK_LENGTH
from tidegate.core.codec import dump

SECOND = 1_000_000


def costs_of(calls, now, limit):
    """Return what `dump` shows of the calls that count."""
    return [number for time, cost in calls if time > now - limit.length and cost for number in (time, cost)]


def test_corrections_of_a_long_log_leave_older_states_as_they_were():
    draw = random.Random(5)
    limit = Limit(10**9, "1h", "sliding_log")
    state, calls, now, kept = None, [], START, []
    for step in range(6000):
        now += draw.randint(1, 3) * SECOND
        if draw.random() < 0.1:
            limit.charge(state, limit, 7, now)  # discarded: another limit denies the call
        state = limit.charge(state, limit, 9, now)
        calls.append([now, 9])
        for _ in range(draw.randint(0, 2)):
            call = draw.choice(calls[-draw.choice([1, 20, 1500]) :])
            delta = draw.choice([-9, -3, -3, -1, 2, 5])
            if call[0] > now - limit.length and call[1]:
                state = limit.rules.adjust(state, limit, delta, now, call[0])
                call[1] = max(0, call[1] + delta)
        if step % 40 == 0:
            live = costs_of(calls, now, limit)
            assert used(limit, state, now) == sum(live[1::2])
            # Expired entries are dropped later; what a correction removed is gone.
            assert dump(limit.charge(state, limit, 1, now))[:-2][-len(live) :] == live
            kept.append((state, dump(state)))
    assert all(dump(state) == seen for state, seen in kept)


def test_a_correction_copies_one_chunk_of_a_long_log():
    limit = Limit(10**9, "1h", "sliding_log")
    state = None
    for number in range(50 * CHUNK_LENGTH):
        state = limit.charge(state, limit, 5, START + number)
    first = limit.rules.adjust(state, limit, -2, START + number, START + number - 10)
    second = limit.rules.adjust(first, limit, 3, START + number, START + 20 * CHUNK_LENGTH)
    before, after = first[1].sums._chunks, second[1].sums._chunks
    assert [one is other for one, other in zip(before, after, strict=True)].count(False) == 1
    assert first[1].times is second[1].times is state[1].times
    assert [used(limit, each, START + number) for each in (state, first, second)] == [
        250 * CHUNK_LENGTH,
        250 * CHUNK_LENGTH - 2,
        250 * CHUNK_LENGTH + 1,
    ]
