"""Adding an algorithm touches the core and its ports only: a throw-away algorithm works everywhere by its traits."""

import pytest

from tests.core.test_memory_decisions import assert_reads_are_views
from tidegate import ConfigError, Limit, Limiter, Policy
from tidegate.budget import TaskBudget
from tidegate.core._algorithms import ALGORITHMS, NEVER, Algorithm, View
from tidegate.headers import write
from tidegate.service._decisions.leases import can_lease
from tidegate.stores._lease.terms import Lease, compute_terms
from tidegate.stores._outage.local_share import divide_limit
from tidegate.stores._outage.process_share import WHOLE_PARTS
from tidegate.stores._postgres.call import encode_limit as encode_for_postgres
from tidegate.stores._redis.protocol import encode_limit as encode_for_redis
from tidegate.testing import ManualClock

START = 1_728_000_000


def charge_gap(state, limit, cost, now):
    """Admit up to the quota at once, then nothing for one period: the state is (limit, used, at)."""
    free = state is None or now - state[2] >= limit.length
    return (limit, cost, now) if free and cost <= limit.quota else None


def view_gap(state, limit, cost, now):
    left = 0 if state is None else max(0, state[2] + limit.length - now)
    retry = NEVER if cost > limit.quota else left if cost else 0
    return View((0 if left else limit.quota, retry, left))


def adjust_gap(state, limit, delta, now, at):
    if state is None or (at is not None and at != state[2]):
        return state
    used = state[1] + delta
    return (limit, used, state[2]) if used > 0 else None


def expires_gap(state):
    return state[2] + state[0].length


GAP = Algorithm(charge_gap, view_gap, adjust_gap, expires_gap)


@pytest.fixture(autouse=True)
def _gap(monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "gap", GAP)


@pytest.fixture
def clock():
    return ManualClock(START)


@pytest.fixture(params=["memory", "sqlite"])
def store(request, tmp_path):
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/limits.db"


def test_a_limiter_counts_by_the_new_algorithm(store, clock):
    with Limiter("5/10s gap", store=store, clock=clock) as limiter:
        assert str(limiter.policy.limits[0]) == "5/10s gap"
        assert limiter.peek("k", 5)
        assert limiter.try_acquire("k", 3)
        clock.advance(4)
        denied = limiter.try_acquire("k")
        assert not denied
        assert_reads_are_views(denied)
        assert (denied.remaining, denied.retry_after, denied.violated) == (0, 6.0, ("10s",))
        assert limiter.usage("k")["10s"].reset_after == 6.0
        assert limiter.try_acquire("k", 6).retry_after is None
        clock.advance(5.999_999)
        assert not limiter.try_acquire("k")
        clock.advance(0.000_001)
        assert limiter.try_acquire("k")
        limiter.refund("k")
        assert limiter.acquire("k", timeout=0)
        with pytest.raises(ConfigError, match="no concurrency limit"):
            limiter.release("k")


def test_it_is_decided_together_with_others_and_stored_across_changes(store, clock):
    with Limiter(["5/10s gap", "9/1h", "9/1h sliding_log name=log"], store=store, clock=clock) as limiter:
        assert limiter.try_acquire("k", 2)
        limiter.update(["5/10s gap", "9/1h sliding_log name=log"])
        assert limiter.try_acquire("k").violated == ("10s",)
        limiter.update(["5/20s gap name=10s"])
        assert limiter.try_acquire("k").retry_after == 20.0
        limiter.reset("k")
        assert limiter.try_acquire("k")


def test_a_reservation_settles_its_charge(store, clock):
    with Limiter("5/10s gap", store=store, clock=clock) as limiter:
        with limiter.reserve("k", 4) as reservation:
            clock.advance(1)
            reservation.commit(2)
        assert not limiter.try_acquire("k")
        reservation = limiter.reserve("other", 4)
        clock.advance(1)
        reservation.cancel()
        assert limiter.try_acquire("other")


def test_headers_show_it(clock):
    with Limiter("5/10s gap", clock=clock) as limiter:
        limiter.try_acquire("k")
        fields = dict(write(limiter.try_acquire("k"), "both"))
    assert fields["X-RateLimit-Remaining"] == "0"
    assert fields["Retry-After"] == "10"
    assert "w=10" in fields["RateLimit-Policy"]


def test_a_trait_decides_whether_permits_are_leased(monkeypatch, clock):
    limits = (Limit(1000, "10s", "gap"),)
    assert compute_terms(Policy("p", limits), Lease()).length == 0
    assert divide_limit(limits[0], WHOLE_PARTS // 2) is None
    assert not can_lease(Policy("p", limits), 1)
    with Limiter(limits, lease=True, clock=clock) as limiter:
        assert limiter.try_acquire("k")
        assert not limiter.try_acquire("k")
    monkeypatch.setitem(ALGORITHMS, "gap", GAP._replace(leasable=True, windowed=True))
    limits = (Limit(1000, "10s", "gap"),)
    assert compute_terms(Policy("p", limits), Lease()).length > 0
    assert can_lease(Policy("p", limits), 1)


def test_a_trait_decides_whether_slots_are_released(monkeypatch, clock):
    monkeypatch.setitem(ALGORITHMS, "gap", GAP._replace(holds_slots=True))
    with Limiter("5/10s gap", clock=clock) as limiter:
        with limiter.limited("k"):
            assert not limiter.try_acquire("k")
        assert limiter.try_acquire("k")
        limiter.release("k")
        assert limiter.try_acquire("k")


def test_a_budget_counts_by_it(monkeypatch, tmp_path, clock):
    """A budget chooses its algorithms itself, so here the new one takes the place of one of them."""
    monkeypatch.setitem(ALGORITHMS, "sliding_log", GAP)
    with TaskBudget(per_minute=10, store=f"sqlite:///{tmp_path}/budget.db", clock=clock) as budget:
        assert budget.check_all_limits(3)
        budget.record_completed_tasks(3)
        assert not budget.check_all_limits(1)
        clock.advance(60)
        assert budget.check_all_limits(10)


@pytest.mark.parametrize("encode", [encode_for_redis, encode_for_postgres])
def test_stores_with_a_port_reject_an_algorithm_that_it_does_not_have(encode):
    with pytest.raises(ConfigError, match="'gap' is not available in this store"):
        encode(Limit(5, "10s", "gap"), ())
