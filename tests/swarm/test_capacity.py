"""The capacity of a resource, in virtual time: the document's timeline, and merging against a brute-force oracle."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tidegate import ConfigError
from tidegate.adaptive import CapacityState, RecoverySettings, read_recovery_settings
from tidegate.adaptive._capacity import MAX_FREEZE, MAX_REDUCTIONS
from tidegate.core._bounds import MAX_INTEGER, SECOND

TIMELINE = [50, 55, 60, 66, 72, 79, 86, 94, 100]


def test_the_timeline_of_the_specification():
    state = CapacityState(100).reduce(0, 1, "me")
    assert [state.current(30 * SECOND * step) for step in range(10)] == [*TIMELINE, 100]
    assert [state.current(30 * SECOND * step - 1) for step in range(1, 10)] == TIMELINE
    assert state.recovered_at(0) == 240 * SECOND
    assert state.next_change(0) == 30 * SECOND
    assert state.next_change(210 * SECOND) == 240 * SECOND
    assert state.next_change(240 * SECOND) is None


def test_capacity_without_reductions():
    state = CapacityState(7)
    assert (state.current(0), state.next_change(0), state.frozen_until, state.epoch) == (7, None, None, 0)
    assert state.in_force(0) == []
    assert state.recovered_at(5) == 5


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        (RecoverySettings(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
        (RecoverySettings(recover=Fraction(2)), [1, 2, 4, 8, 12, 12]),
        (RecoverySettings(recover=Fraction(2), beyond=True), [1, 2, 4, 8, 16, 16]),
        (RecoverySettings(interval=None), [1, 1, 1]),
    ],
)
def test_steps_of_recovery(settings, values):
    state = CapacityState(12, settings).merge(0, 1, "peer", 1)
    assert [state.current(30 * SECOND * step) for step in range(len(values))] == values


def test_factors_are_exact_fractions():
    """0.1 as a float is a little more than a tenth: of a large capacity, that is a permit."""
    settings = read_recovery_settings(0.1, 1.1)
    assert (settings.reduce, settings.recover) == (Fraction(1, 10), Fraction(11, 10))
    assert settings.reduced(10**15) == 10**14
    assert settings.recovered(10**15) == 11 * 10**14
    assert read_recovery_settings(Fraction(1, 3)).reduced(10) == 3


@cases(
    ("wrong", "message"),
    [
        ({"reduce_factor": 1}, "reduce_factor: must be between 0 and 1"),
        ({"reduce_factor": 0}, "reduce_factor: must be between 0 and 1"),
        ({"reduce_factor": float("nan")}, "reduce_factor: must be a number, not nan"),
        ({"reduce_factor": "half"}, "reduce_factor: must be a number, not 'half'"),
        ({"recovery_factor": 1.0}, "recovery_factor: must be greater than 1"),
        ({"recovery_interval": 0}, "recovery_interval: must be greater than 0, not 0"),
        ({"recovery_interval": -1}, "recovery_interval: must be a non-negative number of seconds, not -1"),
        ({"cooldown": "1s"}, "cooldown: must be a non-negative number of seconds, not '1s'"),
    ],
)
def test_invalid_settings_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        read_recovery_settings(**wrong)


def test_reductions_compound_down_to_one():
    state, seen = CapacityState(10), []
    for epoch in range(1, 7):
        state = state.reduce(0, epoch, "me")
        seen.append(state.current(0))
    assert seen == [5, 2, 1, 1, 1, 1]


def test_a_duplicate_within_the_cooldown_does_not_reduce():
    state = CapacityState(100, read_recovery_settings(cooldown=2)).reduce(0, 1, "me")
    assert state.reduce(2 * SECOND - 1, 2, "me").current(2 * SECOND) == 50
    assert state.reduce(2 * SECOND, 2, "me").current(2 * SECOND) == 25
    frozen = state.reduce(SECOND, 2, "me", retry_after=5 * SECOND)
    assert frozen.frozen_until == 6 * SECOND, "what it says of waiting counts all the same"


def test_a_freeze_delays_recovery():
    state = CapacityState(100).reduce(0, 1, "me", retry_after=12 * SECOND)
    assert state.frozen_until == 12 * SECOND
    assert state.current(12 * SECOND + 30 * SECOND - 1) == 50
    assert state.current(12 * SECOND + 30 * SECOND) == 55
    longer = state.merge(SECOND, 2, "peer", 50, retry_after=5 * SECOND)
    assert longer.frozen_until == 12 * SECOND, "a shorter one does not end a longer one"
    absurd = state.merge(SECOND, 2, "peer", 50, retry_after=10**15)
    assert absurd.frozen_until == SECOND + MAX_FREEZE


def test_a_value_above_the_original_is_not_a_reduction():
    state = CapacityState(100)
    assert state.merge(0, 1, "peer", 101) is state
    assert state.merge(0, 1, "peer", 100) is state
    assert state.merge(0, 1, "peer", 0) is state
    assert state.merge(0, 1, "peer", 100, retry_after=5).frozen_until == 5, "but its freeze counts"


def test_only_reduces_never_increases():
    state = CapacityState(100).merge(0, 1, "peer", 40).merge(0, 2, "other", 70)
    assert state.current(0) == 40


def test_a_stale_message_undoes_nothing():
    """The newer reduction has recovered; the older one comes late, for the first time or again."""
    newer = CapacityState(100).merge(0, 9, "peer", 50)
    late = 300 * SECOND
    assert newer.current(late) == 100
    assert newer.merge(late, 5, "other", 20).current(late) == 46, "as old as the newer at least: ten steps"
    assert newer.merge(late, 9, "peer", 50) is newer
    assert newer.merge(late, 5, "other", 60).current(late) == 100


def test_the_age_of_a_message_counts():
    state = CapacityState(100).merge(100 * SECOND, 1, "peer", 50, age=60 * SECOND)
    assert state.current(100 * SECOND) == 60
    assert state.merge(100 * SECOND, 1, "peer", 50, age=-5) is state, "from the future is from now"


def test_epochs_exceed_all_received_and_the_wall_clock():
    state = CapacityState(100)
    assert state.next_epoch(1000) == 1000
    assert state.merge(0, 5000, "fast clock", 50).next_epoch(1000) == 5001
    assert state.merge(0, MAX_INTEGER, "broken", 50).next_epoch(1000) == MAX_INTEGER


def test_restart_ends_reductions():
    state = CapacityState(100).merge(0, 7, "peer", 50).restart(80)
    assert (state.current(0), state.reductions) == (80, ())
    assert state.merge(0, 7, "peer", 50) is state, "what was reduced before is settled"
    assert state.merge(0, 8, "peer", 50).current(0) == 50


def test_the_number_of_reductions_is_bounded():
    state = CapacityState(1000).merge(0, 1, "lowest", 3)
    for epoch in range(2, 200):
        state = state.merge(epoch, epoch, f"agent {epoch}", 500)
    assert len(state.reductions) == MAX_REDUCTIONS
    assert state.current(200) == 3, "what is in force is folded, not dropped"
    assert state.merge(300, 1, "lowest", 3) is state
    late = 10**6 * SECOND
    assert state.current(late) == 1000
    for epoch in range(200, 400):
        state = state.merge(late, epoch, f"agent {epoch}", 500)
    assert state.current(late) == 500, "what had recovered is not"


# ---- merging, against an oracle --------------------------------------------------------------------------------------

message = st.tuples(
    st.integers(1, 8),  # epoch
    st.sampled_from("abc"),
    st.integers(1, 22),  # value; the original is 20
    st.sampled_from([0, 0, 7, 40, 100]),  # age
    st.sampled_from([0, 0, 0, 5, 35]),  # retry_after
)
INTERVAL = 10


def fresh():
    return CapacityState(20, RecoverySettings(interval=INTERVAL))


def oracle(messages, now, at):
    """The capacity at an instant and when the freeze ends, of messages that all arrived at `now`."""
    valid = [m for m in messages if m[2] < 20 or (m[2] == 20 and m[4])]
    capacity, frozen = 20, None
    for epoch, _, start, _, pause in valid:
        value = start
        since = min(now - age for other, _, _, age, _ in valid if other >= epoch)
        if pause:
            frozen = max(frozen or 0, since + pause)
        steps = max(0, at - since - pause) // INTERVAL
        for _ in range(steps):
            value = max(value + 1, value * 11 // 10)
        capacity = min(capacity, value)
    return capacity, frozen


@given(st.lists(message, max_size=8), st.integers(0, 300), st.randoms())
def test_merging_is_independent_of_order_and_repetition(messages, later, random):
    now = 1000
    state = shuffled = fresh()
    for epoch, agent, value, age, pause in messages:
        state = state.merge(now, epoch, agent, value, age=age, retry_after=pause)
    again = messages * 2
    random.shuffle(again)
    for epoch, agent, value, age, pause in again:
        shuffled = shuffled.merge(now, epoch, agent, value, age=age, retry_after=pause)
    at = now + later
    assert (state.current(at), state.frozen_until) == (shuffled.current(at), shuffled.frozen_until)
    assert (state.current(at), state.frozen_until) == oracle(messages, now, at)
    assert 1 <= state.current(at) <= 20


@given(st.lists(st.tuples(st.integers(0, 60), message), max_size=10), st.integers(0, 200), st.data())
def test_a_repeated_message_changes_nothing(arrivals, later, data):
    now, state = 1000, fresh()
    for passed, (epoch, agent, value, age, pause) in arrivals:
        now += passed
        state = state.merge(now, epoch, agent, value, age=age, retry_after=pause)
    if not arrivals:
        return
    _, (epoch, agent, value, _, pause) = data.draw(st.sampled_from(arrivals))
    again = state.merge(now + later, epoch, agent, value, retry_after=pause)
    for at in range(now + later, now + later + 100, 5):
        assert (again.current(at), again.frozen_until) == (state.current(at), state.frozen_until)


@given(st.lists(st.tuples(st.integers(0, 60), message), max_size=10))
def test_capacity_changes_only_at_next_change(arrivals):
    now, state = 1000, fresh()
    for passed, (epoch, agent, value, age, pause) in arrivals:
        now += passed
        state = state.merge(now, epoch, agent, value, age=age, retry_after=pause)
    value = state.current(now)
    while (change := state.next_change(now)) is not None:
        assert change > now
        assert state.current(change - 1) == value
        assert state.current(change) >= value
        now, value = change, state.current(change)
    assert value == 20
    assert state.recovered_at(now) == max(now, state.frozen_until or 0)


def test_duplicates_that_freeze_do_not_prolong_the_time_for_duplicates():
    """A server that refuses every second call with Retry-After: 1 is still called too often after the interval."""
    settings = read_recovery_settings(recovery="remember", recovery_interval=30)
    state = CapacityState(100, settings).reduce(0, 1, "me", retry_after=SECOND)
    for second in range(2, 31, 2):
        state = state.reduce(second * SECOND, second, "me", retry_after=SECOND)
        assert state.current(second * SECOND) == 50
    state = state.reduce(32 * SECOND, 32, "me", retry_after=SECOND)
    assert state.current(32 * SECOND) == 25


def test_cooldown_is_not_prolonged_by_duplicates_that_freeze():
    settings = read_recovery_settings(cooldown=5)
    state = CapacityState(100, settings).reduce(0, 1, "me", retry_after=SECOND)
    for second in (2, 4):
        state = state.reduce(second * SECOND, second, "me", retry_after=SECOND)
    assert state.reduce(6 * SECOND, 6, "me", retry_after=SECOND).current(6 * SECOND) == 25


def refuse_after(state, *holds):
    """Refuse with a freeze of a minute, a time after the end of the freeze before (in seconds)."""
    now = 0
    for epoch, hold in enumerate(holds, 1):
        now += hold * SECOND
        state = state.reduce(now, epoch, "me", retry_after=60 * SECOND, began=now)
        now += 60 * SECOND
    return state.current(now)


@pytest.mark.parametrize(("held", "refused", "reduced"), [(160, 852, 629), (400, 911, 814), (2000, 940, 911)])
def test_a_value_counts_as_allowed_by_how_long_it_was_held(held, refused, reduced):
    """A server with a burst serves 735 for 80 s, and refuses 852 soon after: its limit may be far below 735."""
    state = CapacityState(1000, read_recovery_settings(recovery="remember", recovery_interval=18))
    assert state.reduce(0, 1, "me", retry_after=60 * SECOND).current((60 + held) * SECOND) == refused
    assert refuse_after(state, 0, held) == reduced


def test_a_duplicate_remembers_the_capacity_that_was_refused():
    settings = read_recovery_settings(recovery="remember", recovery_interval=30)
    state = CapacityState(100, settings).reduce(0, 1, "me").reduce(SECOND, 2, "me", retry_after=SECOND)
    assert [reduction.refused_at for reduction in state.reductions] == [100, 100]
    assert state.current(70 * SECOND) == 94
