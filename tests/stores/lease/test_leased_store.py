"""A leased limiter, verb by verb, on a ManualClock."""

import asyncio
import os
import threading

import pytest

from tidegate import AsyncLimiter, ConfigError, Limit, Limiter, Policy, StoreUnavailable
from tidegate.stores import MemoryStore
from tidegate.stores._cancellation import corrections
from tidegate.stores._lease import Lease, LeasedStore
from tidegate.stores._lease.terms import compute_terms
from tidegate.stores._outage import GuardedStore
from tidegate.testing import ManualClock


class RecordingStore(MemoryStore):
    """A shared store that records its requests, and can fail before or after it decides."""

    instant = False

    def __init__(self, clock=None):
        super().__init__(clock=clock)
        self.requests: list[str] = []
        self.fails = ""

    def apply(self, verb, asks, now=None, at=None):
        self.requests.append(verb)
        if self.fails == "before":
            raise StoreUnavailable("gone")
        answer = super().apply(verb, asks, now, at)
        if self.fails == "after":
            raise StoreUnavailable("no reply")
        return answer

    async def apply_async(self, verb, asks, now=None, at=None):
        return self.apply(verb, asks, now, at)


@pytest.fixture
def clock():
    return ManualClock(1_700_000_000)


@pytest.fixture
def shared(clock):
    return RecordingStore(clock)


def leased(shared, rules="1000/1h fixed_window", *, lease=True):
    return Limiter(rules, store=shared, lease=lease)


def warm(limiter, calls=50, key="k"):
    for _ in range(calls):
        assert limiter.try_acquire(key)


def held(limiter, unit="requests"):
    return limiter.store.metrics()[f"lease_outstanding_{unit}"]


def test_most_calls_need_no_store_request(shared):
    limiter = leased(shared)
    warm(limiter, 500)
    assert len(shared.requests) < 20
    assert limiter.try_acquire("k").remaining == 499


def test_a_key_called_once_is_not_leased(shared, clock):
    limiter = leased(shared)
    for i in range(100):
        limiter.try_acquire(f"user:{i}")
    assert shared.requests == ["acquire"] * 100
    assert held(limiter) == 0
    clock.advance(2)
    limiter.try_acquire("user:0")
    for i in range(20):  # sweeps, a few at a time
        limiter.try_acquire(f"other:{i}")
    assert limiter.store.metrics()["lease_keys"] == 21


@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_window", "token_bucket", "sliding_log"])
def test_the_quota_is_exact_with_two_processes(shared, algorithm):
    one, two = leased(shared, f"1000/1h {algorithm}"), leased(shared, f"1000/1h {algorithm}")
    allowed = sum(bool(limiter.try_acquire("k")) for _ in range(1200) for limiter in (one, two))
    assert allowed + held(one) + held(two) == (999 if algorithm == "token_bucket" else 1000)
    assert one.try_acquire("k").retry_after == pytest.approx({"token_bucket": 3.6}.get(algorithm, 3600), rel=1)


def test_a_decision_shows_the_limits_of_the_policy(shared):
    limiter = leased(shared, Policy("p", (Limit(1000, "1m"), Limit(5000, "1h", "sliding_log"))))
    warm(limiter)
    decision = limiter.try_acquire("k")
    assert [(view.name, view.quota) for view in decision.limits] == [("1m", 1000), ("1h", 5000)]
    assert decision.limits[1].remaining == 5000 - 51
    assert (decision.retry_after, decision.violated) == (0, ())
    assert decision.at == limiter.clock.ns() // 1000


def test_costs_in_several_units_come_from_one_share(shared):
    rules = [Limit(1000, "1h", "fixed_window"), Limit(100_000, "1h", "fixed_window", unit="tokens", name="tph")]
    limiter = leased(shared, rules)
    for i in range(100):
        assert limiter.try_acquire("k", {"requests": 1, "tokens": 100 + i})
    assert len(shared.requests) < 40
    assert limiter.usage("k")["tph"].used == sum(range(100, 200))
    assert limiter.usage("k")["1h"].used == 100


def test_a_denial_is_cached_until_retry_after_but_no_longer_than_a_lease(shared, clock):
    limiter = leased(shared, "20/1m", lease=1)
    while limiter.try_acquire("k"):
        pass
    requests = len(shared.requests)
    first = limiter.try_acquire("k")
    clock.advance(0.5)
    again = limiter.try_acquire("k")
    assert len(shared.requests) == requests
    assert again.retry_after == pytest.approx(first.retry_after - 0.5)
    clock.advance(0.5)
    limiter.try_acquire("k")
    assert len(shared.requests) > requests
    clock.advance(limiter.try_acquire("k").retry_after)
    assert limiter.try_acquire("k")


def test_a_refund_takes_effect_at_once(shared):
    limiter = leased(shared, "100/1h fixed_window")
    while limiter.try_acquire("k"):
        pass
    limiter.refund("k", 2)
    assert [bool(limiter.try_acquire("k")) for _ in range(3)] == [True, True, False]


def test_peek_and_usage_change_nothing_and_count_only_used_permits(shared):
    limiter = leased(shared)
    warm(limiter)
    assert held(limiter) > 0
    assert limiter.peek("k").remaining == 1000 - 51 == limiter.peek("k").remaining
    assert limiter.usage("k")["1h"].used == 50
    assert held(limiter) == 0  # the share was returned first
    assert not limiter.peek("k", 951)
    assert limiter.peek("k", 950)


def test_reset_discards_shares(shared):
    limiter = leased(shared)
    warm(limiter)
    limiter.reset("k")
    assert limiter.usage("k")["1h"].used == 0 == held(limiter)
    warm(limiter, 1000)
    assert not limiter.try_acquire("k")


def test_a_large_call_gets_the_permits_left_in_the_share(shared):
    limiter = leased(shared)
    warm(limiter, 300)
    assert limiter.try_acquire("k", 700)
    assert not limiter.try_acquire("k")


def test_reservations_are_settled_with_the_store(shared):
    limiter = leased(shared, "100/1h")
    warm(limiter, 20)
    with limiter.reserve("k", 50) as reservation:
        reservation.commit(10)
    limiter.store.close()
    assert Limiter("100/1h", store=shared).usage("k")["1h"].used >= 30


def test_close_returns_everything(shared):
    limiter = leased(shared)
    warm(limiter, 50)
    limiter.close()
    assert Limiter("1000/1h fixed_window", store=shared).usage("k")["1h"].used == 50
    metrics = limiter.store.metrics()
    assert metrics["lease_granted_requests"] == metrics["lease_used_requests"] + metrics["lease_returned_requests"]


def test_an_updated_policy_returns_the_shares_of_the_old_one(shared):
    limiter = leased(shared)
    warm(limiter, 50)
    limiter.update("2000/1h fixed_window")
    limiter.try_acquire("k")
    assert limiter.usage("k")["1h"].used == 51


def test_a_lost_reply_only_loses_permits(shared):
    limiter = leased(shared)
    warm(limiter, 20)
    before = held(limiter)
    shared.fails = "after"
    refused = 0
    for _ in range(before + 3):
        try:
            limiter.try_acquire("k")
        except StoreUnavailable:
            refused += 1
    shared.fails = ""
    assert refused == 3
    lost = limiter.store.metrics()["lease_lost_requests"]
    allowed = sum(bool(limiter.try_acquire("k")) for _ in range(1100))
    assert 20 + before + allowed <= 1000
    assert 20 + before + allowed >= 1000 - lost - 3


def test_shares_work_while_the_store_is_unavailable_and_other_calls_fail(shared):
    limiter = leased(shared)
    warm(limiter, 20)
    shared.fails = "before"
    for _ in range(held(limiter)):
        assert limiter.try_acquire("k")
    with pytest.raises(StoreUnavailable):
        limiter.try_acquire("k")
    shared.fails = ""
    assert limiter.try_acquire("k")


def test_keys_with_shares_are_bounded(shared):
    limiter = leased(shared, lease=Lease(max_keys=10))
    for _ in range(20):
        for i in range(30):
            assert limiter.try_acquire(f"user:{i}")
    assert limiter.store.metrics()["lease_keys"] == 10


@pytest.mark.parametrize(
    "rules",
    ["10/1m", "1000/1ms", Limit(100, "1m", "concurrency"), ["1000/1m", Limit(50, "1m", "concurrency", name="c")]],
)
def test_policies_that_are_not_leased_ask_the_store_directly(shared, rules):
    limiter = leased(shared, rules)
    for _ in range(10):
        assert limiter.try_acquire("k")
    assert shared.requests == ["acquire"] * 10


@pytest.mark.parametrize(
    ("rules", "lease", "length"),
    [
        ("1000/1h", Lease(), 1_000_000),
        ("1000/1s", Lease(), 50_000),
        ("1000/1s burst=100", Lease(), 5_000),
        ("1000/1s", Lease(seconds=10), 500_000),
        (["1000/1h", "100/1s sliding_log"], Lease(), 50_000),
    ],
)
def test_how_long_a_lease_lasts(rules, lease, length):
    assert compute_terms(Limiter(rules).policy, lease).length == length


@pytest.mark.parametrize("lease", [0, -1, "1s", {"seconds": 1}, float("nan"), Lease])
def test_an_invalid_lease_is_refused(lease):
    with pytest.raises(ConfigError, match=r"lease\.seconds: must be a number of seconds"):
        Limiter("100/1m", lease=lease)


@pytest.mark.parametrize("option", [{"spread": 0}, {"max_keys": 0.5}, {"spread": True}])
def test_invalid_lease_options_are_refused(option):
    with pytest.raises(ConfigError, match="must be an integer of at least 1"):
        Lease(**option)


def test_threads_together_use_exactly_the_quota(shared):
    limiter = leased(shared)
    allowed: list[int] = []

    def work():
        allowed.append(sum(bool(limiter.try_acquire("k")) for _ in range(400)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(allowed) == 1000


async def test_tasks_together_use_exactly_the_quota(shared):
    async with AsyncLimiter("1000/1h fixed_window", store=shared, lease=True) as limiter:

        async def work():
            allowed = 0
            for _ in range(40):
                allowed += bool(await limiter.try_acquire("k"))
                await asyncio.sleep(0)
            return allowed

        assert sum(await asyncio.gather(*(work() for _ in range(40)))) == 1000
        await limiter.reset("k")
        for _ in range(50):
            assert await limiter.try_acquire("k")
    assert Limiter("1000/1h fixed_window", store=shared).usage("k")["1h"].used == 50


class HangingStore(RecordingStore):
    """Hangs on demand, and gives back the charge of a cancelled call, as every store does."""

    async def apply_async(self, verb, asks, now=None, at=None):
        answer = self.apply(verb, asks, now, at)
        try:
            if self.fails == "hang":
                await asyncio.sleep(3600)
        except asyncio.CancelledError:
            for back, charged in corrections(verb, asks, answer, 0):
                self.apply("adjust", back, now, charged)
            raise
        return answer


async def test_a_cancelled_call_loses_no_permits(clock):
    shared = HangingStore(clock)
    limiter = AsyncLimiter("1000/1h fixed_window", store=shared, lease=True)
    assert await limiter.try_acquire("k")
    shared.fails = "hang"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await limiter.try_acquire("k")
    shared.fails = ""
    for _ in range(20):
        assert await limiter.try_acquire("k")
    await limiter.close()
    assert limiter.store.metrics()["lease_lost_requests"] == 0
    assert Limiter("1000/1h fixed_window", store=shared).usage("k")["1h"].used == 21


async def test_a_cancelled_refund_is_completed_and_returns_the_share(clock):
    shared = HangingStore(clock)
    limiter = AsyncLimiter("1000/1h fixed_window", store=shared, lease=True)
    for _ in range(30):
        assert await limiter.try_acquire("k")
    assert held(limiter) > 0
    shared.fails = "hang"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await limiter.refund("k", 10)  # cancelled while it returns the share, before it is sent
    shared.fails = ""
    await limiter.close()
    assert limiter.store.metrics()["lease_lost_requests"] == 0
    assert Limiter("1000/1h fixed_window", store=shared).usage("k")["1h"].used == 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_starts_without_shares(shared):
    limiter = leased(shared)
    warm(limiter, 50)
    before = held(limiter)
    child = os.fork()
    if not child:
        metrics = limiter.store.metrics()
        good = metrics["lease_outstanding_requests"] == 0 == metrics["lease_granted_requests"]
        requests = len(shared.requests)
        good = good and bool(limiter.try_acquire("k")) and len(shared.requests) == requests + 1
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert held(limiter) == before > 0


def test_new_policies_can_be_applied_together(shared):
    asks = [(Policy(name, (Limit(100, "1h", "fixed_window"),)), "k", (1,)) for name in ("one", "other")]
    assert [decision.remaining for decision in LeasedStore(shared).apply("acquire", asks)] == [99, 99]


def test_a_leased_store_serves_several_limiters(shared):
    store = LeasedStore(shared)
    one, two = Limiter("1000/1h", store=store, name="one"), Limiter("1000/1h", store=store, name="two")
    warm(one)
    warm(two)
    # 50 calls, and the permit that the stricter limit of the store withholds.
    assert one.usage("k")["1h"].used == 51 == two.usage("k")["1h"].used


@pytest.mark.parametrize(("on_store_error", "allowed"), [("deny", False), ("allow", True)])
def test_permits_granted_without_the_store_are_no_share(shared, on_store_error, allowed):
    guarded = GuardedStore(shared, background=False)
    limiter = leased(guarded, Policy("p", (Limit(1000, "1h", "fixed_window"),), on_store_error=on_store_error))
    warm(limiter, 50)
    used = 50 + held(limiter)
    shared.fails = "before"
    while held(limiter):
        assert limiter.try_acquire("k")
    assert [bool(limiter.try_acquire("k")) for _ in range(100)] == [allowed] * 100
    shared.fails = ""
    guarded.maintain()
    assert limiter.try_acquire("k")
    limiter.store.close()
    assert Limiter(limiter.policy, store=shared).usage("k")["1h"].used == used + 1


def test_a_policy_with_a_local_fallback_is_not_leased(shared):
    guarded = GuardedStore(shared, background=False)
    limiter = leased(guarded, Policy("p", (Limit(1000, "1h"),), on_store_error="local"))
    for _ in range(10):
        limiter.try_acquire("k")
    assert "lease_outstanding_requests" not in limiter.store.metrics()


def test_a_thread_returns_unused_permits_when_the_lease_ends():
    shared = RecordingStore()
    limiter = leased(shared, lease=0.05)
    warm(limiter)
    while held(limiter):  # without further calls
        threading.Event().wait(0.001)
    assert Limiter(limiter.policy, store=shared).usage("k")["1h"].used == 50
    limiter.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "leases" and thread.is_alive()]


async def test_a_task_returns_unused_permits_when_the_lease_ends():
    shared = RecordingStore()
    limiter = AsyncLimiter("1000/1h fixed_window", store=shared, lease=0.05)
    for _ in range(50):
        assert await limiter.try_acquire("k")
    while held(limiter):
        await asyncio.sleep(0)
    assert Limiter(limiter.policy, store=shared).usage("k")["1h"].used == 50
    await limiter.close()
    assert len(asyncio.all_tasks()) == 1


def test_unused_permits_are_returned_when_the_event_loop_ends():
    shared = RecordingStore()

    async def call_without_closing():
        limiter = AsyncLimiter("1000/1h fixed_window", store=shared, lease=True)
        for _ in range(50):
            assert await limiter.try_acquire("k")

    asyncio.run(call_without_closing())
    assert Limiter("1000/1h fixed_window", store=shared).usage("k")["1h"].used == 50


def test_calls_above_what_is_left_in_a_window_do_not_keep_it_from_smaller_ones(clock):
    """Found in tests of forks: while large calls asked the store, small ones were denied in memory, for ever."""
    policy = Policy("p", (Limit(1_000_000, "100s", "fixed_window"),))
    store = MemoryStore(clock=clock)
    limiter = leased(store, policy)
    Limiter(policy, store=store).acquire("k", 999_700)
    taken = 0
    for _ in range(100):
        assert not limiter.try_acquire("k", 1000)
        taken += sum(limiter.try_acquire("k").allowed for _ in range(10))
        clock.advance(0.02)
    assert taken == 300
