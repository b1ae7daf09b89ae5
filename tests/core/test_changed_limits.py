"""Limits that change under a key in use: nothing is refilled by the change itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tests.core.strategies import NAMES, START, costs, gaps, limits
from tidegate import Limit
from tidegate.core.codec import dump

WINDOWS = ("fixed_window", "sliding_window", "sliding_log", "concurrency", "calendar_window")
SECOND = 1_000_000


def remaining(limit, state, now):
    return limit.rules.view(state, limit, 0, now)[0]


def period(algorithm):
    return "hour" if algorithm == "calendar_window" else "1h"


@cases("algorithm", WINDOWS)
@cases(("quota", "left"), [(30, -30), (60, 0), (61, 1), (100, 40), (1000, 940)])
def test_windows_keep_their_usage(algorithm, quota, left):
    before, after = (Limit(q, period(algorithm), algorithm) for q in (100, quota))
    state = before.charge(None, before, 60, START)
    assert remaining(after, state, START) == left
    assert (after.charge(state, after, 1, START) is not None) == (left > 0)


@pytest.mark.parametrize(("quota", "left"), [(30, 30), (50, 50), (100, 50), (1000, 50)])
def test_a_bucket_keeps_its_permits_up_to_the_new_burst(quota, left):
    before, after = Limit(100, "1h"), Limit(quota, "1h")
    state = before.charge(None, before, 50, START)
    assert remaining(after, state, START) == left


@pytest.mark.parametrize("algorithm", [*NAMES, "calendar_window"])
def test_an_equal_limit_is_the_same_limit(algorithm):
    one, other = (Limit(10, period(algorithm), algorithm) for _ in range(2))
    assert one == other
    assert one is not other
    state = one.charge(None, one, 3, START)
    later = START + 60 * SECOND
    assert one.rules.view(state, one, 8, later) == other.rules.view(state, other, 8, later)
    after, same = one.charge(state, one, 1, later), other.charge(state, other, 1, later)
    assert after is not None
    assert same is not None
    assert dump(after) == dump(same)


@pytest.mark.parametrize("algorithm", WINDOWS)
def test_quota_changes_are_exact_in_between(algorithm):
    """After a change of the quota alone, every answer is that of the new quota with all earlier usage."""

    @given(limit=limits((algorithm,)), quota=st.integers(1, 200), data=st.data())
    def check(limit, quota, data):
        if algorithm == "sliding_window":
            quota = min(quota, (2**53 - 1) // limit.length)
        changed = Limit(quota, limit.period, algorithm, name=limit.name, timezone=limit.timezone)
        state, now, used = None, START, 0
        for _ in range(data.draw(st.integers(1, 5))):
            cost = data.draw(costs(limit))
            after = limit.charge(state, limit, cost, now)
            if after is not None:
                state, used = after, used + cost
        assert remaining(changed, state, now) == quota - used
        cost = data.draw(st.integers(1, quota))
        retry = changed.rules.view(state, changed, cost, now)[1]
        if retry:
            assert changed.charge(state, changed, cost, now + retry - 1) is None
            assert changed.charge(state, changed, cost, now + retry) is not None
        ends = limit.rules.expires(state) if state else now
        assert remaining(changed, state, ends) == quota

    check()


@given(data=st.data())
def test_bucket_changes_never_add(data):
    before, after = data.draw(limits(("token_bucket",), name="x")), data.draw(limits(("token_bucket",), name="x"))
    state, now = None, START
    for _ in range(data.draw(st.integers(1, 6))):
        now += abs(data.draw(gaps(before.length)))
        state = before.charge(state, before, data.draw(costs(before)), now) or state
    at = now if state is None else state[2]
    if state is not None and before.rules.expires(state) <= at:
        return
    available = remaining(before, state, at)
    changed = remaining(after, state, at)
    assert changed <= max(available, 0) or state is None
    assert changed >= min(available, after.burst) - 1 or state is None  # a fraction of a permit may be dropped
    state = after.charge(state, after, 1, now)
    if state is not None:
        assert after.floor <= state[1] <= after.capacity


def test_a_sliding_window_with_another_period_drops_expired_usage():
    """Found by reading: a window that no longer counted did so again after the period was changed."""
    before = Limit(100, "60s", "sliding_window", name="x")
    after = Limit(100, "120s", "sliding_window", name="x")
    start = START - START % (120 * SECOND)
    state = before.charge(None, before, 90, start)
    state = before.charge(state, before, 1, start + 119 * SECOND)  # the 90 still weigh 2
    now = start + 121 * SECOND
    assert remaining(before, state, now) == 99
    assert remaining(after, state, now) == 99


def test_a_state_that_expired_under_its_own_limit_does_not_count():
    for algorithm in ("fixed_window", "sliding_log", "concurrency", "token_bucket"):
        before, after = Limit(5, "1s", algorithm, name="x"), Limit(5, "1h", algorithm, name="x")
        state = before.charge(None, before, 5, START)
        assert remaining(after, state, START + SECOND - 1) < 5
        assert remaining(after, state, START + SECOND) == 5


def test_a_debt_beyond_the_floor_of_the_new_limit_stops_there():
    before, after = Limit(10**6, "1us", burst=10), Limit(1, "1000s", burst=10)
    state = before.rules.adjust(before.charge(None, before, 10, START), before, 2**50, START, None)
    level = after.rules.view(state, after, 1, START)
    assert 0 < level[2] <= 2**52


@pytest.mark.parametrize(
    ("old", "taken", "seconds", "new", "left"),
    [
        ("2/10s", 1, 0.9, "12/10s", 1),
        ("10/1d", 10, 3600, "1000/1h", 0),
        ("100/1m", 100, 30, "30/1m", 15),
    ],
)
def test_time_before_a_change_counts_at_the_slower_rate(old, taken, seconds, new, left):
    before, after = (Limit.parse(text + " name=x") for text in (old, new))
    state = before.charge(None, before, taken, START)
    assert after.rules.view(state, after, 0, START + round(seconds * 10**6))[0] == left


@pytest.mark.parametrize("algorithm", [*NAMES, "calendar_window"])
def test_retry_and_reset_of_a_changed_limit_are_exact(algorithm):
    """Denied one microsecond before `retry`, allowed at it; all permits are back at `reset`, not much sooner."""

    @given(
        before=limits((algorithm,), name="x"), after=limits((algorithm,), name="x"), back=st.booleans(), data=st.data()
    )
    def check(before, after, back, data):
        state, now = None, START
        for limit in (before, after, before)[: data.draw(st.integers(1, 3))]:
            for _ in range(data.draw(st.integers(1, 4))):
                now += data.draw(gaps(min(before.length, after.length)))
                state = limit.charge(state, limit, data.draw(costs(limit)), now) or state
        limit = before if back else after
        now += data.draw(gaps(min(before.length, after.length)))
        cost = data.draw(st.integers(1, limit.burst))
        left, retry, reset = limit.rules.view(state, limit, cost, now)
        assert (limit.charge(state, limit, cost, now) is None) == (retry > 0)
        assert (retry > 0) == (cost > left)
        if retry:
            assert limit.charge(state, limit, cost, now + retry - 1) is None
            assert limit.charge(state, limit, cost, now + retry) is not None
        assert limit.rules.view(state, limit, limit.burst, now + reset) == (limit.burst, 0, 0)
        assert not reset or limit.rules.view(state, limit, limit.burst, now + reset - 1)[2] == 1

    check()
