"""Reservations: an estimate now, the actual cost later, in the window that was charged."""

import pytest

from tests.cases import cases
from tidegate import AsyncLimiter, Denied, Limit, Limiter, Policy, RateLimitError
from tidegate.testing import ManualClock

START = 1_728_000_000
ALGORITHMS = ["token_bucket", "fixed_window", "sliding_window", "sliding_log"]


@pytest.fixture
def clock():
    return ManualClock(START)


def used(limiter, key="k"):
    return [view.used for view in limiter.usage(key).values()]


def test_the_example_of_the_contract(clock):
    limiter = Limiter([Limit(60, "1m"), Limit(90_000, "1m", unit="tokens", burst=120_000, name="tpm")], clock=clock)
    with limiter.reserve("openai", cost={"requests": 1, "tokens": 1800}, ttl=60) as reservation:
        assert used(limiter, "openai") == [1, 1800]
        reservation.commit({"tokens": 921})
    assert used(limiter, "openai") == [1, 921]
    assert reservation.settled


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_commit_refunds_or_debits_the_difference(clock, algorithm):
    limiter = Limiter(Limit(100, "100s", algorithm=algorithm), clock=clock)
    limiter.reserve("k", cost=40).commit(25)
    assert used(limiter) == [25]
    limiter.reserve("k", cost=10).commit(30)
    assert used(limiter) == [55]
    limiter.reserve("k", cost=10).commit()
    assert used(limiter) == [65]
    limiter.reserve("k", cost=10).cancel()
    assert used(limiter) == [65]


@cases("algorithm", [*ALGORITHMS, "calendar_window"])
@cases("seconds", [0, 1, 300])
def test_a_unit_estimated_as_0_is_charged_at_the_commit(clock, algorithm, seconds):
    """Found by reading: a fixed window and a log had nothing to correct, so the actual cost was not charged."""
    period = "day" if algorithm == "calendar_window" else "1d"
    limits = [Limit(10, period, algorithm, name="calls"), Limit(1000, period, algorithm, unit="tokens", name="tokens")]
    limiter = Limiter(limits, clock=clock)
    reservation = limiter.reserve("k", cost={"requests": 1, "tokens": 0})
    clock.advance(seconds)
    reservation.commit({"tokens": 921})
    assert used(limiter) == [1 if algorithm != "token_bucket" else used(limiter)[0], 921]
    limiter.reserve("k", cost={"tokens": 0}).cancel()
    assert used(limiter)[1] == 921


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_actual_cost_may_exceed_the_limit(clock, algorithm):
    limiter = Limiter(Limit(10, "10s", algorithm=algorithm), clock=clock)
    limiter.reserve("k", cost=5).commit(15)
    assert not limiter.peek("k")
    assert limiter.peek("k", cost=0), "a call that costs nothing is not refused"


@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_log"])
def test_a_window_that_has_passed_is_not_corrected(clock, algorithm):
    limiter = Limiter(Limit(10, "10s", algorithm=algorithm), clock=clock)
    early, late = limiter.reserve("k", cost=4), limiter.reserve("k", cost=1)
    clock.advance(10)
    limiter.try_acquire("k", cost=3)
    early.commit(1)
    late.commit(9)
    assert used(limiter) == [3]


def test_the_previous_window_is_corrected_while_it_counts(clock):
    limiter = Limiter(Limit(10, "10s", algorithm="sliding_window"), clock=clock)
    reservation = limiter.reserve("k", cost=10)
    clock.advance(10)  # START lies on a window: now the previous one, at full weight
    assert used(limiter) == [10]
    reservation.commit(4)
    assert used(limiter) == [4]


def test_a_bucket_refunds_only_what_was_not_refilled_since(clock):
    limiter = Limiter("10/10s", clock=clock)
    reservation = limiter.reserve("k", cost=5)
    clock.advance(1)
    reservation.commit(2)
    assert limiter.peek("k", cost=0).remaining == 9, "as if only 2 had been taken a second ago"
    limiter.reset("k")
    healed = limiter.reserve("k", cost=5)
    clock.advance(5)  # full again: had nothing been taken, it would be no fuller
    limiter.try_acquire("k", cost=3)
    healed.cancel()
    assert limiter.peek("k", cost=0).remaining == 7


def test_a_bucket_remembers_the_highest_level_since_each_reservation(clock):
    limiter = Limiter("10/10s", clock=clock)
    reservation = limiter.reserve("k", cost=6)  # 4 left
    clock.advance(3)  # 7: of the 6 taken, 3 would have spilled
    limiter.try_acquire("k", cost=7)
    reservation.cancel()
    assert limiter.peek("k", cost=0).remaining == 3


def test_settling_releases_slots(clock):
    limiter = Limiter([Limit(2, "1h", "concurrency", name="slots"), Limit(10, "1m", "fixed_window")], clock=clock)
    first, second = limiter.reserve("k"), limiter.reserve("k")
    with pytest.raises(Denied):
        limiter.reserve("k")
    first.commit()
    assert used(limiter) == [1, 2]
    second.cancel()
    assert used(limiter) == [0, 1]


def test_an_exception_cancels_and_a_plain_end_commits(clock):
    limiter = Limiter("10/10s", clock=clock)
    with limiter.reserve("k", cost=3):
        pass
    assert used(limiter) == [3]
    with pytest.raises(ZeroDivisionError), limiter.reserve("k", cost=3):
        raise ZeroDivisionError
    assert used(limiter) == [3]


def test_settling_twice_is_an_error(clock):
    reservation = Limiter("10/10s", clock=clock).reserve("k")
    reservation.commit()
    for again in (reservation.commit, reservation.cancel):
        with pytest.raises(RateLimitError, match="the reservation for 'k' is already settled"):
            again()
    assert "settled" in repr(reservation)


def test_an_expired_reservation_stays_charged_as_estimated(clock):
    limiter = Limiter("100/100s fixed_window", clock=clock)
    lapsed = limiter.reserve("k", cost=10, ttl=60)
    overrun = limiter.reserve("k", cost=10, ttl=60)
    clock.advance(60)
    assert lapsed.expired
    lapsed.cancel()
    assert used(limiter) == [20]
    overrun.commit(15)
    assert used(limiter) == [25], "what was used beyond the estimate was used all the same"


def test_reserve_waits_only_with_a_timeout(clock):
    limiter = Limiter("1/10s", clock=clock)
    limiter.reserve("k").commit()
    with pytest.raises(Denied):
        limiter.reserve("k")
    assert clock.now() == START
    limiter.reserve("k", timeout=20).commit()
    assert clock.now() == START + 10


async def test_async_reservations_can_be_awaited_or_entered(clock):
    limiter = AsyncLimiter("10/10s", clock=clock)
    reservation = await limiter.reserve("k", cost=5)
    await reservation.commit(2)
    async with limiter.reserve("k", cost=5) as reservation:
        await reservation.commit(1)
    async with limiter.reserve("k", cost=2):
        pass
    with pytest.raises(ZeroDivisionError):
        async with limiter.reserve("k", cost=2):
            raise ZeroDivisionError
    await (await limiter.reserve("k")).cancel()
    assert (await limiter.usage("k"))["10s"].used == 5


def test_a_commit_while_the_clock_stepped_back_finds_its_entry(clock):
    limiter = Limiter(Limit(3, "10s", "sliding_log"), clock=clock)
    limiter.try_acquire("k")
    clock.advance(-5)
    reservation = limiter.reserve("k", cost=2)
    assert not limiter.try_acquire("k")
    reservation.cancel()
    assert used(limiter) == [1]


@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_log", "concurrency"])
def test_a_shadow_call_that_was_not_charged_is_not_refunded(clock, algorithm):
    limiter = Limiter(Policy("p", (Limit(1, "1h", algorithm),), mode="shadow"), clock=clock)
    limiter.acquire("k")
    limiter.reserve("k").cancel()
    with limiter.limited("k"):
        pass
    assert used(limiter) == [1]


def test_a_reservation_settles_by_the_policy_that_charged_it(clock):
    limiter = Limiter("5/1h fixed_window", clock=clock)
    reservation = limiter.reserve("k", cost=3)
    limiter.update(["5/1h fixed_window", "9/1m fixed_window"])
    reservation.cancel()
    assert used(limiter) == [0, 0]


@pytest.mark.parametrize(("reservations", "kept"), [(4, 0), (20, 7), (100, 31)])
def test_a_bucket_with_many_open_reservations_refunds_too_little(reservations, kept):
    """The figures of docs/concepts/waiting.md."""
    clock = ManualClock(start=1_728_000_000)
    limiter = Limiter("1000/1h", clock=clock)
    opened = []
    for _ in range(reservations):
        opened.append(limiter.reserve("k"))
        clock.advance(0.001)
    for reservation in opened:
        reservation.cancel()
    assert limiter.usage("k")["1h"].used == kept
