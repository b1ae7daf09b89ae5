"""Corrections of charges whose window has moved on: by time, by a change of the limit, or both."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.ledger import Ledger
from tests.core.strategies import START
from tests.core.test_window_changes import DAY, HOUR, MINUTE, assert_agrees
from tidegate import Limit
from tidegate.core.codec import dump, limit_of, load
from tidegate.core.windows import MAX_OLDER_WINDOWS

LIMITS = {
    "calendar_window": [
        Limit(quota, period, "calendar_window", name="l", timezone=zone, reset_hour=hour, reset_day=day)
        for quota, period, zone, hour, day in [
            (9, "hour", "UTC", 0, 1),
            (30, "hour", "Asia/Kolkata", 0, 1),
            (20, "day", "UTC", 0, 1),
            (30, "day", "America/New_York", 5, 1),
            (25, "week", "UTC", 18, 4),
            (30, "month", "UTC", 0, 3),
        ]
    ],
    "fixed_window": [
        Limit(quota, f"{minutes}m", "fixed_window", name="l")
        for quota, minutes in [(9, 1), (30, 2), (20, 7), (30, 60), (25, 90)]
    ],
}
GAPS = {
    "calendar_window": [0, 0, 0, 1, MINUTE, 30 * MINUTE, HOUR, 11 * HOUR, DAY],
    "fixed_window": [0, 0, 0, 1, 20 * MINUTE // 60, MINUTE, MINUTE - 1, 5 * MINUTE, 31 * MINUTE],
}


def instants(ledger, limit, now):
    """Give the instants at which something changes: where windows begin and end, where calls were, and now."""
    window = ledger.window(limit, now)
    return sorted({now, *window, *(edge for call in ledger.calls for edge in (call.at, call.since, call.until))})


def next_instant(choose, ledger, algorithm, now):
    """Choose when the next step happens: after some time, or exactly when a window ends."""
    ends = [call.until for call in ledger.calls if call.until > now]
    return choose(ends) if ends and choose([True, False, False, False]) else now + choose(GAPS[algorithm])


def correct_both(choose, limit, state, ledger, delta, now):
    """Correct the state and the ledger, for an instant at or beside one that matters, or for none."""
    at = choose([None, *(edge + beside for edge in instants(ledger, limit, now) for beside in (0, 0, -1))])
    alive = ledger.alive(now)
    reached = ledger.correct(limit, delta, now, at)
    after = limit.rules.adjust(state, limit, delta, now, at)
    assert reached or after is state or not alive, "a correction that reaches nothing leaves the state as it is"
    return after


def walk(choose, algorithm):
    """Charge and correct under limits that change; compare every answer with the ledger's."""
    state, ledger, now, limit = None, Ledger(), START, LIMITS[algorithm][-1]
    for _ in range(16):
        now = next_instant(choose, ledger, algorithm, now)
        limit = choose([limit, *LIMITS[algorithm]])
        state = state if state is None else load(limit_of(state), dump(state))
        cost = choose([1, 2, 3, limit.quota])
        if choose([True, False]):
            state = correct_both(choose, limit, state, ledger, choose([-cost, -cost, cost]), now)
        else:
            after = limit.charge(state, limit, cost, now)
            assert (after is not None) == (ledger.used(limit, now) + cost <= limit.quota)
            if after is not None:
                state = after
                ledger.admit(limit, cost, now)
        if ledger.older() > MAX_OLDER_WINDOWS:
            return
        for version in LIMITS[algorithm]:
            assert_agrees(version, state, ledger, cost, now)


@pytest.mark.parametrize("algorithm", LIMITS)
def test_corrections_change_what_a_ledger_of_calls_says(algorithm):
    """A correction reaches the open windows that hold its instant, and nothing else; every answer after it is exact."""
    for seed in range(400):
        walk(random.Random(seed).choice, algorithm)


@pytest.mark.parametrize("algorithm", LIMITS)
def test_corrections_of_other_histories(algorithm):
    """As above, for histories that Hypothesis chooses, and makes smaller where they fail."""

    @given(data=st.data())
    def check(data):
        walk(lambda options: data.draw(st.sampled_from(options)), algorithm)

    check()
