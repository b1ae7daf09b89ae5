"""Asks about one key in one call: every store, also one that wraps another, charges the sum, all or nothing."""

import asyncio

import pytest

from tests.cases import cases
from tidegate import ConfigError, Limit, Policy
from tidegate.adaptive._gated_store import GatedStore
from tidegate.core._decision import LocalDecision
from tidegate.errors import StoreUnavailable
from tidegate.stores import MemoryStore, Store
from tidegate.stores._cancellation import corrections
from tidegate.stores._lease import LeasedStore
from tidegate.stores._outage import GuardedStore
from tidegate.stores._sqlite import SQLiteStore
from tidegate.testing import ManualClock
from tidegate.testing._store_guarantees import (
    a_batch_is_decided_together,
    a_batch_without_asks_is_decided,
    a_key_twice_in_a_batch_pays_both_costs,
    limits_that_differ_in_a_batch_are_refused,
    policies_of_one_name_in_a_batch_pay_all_costs,
)

BATCH_GUARANTEES = (
    a_batch_is_decided_together,
    a_key_twice_in_a_batch_pays_both_costs,
    policies_of_one_name_in_a_batch_pay_all_costs,
    limits_that_differ_in_a_batch_are_refused,
    a_batch_without_asks_is_decided,
)
START = 1_728_000_000


def guarded(store):
    return GuardedStore(store, clock=ManualClock(START), background=False)


WRAPPERS = {
    "memory": lambda store: store,
    "leased": LeasedStore,
    "guarded": guarded,
    "guarded by threads": lambda store: GuardedStore(store, background=False),
    "leased and guarded": lambda store: LeasedStore(guarded(store)),
    "gated": GatedStore,
}


@cases("wrap", WRAPPERS.values())
@cases("guarantee", BATCH_GUARANTEES)
def test_batches(guarantee, wrap):
    store = wrap(MemoryStore())
    guarantee(store)
    store.close()


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_key_twice_in_a_call_at_the_stores_own_time(wrap):
    clock = ManualClock(START)
    store = wrap(MemoryStore(clock=clock))
    policy, equal = (Policy("p", ("10/1h sliding_log",)) for _ in range(2))
    assert all(store.apply("acquire", ((policy, "k", (1,)), (equal, "k", (2,)))))
    assert store.apply_one("peek", policy, "k", (0,)).remaining == 7
    assert not any(store.apply("acquire", ((policy, "k", (4,)), (equal, "k", (4,)))))
    assert store.apply_one("peek", policy, "k", (0,)).remaining == 7
    store.close()


def test_policies_of_one_name_under_leases_of_different_terms():
    store = LeasedStore(MemoryStore(clock=ManualClock(START)))
    leased, unleased = Policy("p", ("1000/1h sliding_log",)), Policy("p", ("10/1h sliding_log", "10/1s sliding_log"))
    assert all(store.apply("acquire", ((leased, "k", (3,)), (unleased, "k", (4, 1)))))
    assert store.apply_one("peek", unleased, "k", (0, 0)).remaining == 3
    assert not any(store.apply("acquire", ((unleased, "k", (2, 1)), (leased, "k", (2,)))))
    store.close()


async def test_a_key_twice_in_a_call_of_a_task(tmp_path):
    store = SQLiteStore(tmp_path / "limits.db")
    policy, equal = (Policy("p", ("10/1h",)) for _ in range(2))
    calls = [store.apply_async("acquire", ((policy, "k", (1,)), (equal, "k", (2,)))) for _ in range(4)]
    answers = await asyncio.gather(*calls)
    assert [all(answer) for answer in answers].count(True) == 3, "9 of 10"
    assert await store.apply_async("acquire", ()) == []
    await store.close_async()


def test_a_key_twice_starts_no_outage(tmp_path):
    store = guarded(SQLiteStore(tmp_path / "limits.db"))
    policy, equal = (Policy("p", ("10/1h sliding_log",)) for _ in range(2))
    decisions = store.apply("acquire", ((policy, "k", (1,)), (equal, "k", (2,))))
    assert [type(decision) for decision in decisions].count(LocalDecision) == 0
    assert not store.unavailable
    store.close()


def test_each_answer_has_the_limits_of_its_own_policy():
    store = MemoryStore(clock=ManualClock(START))
    hourly, daily = Policy("p", ("10/1h",)), Policy("p", ("20/1d", "5/1h"))
    first, second = store.apply("acquire", ((hourly, "k", (3,)), (daily, "k", (1, 1))))
    assert (first.policy_limits, second.policy_limits) == (hourly.limits, daily.limits)
    assert (first.remaining, [view[0] for view in second.views]) == (1, [19, 1]), "4 of 5 per hour, 1 of 20 per day"
    assert (first.used, second.used) == ([9], [1, 4]), "of 10 per hour, what the limit of 5 leaves is available"


def test_a_refused_batch_names_both_limits():
    one, other = Policy("p", (Limit(10, "1h", name="x"),)), Policy("p", (Limit(10, "1m", name="x"),))
    with pytest.raises(ConfigError, match=r"two policies named 'p'.*'10/1h name=x' and '10/1m name=x'.*rename"):
        MemoryStore().apply("acquire", ((one, "k", (1,)), (other, "k", (1,))))


def test_keys_that_share_a_bucket_because_the_store_is_full_pay_both_costs():
    store = MemoryStore(max_entries=1, clock=ManualClock(START))
    policy = Policy("p", ("10/1h sliding_log",))
    store.apply_one("acquire", policy, "own", (1,))
    assert all(store.apply("acquire", ((policy, "a", (4,)), (policy, "b", (5,)))))
    assert not any(store.apply("acquire", ((policy, "c", (1,)), (policy, "d", (1,)))))


def test_a_cancelled_batch_with_a_key_twice_is_refunded():
    store = MemoryStore(clock=ManualClock(START))
    hourly, daily = Policy("p", ("10/1h", "30/1m")), Policy("p", ("10/1h", "20/1d sliding_log"))
    asks = ((hourly, "k", (1, 2)), (daily, "k", (3, 4)), (hourly, "k", (1, 1)))
    decisions = store.apply("acquire", asks)
    for back, at in corrections("acquire", asks, decisions, 0):
        store.apply("adjust", back, None, at)
    assert [view[0] for view in store.apply_one("peek", hourly, "k", (0, 0)).views] == [10, 30]
    assert [view[0] for view in store.apply_one("peek", daily, "k", (0, 0)).views] == [10, 20]


class LostStore(Store):
    """A store that does not answer."""

    def apply(self, verb, asks, now=None, at=None):
        raise StoreUnavailable("lost")


def test_a_key_twice_is_decided_once_without_the_store():
    store = guarded(LostStore())
    policy = Policy("p", ("10/1h",), on_store_error="allow")
    assert all(store.apply("acquire", ((policy, "k", (1,)), (policy, "k", (2,)))))
