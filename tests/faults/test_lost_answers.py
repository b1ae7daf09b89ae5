"""A correction whose answer was lost: permits are refunded at most once, and charged at least once."""

import asyncio

import pytest

from tests.service.harness import START
from tidegate import AsyncLimiter, Limiter, StoreUnavailable
from tidegate.service._config.settings import load_settings
from tidegate.service._decisions.decider import Decider, Subject
from tidegate.stores import MemoryStore
from tidegate.stores._lease import LeasedStore
from tidegate.stores._outage import GuardedStore
from tidegate.testing import ManualClock


class LostAnswersStore(MemoryStore):
    """A shared store that applies every call, and loses its answers for a while."""

    instant = False
    lost = False

    def apply(self, verb, asks, now=None, at=None, writes=()):
        answer = super().apply(verb, asks, now, at, writes)
        if self.lost:
            raise StoreUnavailable("no answer")
        return answer

    def apply_one(self, verb, policy, key, costs, now=None, at=None):
        return self.apply(verb, ((policy, key, costs),), now, at)[0]


@pytest.fixture
def clock():
    return ManualClock(start=START)


@pytest.fixture
def stores(clock):
    shared = LostAnswersStore(clock=clock)
    guarded = GuardedStore(shared, clock=clock, background=False)
    yield shared, guarded
    guarded.close()


def come_back(shared, guarded, clock):
    shared.lost = False
    for _ in range(5):
        clock.advance(5)
        guarded.maintain()
    assert not guarded.unavailable
    assert guarded.metrics()["corrections_waiting"] == 0


def test_what_may_have_been_given_back_is_not_given_back_again(stores, clock):
    shared, guarded = stores
    limiter = Limiter("10/1h fixed_window", store=guarded)
    assert limiter.try_acquire("k", 10)
    shared.lost = True
    limiter.refund("k", 3)
    limiter.refund("k", 2)  # the store is known to be lost: it is asked later, once
    come_back(shared, guarded, clock)
    assert limiter.usage("k")["1h"].used == 5


def test_what_may_have_been_taken_is_taken(stores, clock):
    shared, guarded = stores
    limiter = Limiter(["10/1h fixed_window name=calls", "100/1h fixed_window unit=tokens"], store=guarded)
    held = limiter.reserve("k", {"requests": 2, "tokens": 10})
    shared.lost = True
    held.commit({"requests": 1, "tokens": 30})
    come_back(shared, guarded, clock)
    used = {name: usage.used for name, usage in limiter.usage("k").items()}
    assert (used["calls"], used["tokens-1h"] >= 30) == (1, True)


def test_the_first_question_of_all_gives_back_once(stores, clock):
    shared, guarded = stores
    other = Limiter("10/1h fixed_window", store=shared)
    assert other.try_acquire("k", 10)
    shared.lost = True
    Limiter("10/1h fixed_window", store=guarded).refund("k", 3)
    come_back(shared, guarded, clock)
    assert other.usage("k")["1h"].used == 7


async def test_tasks_as_well(stores, clock):
    shared, guarded = stores
    limiter = AsyncLimiter("10/1h fixed_window", store=guarded)
    assert await limiter.try_acquire("k", 10)
    shared.lost = True
    await limiter.refund("k", 3)
    await asyncio.to_thread(come_back, shared, guarded, clock)
    assert (await limiter.usage("k"))["1h"].used == 7


async def test_a_settlement_of_the_service_is_made_once(stores, clock):
    shared, guarded = stores
    decider = Decider(load_settings({"policies": {"api": "10/1h fixed_window"}}).policies, guarded)
    subject = Subject("api", "k")
    await decider.acquire(subject, 4)
    held = await decider.reserve(subject, 6)
    marked = shared.apply

    def apply(verb, asks, now=None, at=None, writes=()):
        shared.lost = verb == "adjust"  # the correction and the mark are made in one step; the answer is lost
        return marked(verb, asks, now, at, writes)

    shared.apply = apply
    with pytest.raises(StoreUnavailable):
        await decider.cancel(held.id)
    shared.apply = marked
    await asyncio.to_thread(come_back, shared, guarded, clock)
    assert (await decider.usage(subject))["1h"].used == 4
    await decider.close()


def test_leftovers_of_a_lease_as_well(clock):
    shared = LostAnswersStore(clock=clock)
    guarded = GuardedStore(shared, clock=clock, background=False)
    limiter = Limiter("1000/1h fixed_window", store=LeasedStore(guarded))
    for _ in range(50):
        assert limiter.try_acquire("k")
    assert limiter.store.metrics()["lease_outstanding_requests"] > 0
    shared.lost = True
    limiter.store.close()
    come_back(shared, guarded, clock)
    assert Limiter("1000/1h fixed_window", store=shared).usage("k")["1h"].used == 50
