"""Windows of limits that change: what was used stays used until its window ends, whatever changes, however often."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import START
from tests.core.window_oracle import WindowOracle
from tidegate import Limit
from tidegate.core._bounds import SECOND
from tidegate.core._windows import MAX_OLDER_WINDOWS
from tidegate.core.codec import dump, limit_of, load

MINUTE, HOUR, DAY = 60 * SECOND, 3600 * SECOND, 86_400 * SECOND


quotas = st.integers(1, 30)
calendars = st.builds(
    lambda quota, period, zone, hour, day: Limit(
        quota, period, "calendar_window", name="l", timezone=zone,
        reset_hour=0 if period == "hour" else hour, reset_day=1 if period in ("hour", "day") else day,
    ),
    quotas,
    st.sampled_from(["hour", "day", "day", "week", "month", "year"]),
    st.sampled_from(["UTC", "Asia/Kolkata", "America/New_York"]),
    st.sampled_from([0, 0, 5, 18]),
    st.integers(1, 7),
)  # fmt: skip
fixed = st.builds(
    lambda quota, minutes: Limit(quota, f"{minutes}m", "fixed_window", name="l"),
    quotas,
    st.sampled_from([1, 2, 7, 60, 90]),
)
LIMITS = {"calendar_window": calendars, "fixed_window": fixed}
STEPS = {
    "calendar_window": st.sampled_from(
        [0, 0, 1, MINUTE, 20 * MINUTE, 3 * HOUR, 11 * HOUR, DAY, 5 * DAY, 20 * DAY, -HOUR]
    ),
    "fixed_window": st.sampled_from([0, 0, 1, 20 * SECOND, MINUTE, MINUTE - 1, 5 * MINUTE, 31 * MINUTE, HOUR, -SECOND]),
}


def view_of(limit, state, cost, now):
    return limit.rules.view(state, limit, cost, now)


@pytest.mark.parametrize("algorithm", LIMITS)
def test_every_answer_agrees_with_the_oracle(algorithm):
    """Limits change at random instants, lowered, raised, back and forth; every answer is exact, also in between."""

    @given(versions=st.lists(LIMITS[algorithm], min_size=2, max_size=5), data=st.data())
    def check(versions, data):
        state, oracle, now, exact = None, WindowOracle(), START, True
        limit = versions[0]
        for _ in range(data.draw(st.integers(2, 16), label="steps")):
            now += data.draw(STEPS[algorithm], label="gap")
            if data.draw(st.booleans(), label="change"):
                limit = data.draw(st.sampled_from(versions), label="limit")
            cost = data.draw(st.one_of(st.integers(1, 3), st.integers(1, limit.quota + 1)), label="cost")
            state = state if state is None else load(limit_of(state), dump(state))
            before = oracle.used(limit, now)
            if exact:
                assert_agrees(limit, state, oracle, cost, now)
            after = limit.charge(state, limit, cost, now)
            if after is not None:
                assert before + cost <= limit.quota, "admitted more than the quota in force"
                oracle.admit(limit, cost, now)
                state = after
                start = oracle.window(limit, now)[0]
                assert sum(call.cost for call in oracle.calls if call.at >= start) <= limit.quota
            elif exact:
                assert before + cost > limit.quota, "denied needlessly"
            exact = exact and oracle.older() <= MAX_OLDER_WINDOWS

    check()


def assert_agrees(limit, state, oracle, cost, now):
    """Compare a view with the oracle: remaining, retry and reset."""
    remaining, retry, reset = view_of(limit, state, cost, now)
    assert remaining == limit.quota - oracle.used(limit, now)
    assert (retry == 0) == (cost <= max(0, remaining))
    if retry > 0:
        assert cost > limit.quota - oracle.used(limit, now + retry - 1)
        assert cost <= limit.quota - oracle.used(limit, now + retry)
    assert retry >= -1
    assert (retry == -1) == (cost > limit.quota)
    assert not oracle.alive(now + reset)
    assert not reset or oracle.alive(now + reset - 1)
    assert view_of(limit, state, cost, now + reset) == view_of(limit, None, cost, now + reset)
