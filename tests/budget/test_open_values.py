"""Open batches as values: written with the charge, settled once and returned once, whatever answer is lost."""

import pytest

from tidegate import Limit, Policy
from tidegate._runtime.flow import run
from tidegate.budget._open_batch import BatchShare
from tidegate.budget._storage import open_values
from tidegate.budget._storage.open_values import ListValues, OpenValues
from tidegate.budget._storage.settlements import Settlement
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

POLICY = Policy("budget:b", [Limit(100, "1d", "fixed_window", name="day")])
UNLIMITED = Policy("budget:b", [Limit(2**52, "1d", "fixed_window", name="day")])


class Process:
    """A process that shares the store."""

    def __init__(self, store):
        self.store = store
        self.values = OpenValues(POLICY.name, "k", 10**12, store.clock)

    def run(self, flow):
        return run(flow, self._perform)

    def _perform(self, step):
        if isinstance(step, ListValues):
            return self.store.list_values(step.collection)
        return self.store.apply(step.verb, step.asks, None, step.at, step.writes)

    def check(self, cost):
        began = self.store.clock.steady()
        name, writes = self.values.reserve(POLICY, (cost,))
        [decision] = self.store.apply("hold", ((POLICY, "k", (cost,)),), None, None, writes)
        if decision.allowed:
            self.values.confirm(writes, began)
        return name, decision.at

    def settle(self, batch, reserved, used, *, left=0, first=True):
        name, at = batch
        share = BatchShare((reserved,), (used + left - reserved,), (left,), (used,), (0,), 0, first)
        self.run(self.values.settle_flow(Settlement(POLICY, UNLIMITED, "k", at, name, share, None)))

    def return_ended(self):
        self.store.clock.advance(1)  # it searches once per second
        return self.run(self.values.return_ended_flow(POLICY, "k", self.store.clock.ns() // 1000))


@pytest.fixture
def store():
    return MemoryStore(clock=ManualClock(1_728_000_000))


@pytest.fixture
def used(store):
    return lambda: store.apply_one("peek", POLICY, "k", (0,)).used[0]


def pass_lease(store):
    store.clock.advance(open_values.LEASE_SECONDS)


def test_a_batch_whose_check_got_no_answer_is_returned_once(store, used):
    one, other = Process(store), Process(store)
    name, _ = one.check(2)
    one.check(3)
    one.values.release(name)  # the connection was lost
    assert other.return_ended() == 0, "its owner lives"
    assert (one.return_ended(), used()) == (1, 3)
    assert (one.return_ended(), used()) == (0, 3)


def test_a_settlement_whose_answer_was_lost_is_made_once(store, used):
    one = Process(store)
    batch = one.check(10)
    for _ in range(2):
        one.settle(batch, 10, 4)
    assert used() == 4
    assert one.return_ended() == 0


def test_batches_are_returned_when_the_lease_of_their_owner_has_ended(store, used):
    one, other = Process(store), Process(store)
    batches = [one.check(10), one.check(5)]
    one.settle(batches[0], 10, 3, left=7)
    other.check(20)
    assert (other.return_ended(), used()) == (0, 35)
    pass_lease(store)
    assert (other.return_ended(), used()) == (2, 23)
    assert (other.return_ended(), used()) == (0, 23)
    for _ in range(2):  # the owner was only suspended; its first answer is lost
        one.settle(batches[0], 7, 4, first=False)
    one.settle(batches[1], 5, 0)
    assert used() == 27
    assert [value.data for value in store.list_values(open_values.open_collection(POLICY.name, "k")).values()] != []


def test_an_owner_that_renews_its_lease_keeps_its_batches(store, used):
    one, other = Process(store), Process(store)
    one.check(10)
    for _ in range(10):
        store.clock.advance(open_values.LEASE_SECONDS / open_values.RENEWALS_PER_LEASE)
        one.run(one.values.renew_flow())
        assert (other.return_ended(), used()) == (0, 10)
    one.run(one.values.leave_flow())
    assert (other.return_ended(), used()) == (1, 0)


def test_an_owner_that_checks_often_keeps_its_batches(store, used):
    """A check renews the lease only if that is due: the others are no renewal."""
    one, other = Process(store), Process(store)
    for checked in range(1, 30):
        one.check(1)
        assert (other.return_ended(), used()) == (0, checked)
        store.clock.advance(open_values.LEASE_SECONDS / 8)


def test_a_denied_check_is_not_stored(store):
    one = Process(store)
    one.check(101)
    assert not store.list_values(open_values.open_collection(POLICY.name, "k"))


def test_parts_of_a_batch_may_be_settled_in_any_order(store, used):
    one, other = Process(store), Process(store)
    batch = one.check(10)
    one.settle(batch, 7, 2, left=5, first=False)  # the later part arrives first
    one.settle(batch, 10, 3, left=7)
    assert one.run(one.values.list_flow(POLICY)) == [(batch[1], (5,))]
    pass_lease(store)
    assert (other.return_ended(), used()) == (1, 5)
