"""Corrections after the fact, against an oracle that replays the history with the actual costs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tests.core.oracle import TokenBucket, oracle_for
from tests.core.strategies import NAMES, START, costs, limits, used
from tidegate import Limit
from tidegate.core._algorithms import MAX_MARKS, LogEntries, refill
from tidegate.core._decision import adjust, hold
from tidegate.core.codec import dump

SECOND = 1_000_000


def remaining(limit, state, now):
    return max(0, limit.rules.view(state, limit, 0, now).remaining)


def held(limit, state, cost, now):
    """Charge with a mark; None if denied."""
    allowed, (state,), _ = hold((limit,), (state,), (cost,), now)
    return state if allowed else None


def corrected(limit, state, delta, now, at=None):
    return adjust((limit,), (state,), (delta,), now, at)[1][0]


def exact_level(limit, state, now):
    return limit.capacity if state is None else refill(state, limit, now)[0]


@given(limit=limits(("token_bucket",)), data=st.data())
def test_bucket_settles_like_a_replay_with_the_actual_costs(limit, data):
    """Never more than the replay, and within a permit of it unless more was taken for a reservation without a mark."""
    state, oracle, now, open_, exact = None, TokenBucket(limit), START, [], True
    for _ in range(data.draw(st.integers(1, 15))):
        now += data.draw(st.one_of(st.just(0), st.integers(0, max(1, limit.length // limit.quota)), st.just(1)))
        if open_ and data.draw(st.booleans()):
            call = open_.pop(data.draw(st.integers(0, len(open_) - 1)))
            actual = data.draw(st.integers(0, 2 * call[1]))
            full = any(oracle_full_since(oracle, call, time) for time, _ in [*oracle.calls, (now, 0)])
            own = has_own_mark(limit, state, call[0], now)
            state = corrected(limit, state, actual - call[1], now, call[0]) if actual != call[1] else state
            exact = exact and not (actual > call[1] and (full or not own))
            oracle.correct(call, actual)
        else:
            cost = data.draw(costs(limit))
            charge = held if data.draw(st.booleans()) else lambda li, s, c, n: li.charge(s, li, c, n)
            after = charge(limit, state, cost, now)
            assert after is None or oracle.allowed(cost, now)
            if after is not None:
                state = after
                call = oracle.charge(cost, now)
                if charge is held:
                    open_.append(call)
        level, replay = exact_level(limit, state, now), oracle.left(now) * limit.scale
        assert level <= replay
        if exact and len(marks(state)) < MAX_MARKS:
            assert replay - level < limit.scale


def marks(state):
    return () if state is None else state[3]


def has_own_mark(limit, state, at, now):
    """Tell whether a reservation has a mark of its own.

    Once the level has risen to that of an earlier mark, the two are one. What is then taken for the later reservation
    leaves that mark as high as it was, so that less may come back for the earlier one.
    """
    return any(since == at for since, _ in refill(state, limit, now)[2])


def oracle_full_since(oracle, call, time):
    """Return whether the bucket was full at an instant after the call, before any charge of that instant."""
    if time <= call[0]:
        return False
    earlier = TokenBucket(oracle.limit)
    earlier.calls = [other for other in oracle.calls if other[0] < time]
    return earlier.left(time) >= oracle.limit.burst


@pytest.mark.parametrize("algorithm", ["sliding_log", "concurrency", "fixed_window", "sliding_window"])
def test_window_settles_like_a_replay_with_the_actual_costs(algorithm):
    @given(limit=limits((algorithm,)), data=st.data())
    def check(limit, data):
        state, oracle, now, open_ = None, oracle_for(limit), START, []
        for _ in range(data.draw(st.integers(1, 12))):
            now += data.draw(st.one_of(st.just(0), st.integers(1, max(1, limit.length // 3)), st.just(limit.length)))
            if open_ and data.draw(st.booleans()):
                call = open_.pop(data.draw(st.integers(0, len(open_) - 1)))
                actual = data.draw(st.integers(0, call[1] + 3))
                if algorithm == "fixed_window" and not same_window(oracle, call, now):
                    actual = min(actual, call[1])  # an ended window stays as it was: less changes no later window
                state = corrected(limit, state, actual - call[1], now, call[0]) if actual != call[1] else state
                if algorithm != "fixed_window" or same_window(oracle, call, now):
                    oracle.correct(call, actual)
                    if algorithm == "fixed_window" and not oracle.used(now):
                        oracle.calls.clear()  # a window that nothing is counted in is closed
            else:
                cost = data.draw(costs(limit))
                after = held(limit, state, cost, now)
                assert (after is not None) == oracle.allowed(cost, now)
                if after is not None:
                    state = after
                    if not any(call[0] == now for call in oracle.calls):  # whose of one instant it is cannot be told
                        open_.append(oracle.charge(cost, now))
                    else:
                        oracle.charge(cost, now)
                        open_ = [call for call in open_ if call[0] != now]
            assert remaining(limit, state, now) == oracle.remaining(now)
            assert used(limit, state, now) == limit.burst - oracle.left(now) // 1

    check()


def same_window(oracle, call, now):
    """Return whether the fixed window that the call was counted in is still open."""
    start = None
    for time, _ in [*oracle.calls, (now, 0)]:
        if start is None or time >= start + oracle.limit.length:
            start = time
    return call[0] >= start


@pytest.mark.parametrize("algorithm", NAMES)
def test_refund_without_an_instant_never_gives_more_than_was_taken(algorithm):
    @given(limit=limits((algorithm,)), data=st.data())
    def check(limit, data):
        state, now = None, START
        for _ in range(data.draw(st.integers(1, 6))):
            now += data.draw(st.integers(0, max(1, limit.length // 4)))
            state = limit.charge(state, limit, data.draw(st.integers(1, limit.burst)), now) or state
        before = remaining(limit, state, now)
        back = data.draw(st.integers(1, limit.burst + 3))
        state = corrected(limit, state, -back, now)
        after = remaining(limit, state, now)
        assert before <= after <= min(limit.burst, before + back)
        assert corrected(limit, state, -10 * limit.burst, now) is None or algorithm == "sliding_window"

    check()


def test_a_refund_to_a_bucket_in_debt_is_not_capped_at_the_burst():
    """Found by verify_store: a refund of 99 after a charge of 13 left 7 permits in a bucket of 10."""
    limit = Limit(10, "1h")
    state = limit.charge(None, limit, 4, START)
    state = corrected(limit, state, 9, START)
    assert remaining(limit, state, START) == 0
    assert corrected(limit, state, -99, START) is None
    assert remaining(limit, corrected(limit, state, -13, START), START) == 10


def test_an_actual_cost_above_the_estimate_leaves_a_debt():
    limit = Limit(10, "10s")
    state = held(limit, None, 10, START)
    state = corrected(limit, state, 25, START + SECOND, START)
    assert limit.rules.view(state, limit, 1, START + SECOND) == (-24, 25 * SECOND, 34 * SECOND)


def test_debt_has_a_floor_that_refills_within_the_maximal_duration():
    limit = Limit(10, "10s")
    state = held(limit, None, 10, START)
    for _ in range(3):
        state = corrected(limit, state, 2**53 - 1, START, START)
    assert limit.rules.view(state, limit, 1, START)[2] <= 2**52


def test_more_open_reservations_than_marks_are_still_mostly_refunded():
    """Found by reading: only the last marks were kept, so earlier reservations were not refunded at all."""
    limit = Limit(100_000, "1m")
    state, starts = None, []
    for number in range(50):
        starts.append(START + number * 100)
        state = held(limit, state, 1000, starts[-1])
    now = starts[-1]
    replay = TokenBucket(limit)
    calls = [replay.charge(1000, start) for start in starts]
    for start, call in zip(starts, calls, strict=True):
        state = corrected(limit, state, -500, now, start)
        replay.correct(call, 500)
    assert len(marks(state)) <= MAX_MARKS
    assert replay.remaining(now) - 8000 < remaining(limit, state, now) <= replay.remaining(now)


def test_reservations_of_one_instant_need_one_mark():
    limit = Limit(1000, "1h")
    state = None
    for _ in range(100):
        state = held(limit, state, 10, START)
    assert len(marks(state)) == 1
    for _ in range(100):
        state = corrected(limit, state, -5, START, START)
    assert remaining(limit, state, START) == 500


def test_a_debit_does_not_reduce_a_later_refund():
    """Found by reading: a debit did not lower the marks, so a later refund was too small."""
    limit = Limit(10, "10s")
    state = held(limit, None, 2, START)  # 8 left
    state = held(limit, state, 2, START + SECOND)  # 9 - 2
    state = corrected(limit, state, 4, START + SECOND, START)  # the first cost 6: 5 - 2
    state = corrected(limit, state, -2, START + 6 * SECOND, START + SECOND)
    replay = TokenBucket(limit)
    replay.charge(6, START)
    assert remaining(limit, state, START + 6 * SECOND) == replay.remaining(START + 6 * SECOND) == 10


def test_log_correction_takes_one_pass(monkeypatch):
    """Found by reading: refunding 20,000 permits of 20,000 calls took 200 million additions."""
    limit = Limit(10**6, "1h", "sliding_log")
    state = None
    for number in range(20_000):
        state = limit.charge(state, limit, 1, START + number)
    looks = 0
    plain = LogEntries.costs

    def counting(*args):
        nonlocal looks
        for entry in plain(*args):
            looks += 1
            yield entry

    monkeypatch.setattr(LogEntries, "costs", counting)
    state = corrected(limit, state, -19_999, START + 20_000)
    assert remaining(limit, state, START + 20_000) == 10**6 - 1
    assert looks <= 20_000


def test_slots_are_released_without_copying():
    limit = Limit(10_000, "1h", "concurrency")
    state = None
    for number in range(10_000):
        state = limit.charge(state, limit, 1, START + number)
    after = corrected(limit, state, -1, START + 10_000)
    assert after is not None
    assert state is not None
    assert after[1] is state[1]
    assert remaining(limit, after, START + 10_000) == 1
    assert remaining(limit, state, START + 10_000) == 0, "the state before is as it was"


def test_expired_entries_do_not_count_towards_the_bound_of_a_correction():
    """Found by reading: expired entries counted towards the bound, so a debit gave permits back."""
    most = 2**53 - 1
    limit = Limit(most, "1s", "sliding_log")
    state = None
    for number in range(5):
        state = limit.charge(state, limit, most - 10, START + number * SECOND)
    now = START + 4 * SECOND
    state = corrected(limit, state, 5, now, now)
    assert remaining(limit, state, now) == 5
    state = corrected(limit, state, -7, now, now)
    assert remaining(limit, state, now) == 12


def test_a_debit_for_one_reservation_does_not_reduce_the_refund_of_the_next():
    """As if the first had cost 5 from the start: then the bucket was never above 6, and 4 more fit."""
    limit = Limit(10, "10s")
    state = held(limit, None, 2, START)
    state = held(limit, state, 4, START + SECOND)
    now = START + 5 * SECOND
    assert remaining(limit, state, now) == 9
    state = corrected(limit, state, 3, now, START)
    assert remaining(limit, state, now) == 6
    assert corrected(limit, state, -4, now, START + SECOND) is None, "full"


def test_a_bucket_debited_for_one_of_two_reservations_of_one_instant():
    limit = Limit(10, "10s")
    state = held(limit, held(limit, None, 2, START), 4, START)
    now = START + 4 * SECOND
    assert remaining(limit, state, now) == 8
    state = corrected(limit, state, 3, now, START)
    assert remaining(limit, corrected(limit, state, -4, now, START), now) == 9


@cases(
    ("delta", "at", "entries"),
    [
        (-1, 1, [0, 2, 1, 2, 2, 1, 3, 4]),
        (2, 1, [0, 2, 1, 5, 2, 1, 3, 4]),
        (-3, 1, [0, 2, 2, 1, 3, 4]),
        (-9, 1, [0, 2, 2, 1, 3, 4]),
        (-6, None, [0, 2, 1, 2]),
        (-4, None, [0, 2, 1, 3, 2, 1]),
        (-1, 3, [0, 2, 1, 3, 2, 1, 3, 3]),
        (-2, 0, [1, 3, 2, 1, 3, 4]),
        (5, 7, [0, 2, 1, 3, 2, 1, 3, 4]),
    ],
)
def test_entries_of_a_log_are_corrected_in_place(delta, at, entries):
    limit = Limit(20, "1m", "sliding_log")
    state = None
    for second, cost in enumerate([2, 3, 1, 4]):
        state = limit.charge(state, limit, cost, START + second * SECOND)
    now = START + 10 * SECOND
    after = corrected(limit, state, delta, now, None if at is None else START + at * SECOND)
    assert after is not None
    told = [number if place % 2 else (number - START) // SECOND for place, number in enumerate(dump(after))]
    assert told == entries
    assert remaining(limit, after, now) == 20 - sum(entries[1::2])
    assert limit.rules.view(after, limit, 20, now)[1] == START + (entries[-2] + 60) * SECOND - now
