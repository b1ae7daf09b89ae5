"""Corrections of charges whose window has moved on: by time, by a change of the limit, or both."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import START
from tests.core.test_bounds import Bounded, strict
from tests.core.test_window_changes import DAY, HOUR, MINUTE, assert_agrees
from tests.core.window_oracle import WindowOracle
from tidegate import Limit
from tidegate.core._bounds import MAX_INTEGER
from tidegate.core._windows import MAX_OLDER_WINDOWS
from tidegate.core.codec import dump, limit_of, load

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


def instants(oracle, limit, now):
    """Give the instants at which something changes: where windows begin and end, where calls were, and now."""
    window = oracle.window(limit, now)
    return sorted({now, *window, *(edge for call in oracle.calls for edge in (call.at, call.since, call.until))})


def next_instant(choose, oracle, gaps, now):
    """Choose when the next step happens: after some time, or exactly when a window ends."""
    ends = [call.until for call in oracle.calls if call.until > now]
    return choose(ends) if ends and choose([True, False, False, False]) else now + choose(gaps)


def correct_both(choose, limit, state, oracle, delta, now):
    """Correct the state and the oracle, for an instant at or beside one that matters, or for none."""
    at = choose([None, *(edge + beside for edge in instants(oracle, limit, now) for beside in (0, 0, -1))])
    alive = oracle.alive(now)
    reached = oracle.correct(limit, delta, now, at)
    after = limit.rules.adjust(state, limit, delta, now, at)
    assert reached or after is state or not alive, "a correction that reaches nothing leaves the state as it is"
    return after


def walk(choose, algorithm, verbs=("charge", "correct"), back=()):
    """Charge and correct under limits that change; compare every answer with the oracle's."""
    state, oracle, now, limit = None, WindowOracle(), START, LIMITS[algorithm][-1]
    for _ in range(16):
        now = next_instant(choose, oracle, [*GAPS[algorithm], *back], now)
        limit = choose([limit, *LIMITS[algorithm]])
        state = state if state is None else load(limit_of(state), dump(state))
        cost = choose([1, 2, 3, limit.quota])
        if choose(verbs) == "correct":
            state = correct_both(choose, limit, state, oracle, choose([-cost, -cost, cost]), now)
        else:
            after = limit.charge(state, limit, cost, now)
            assert (after is not None) == (oracle.used(limit, now) + cost <= limit.quota)
            if after is not None:
                state = after
                oracle.admit(limit, cost, now)
        if oracle.older() > MAX_OLDER_WINDOWS:
            return
        for version in LIMITS[algorithm]:
            assert_agrees(version, state, oracle, cost, now)


@pytest.mark.parametrize("algorithm", LIMITS)
def test_corrections_agree_with_the_oracle(algorithm):
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


@pytest.mark.parametrize("algorithm", LIMITS)
def test_answers_while_the_clock_steps_back(algorithm):
    for seed in range(250):
        walk(random.Random(seed).choice, algorithm, ["charge"], [-1, -MINUTE // 3, -MINUTE, -HOUR])


@pytest.mark.parametrize("count", [5, 6])
def test_a_window_carries_four_older_ones(count):
    """As many as the Lua and SQL ports carry; of more, the two that were opened first become one."""
    state, windows, now = None, [], START + 100 * DAY
    for number, period in enumerate(["year", "month", "week", "day", "hour", "minute"][:count]):
        limit = Limit(1000, period, "calendar_window", name="l")
        state = limit.charge(state, limit, 10 + number, now)
        windows.append((10 + number, *limit.calendar.window(now)))
    *older, (_, start, end) = windows
    if count > 5:
        (one, first, until), (other, second, _), *rest = older
        assert first < second
        older = [(one + other, first, until), *rest]
    total = sum(used for used, _, _ in windows)
    assert len(older) == 4
    assert dump(state) == [total, start, end, now, 0, *(number for window in older for number in window)]


@pytest.mark.parametrize("algorithm", LIMITS)
@pytest.mark.parametrize("delta", [-1, 1])
def test_a_correction_does_not_bring_back_what_had_ended_before_the_limit_changed(algorithm, delta):
    period = {"calendar_window": ("hour", "day")}.get(algorithm, ("1h", "1d"))
    before, after = (Limit(5, text, algorithm, name="l") for text in period)
    state = before.charge(None, before, 5, START)
    now = before.rules.expires(state)
    corrected = after.rules.adjust(state, after, delta, now, START)
    fresh = after.rules.adjust(None, after, delta, now, START)
    assert (corrected and dump(corrected)) == (fresh and dump(fresh))


@pytest.mark.parametrize("algorithm", LIMITS)
def test_the_largest_numbers_of_changed_windows_stay_below_the_bound(algorithm):
    versions = [strict(Limit(MAX_INTEGER, limit.period, algorithm, name="l")) for limit in LIMITS[algorithm]]
    for seed in range(400):
        choose = random.Random(seed).choice
        state, now, instants = None, START, [START, None]
        for _ in range(10):
            now += choose(GAPS[algorithm])
            limit, cost = choose(versions), Bounded(choose([1, 2**52, MAX_INTEGER - 1, MAX_INTEGER]))
            if choose([True, False]):
                state = limit.rules.adjust(state, limit, choose([cost, cost, -cost]), now, choose(instants))
            else:
                state = limit.charge(state, limit, cost, now) or state
                instants.append(now)
            left, retry, reset = limit.rules.view(state, limit, cost, now)
            assert 0 <= left <= MAX_INTEGER
            assert 0 <= retry <= reset


@pytest.mark.parametrize("algorithm", LIMITS)
@pytest.mark.parametrize("delta", [-1, 1])
def test_a_correction_after_the_end_of_the_window_leaves_the_state_as_it_is(algorithm, delta):
    """The clock may yet step back to where it counts."""
    limit = LIMITS[algorithm][0]
    state = limit.charge(None, limit, 5, START)
    for now in (limit.rules.expires(state), limit.rules.expires(state) + DAY):
        assert limit.rules.adjust(state, limit, delta, now, START) is state


def test_a_window_in_which_nothing_is_used_is_not_carried():
    year, month, day = (Limit(100, period, "calendar_window", name="l") for period in ("year", "month", "day"))
    state = year.charge(None, year, 1, START)
    state = month.charge(state, month, 2, START)
    state = month.rules.adjust(state, month, -2, START, START)
    state = day.charge(state, day, 4, START)
    assert dump(state) == [5, *day.calendar.window(START), START, 0, 1, *year.calendar.window(START)]
