"""Calls that `on_store_error: allow` admitted without the store were charged nowhere, so nothing is refunded."""

import pytest

from tests.cases import cases
from tests.outage.simulation import START, Link
from tidegate import AsyncLimiter, Limit, Limiter, Policy
from tidegate.adaptive._gated_store import GatedStore
from tidegate.core._decision import LocalDecision
from tidegate.stores import MemoryStore
from tidegate.stores._lease import LeasedStore
from tidegate.stores._outage import GuardedStore
from tidegate.testing import ManualClock

STORES = {
    "guarded": lambda guarded, clock: guarded,
    "leased": lambda guarded, clock: LeasedStore(guarded, clock=clock),
    "gated": lambda guarded, clock: GatedStore(LeasedStore(guarded, clock=clock)),
}


class Outage:
    """A store behind a link that may be down, and what it has counted."""

    def __init__(self, wrap, policy):
        self.clock = ManualClock(START)
        self.server = MemoryStore(clock=self.clock)
        self.link = Link(self.server)
        self.guarded = GuardedStore(self.link, clock=self.clock, background=False)
        self.store = wrap(self.guarded, self.clock)
        self.policy = policy

    def start(self):
        self.link.state = "lost"

    def end(self):
        self.link.state = "up"
        self.clock.advance(10)
        self.guarded.maintain()
        assert not self.guarded.unavailable

    def used(self):
        return self.server.apply_one("peek", self.policy, "k", (0,) * len(self.policy.limits)).used


@pytest.fixture(params=STORES)
def open_outage(request):
    opened = []

    def start(limit, mode):
        policy = Policy("p", limit if isinstance(limit, tuple) else (limit,), mode, "allow")
        opened.append(Outage(STORES[request.param], policy))
        return opened[-1]

    yield start
    for outage in opened:
        outage.store.close()


@cases("mode", ["enforce", "shadow"])
@cases("settle", ["cancel", "commit"])
def test_a_reservation_without_the_store_is_not_refunded(open_outage, settle, mode):
    outage = open_outage("100/1h sliding_log", mode)
    limiter = Limiter(outage.policy, store=outage.store)
    limiter.reserve("k", 60).commit()
    outage.start()
    reservation = limiter.reserve("k", 40, ttl=3600)
    assert isinstance(reservation.decision, LocalDecision)
    outage.end()
    if settle == "cancel":
        reservation.cancel()
    else:
        reservation.commit(1)
    assert outage.used() == [60]


@pytest.mark.parametrize("mode", ["enforce", "shadow"])
async def test_a_reservation_of_a_task_without_the_store_is_not_refunded(open_outage, mode):
    outage = open_outage("100/1h", mode)
    limiter = AsyncLimiter(outage.policy, store=outage.store)
    await (await limiter.reserve("k", 60)).commit()
    before = outage.used()
    outage.start()
    reservation = await limiter.reserve("k", 40, ttl=3600)
    outage.end()
    await reservation.cancel()
    assert outage.used() == before


@pytest.mark.parametrize("mode", ["enforce", "shadow"])
def test_a_block_without_the_store_releases_no_slots(open_outage, mode):
    outage = open_outage(Limit(5, "1h", "concurrency", name="slots"), mode)
    limiter = Limiter(outage.policy, store=outage.store)
    limiter.acquire("k", 3)
    outage.start()
    with limiter.limited("k", 2):
        outage.end()
    assert outage.used() == [3]


def test_a_release_with_a_decision_without_the_store_releases_no_slots(open_outage):
    outage = open_outage(Limit(5, "1h", "concurrency", name="slots"), "enforce")
    limiter = Limiter(outage.policy, store=outage.store)
    limiter.acquire("k", 3)
    outage.start()
    decision = limiter.acquire("k")
    outage.end()
    limiter.release("k", 1, decision)
    assert outage.used() == [3]
    limiter.release("k")
    assert outage.used() == [2]
