"""Every algorithm against the brute-force oracle: never over, never needlessly denied, every number exact."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tests.core.oracle import SlidingWindow, oracle_for
from tests.core.strategies import NAMES, START, costs, gaps, limits, used
from tidegate import Limit
from tidegate._policy import Policy
from tidegate.core._algorithms import NEVER
from tidegate.core._decision import States, acquire, peek
from tidegate.core.codec import dump, limit_of, load


def view_of(limit, state, cost, now):
    return limit.rules.view(state, limit, cost, now)


def assert_agrees(limit, state, oracle, now, cost):
    """Compare every result at an instant with the oracle."""
    remaining, retry, reset = view_of(limit, state, cost, now)
    allowed = oracle.allowed(cost, now)
    assert (retry == 0) == allowed
    assert max(0, remaining) == oracle.remaining(now)
    assert used(limit, state, now) == limit.burst - oracle.left(now) // 1
    if cost > limit.burst:
        assert retry == NEVER
    elif not allowed:
        assert retry > 0
        assert not oracle.allowed(cost, now + retry - 1), "would have been allowed earlier"
        assert oracle.allowed(cost, now + retry), "is not allowed when it was promised"
        assert view_of(limit, state, cost, now + retry - 1)[1] == 1
        assert view_of(limit, state, cost, now + retry)[1] == 0
    assert_resets(limit, state, oracle, now, reset)


def assert_resets(limit, state, oracle, now, reset):
    assert oracle.fresh(now + reset)
    assert reset == 0 or not oracle.fresh(now + reset - 1)
    if state is not None:
        assert limit.rules.expires(state) == now + reset or reset == 0
        for cost in (1, limit.burst):
            assert view_of(limit, state, cost, now + reset) == view_of(limit, None, cost, now + reset), (
                "not like no state"
            )
            after, fresh = (limit.charge(s, limit, cost, now + reset) for s in (state, None))
            assert view_of(limit, after, 1, now + reset) == view_of(limit, fresh, 1, now + reset)


def play(limit, data, steps=12):
    """Make random calls, and compare at each."""
    state, oracle, now = None, oracle_for(limit), START
    retry = 0
    for _ in range(data.draw(st.integers(1, steps), label="steps")):
        if retry > 0 and data.draw(st.booleans(), label="wait for retry"):
            now += retry - data.draw(st.sampled_from([0, 1]), label="early")
        else:
            now += data.draw(gaps(limit.length), label="gap")
        cost = data.draw(costs(limit), label="cost")
        assert_agrees(limit, state, oracle, now, cost)
        retry = view_of(limit, state, cost, now)[1]
        before = None if state is None else dump(state)
        after = limit.charge(state, limit, cost, now)
        assert (after is not None) == oracle.allowed(cost, now)
        assert before == (None if state is None else dump(state)), "a transition changed the state before it"
        if after is not None:
            state = after
            oracle.charge(cost, now)
        assert_agrees(limit, state, oracle, now, 0)
        if state is not None:
            again = load(limit_of(state), dump(state))
            assert dump(again) == dump(state)
            assert view_of(limit, again, cost, now) == view_of(limit, state, cost, now)
    return state, oracle, now


@pytest.mark.parametrize("algorithm", [*NAMES, "calendar_window"])
def test_algorithm_against_oracle(algorithm):
    @given(limit=limits((algorithm,)), data=st.data())
    def check(limit, data):
        play(limit, data)

    check()


@given(data=st.data())
def test_policies_against_oracle(data):
    """One to six limits of all kinds and units: all or nothing, denied and peeked calls change nothing."""
    units = ["requests", "tokens"]
    kinds = [
        data.draw(limits(name=f"l{place}", unit=data.draw(st.sampled_from(units))))
        for place in range(data.draw(st.integers(1, 6)))
    ]
    policy = Policy("p", tuple(kinds))
    states: States = [None] * len(kinds)
    oracles = [oracle_for(limit) for limit in kinds]
    now = START
    for _ in range(data.draw(st.integers(1, 10))):
        now += data.draw(gaps(data.draw(st.sampled_from(kinds)).length))
        asked = {unit: data.draw(st.one_of(st.just(1), st.integers(0, 50))) for unit in units}
        wanted = policy.costs({unit: cost for unit, cost in asked.items() if unit in {k.unit for k in kinds}})
        expected = all(oracle.allowed(cost, now) for oracle, cost in zip(oracles, wanted, strict=True))
        before = [state and dump(state) for state in states]
        looked, _, _ = peek(policy.limits, states, wanted, now)
        allowed, after, left = acquire(policy.limits, states, wanted, now)
        assert looked == allowed == expected
        assert before == [state and dump(state) for state in states]
        if allowed:
            assert not any(left)
            states = after
            for oracle, cost in zip(oracles, wanted, strict=True):
                if cost:
                    oracle.charge(cost, now)
        else:
            assert after is states
            assert list(left) == list(wanted)
        for limit, state, oracle in zip(kinds, states, oracles, strict=True):
            assert_agrees(limit, state, oracle, now, 0)


@given(limit=limits(("sliding_window",)), data=st.data())
def test_sliding_window_is_the_documented_formula(limit, data):
    assert limit.tick == 1
    state, oracle, now = play(limit, data)
    exact = oracle.exact(now)
    remaining = view_of(limit, state, 0, now)[0]
    assert remaining == limit.quota + (-exact // 1)


@given(
    quota=st.integers(10**9, 2**52),
    length=st.integers(10**7, 40 * 365 * 86_400 * 10**6),
    share=st.fractions(0, 1),
    ahead=st.fractions(0, 1),
)
def test_coarse_sliding_window_is_conservative(quota, length, share, ahead):
    if quota * length > 2**53 * (length // 10**6):
        with pytest.raises(ValueError, match="too many for a sliding_window"):
            Limit(quota, f"{length}us", "sliding_window")
        return
    limit = Limit(quota, f"{length}us", "sliding_window")
    oracle = SlidingWindow(limit)
    start = START - START % length + length
    cost = max(1, int(quota * share))
    state = limit.charge(None, limit, cost, start)
    oracle.charge(cost, start)
    now = start + length + int(length * ahead)
    remaining = view_of(limit, state, 0, now)[0]
    exact = limit.quota - oracle.exact(now)
    assert remaining <= exact
    assert exact - remaining <= 1 + cost * Fraction(2 * limit.tick, length)
    retry = view_of(limit, state, quota, now)[1]
    if retry:
        assert limit.charge(state, limit, quota, now + retry - 1) is None
        assert limit.charge(state, limit, quota, now + retry) is not None


@cases("hours", [1, 13, 25, 37])
@cases("cost", [1, 3 * 10**8, 10**9])
def test_retry_of_a_window_with_coarse_ticks(hours, cost):
    limit = Limit(10**9, "1d", "sliding_window")
    assert limit.tick > 1
    day = START - START % (86_400 * 10**6)
    state = limit.charge(None, limit, 10**9, day + 3600 * 10**6)
    now = day + hours * 3600 * 10**6
    retry = limit.rules.view(state, limit, cost, now)[1]
    if retry:
        assert limit.charge(state, limit, cost, now + retry - 1) is None
    assert limit.charge(state, limit, cost, now + retry) is not None
