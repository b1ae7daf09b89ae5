"""Corrections of charges that were made without the store: made once, at the limits of the policy."""

import asyncio
import threading

import pytest

from tests.outage.simulation import START
from tidegate import AsyncLimiter, Limit, Limiter, Policy, StoreUnavailable
from tidegate.stores import DelegatingStore, MemoryStore, Store
from tidegate.stores._cancellation import CONTINUED_CALLS
from tidegate.stores._outage import GuardedStore
from tidegate.testing import ManualClock

ALGORITHMS = ("fixed_window", "sliding_log", "token_bucket", "sliding_window")


class TwoServers(DelegatingStore):
    """Servers A and B, for keys that begin with "a" and "b"; those in `lost` do not answer, those in `deaf` lose it."""

    def __init__(self, inner):
        super().__init__(inner)
        self.lost = set()
        self.deaf = set()

    def shard(self, asks, values=()):
        return asks[0][1][0] if asks and asks[0][1][0] in "ab" else None

    def apply(self, verb, asks, now=None, at=None, writes=()):
        server = self.shard(asks)
        decisions = [] if server in self.lost else super().apply(verb, asks, now, at, writes)
        if server in self.lost | self.deaf:
            error = StoreUnavailable(f"server {server} does not answer")
            error.shard = server
            raise error
        return decisions


class Outage:
    """Two servers whose connections are lost, and a policy whose limits have a part without them."""

    def __init__(self, algorithm):
        self.clock = ManualClock(START)
        self.server = MemoryStore(clock=self.clock)
        self.link = TwoServers(self.server)
        self.guarded = GuardedStore(self.link, clock=self.clock, background=False, processes=1)
        limit = Limit(1000, "1h", algorithm, unit="tokens", name="tokens")
        self.policy = Policy("p", (limit,), on_store_error="local")
        self.limiter = Limiter(self.policy, store=self.guarded, clock=self.clock)

    def reserve(self, amount):
        """Lose both servers, and reserve without them."""
        self.link.lost = {"a", "b"}
        self.limiter.try_acquire("b", {"tokens": 1})
        return self.limiter.reserve("a", {"tokens": amount})

    def end(self, lost=()):
        """Answer again, but for some servers."""
        self.link.lost = set(lost)
        self.clock.advance(10)
        self.guarded.maintain()

    def used(self):
        return self.server.apply_one("peek", self.policy, "a", (0,)).used[0]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_usage_above_an_estimate_is_charged_after_the_outage(algorithm):
    """Found by an attack: the correction was sent with the limits of this process's part, which the store ignores."""
    outage = Outage(algorithm)
    reservation = outage.reserve(300)
    outage.end()
    before = outage.used()
    reservation.commit({"tokens": 350})
    assert outage.used() == before + 50


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_refund_before_the_settlement_is_made_once(algorithm):
    """Found by an attack: it was sent to the store, and repeated in this process because the answer was lost."""
    outage = Outage(algorithm)
    outage.limiter.try_acquire("a", {"tokens": 100})
    reserved = outage.reserve(300)
    outage.end(lost="b")  # what was charged here is settled once no server is lost
    outage.limiter.try_acquire("a", {"tokens": 400})
    outage.link.deaf = {"a"}
    reserved.cancel()
    outage.link.deaf = set()
    outage.end()
    assert outage.used() >= 500 - 10 * (algorithm == "token_bucket")  # 10: it refills


class SlowServer(DelegatingStore):
    """A server that blocks threads until it fails."""

    def __init__(self, inner):
        super().__init__(inner)
        self.instant = False
        self.entered = threading.Event()
        self.failing = threading.Event()

    def apply(self, verb, asks, now=None, at=None, writes=()):
        if verb == "adjust" and not self.failing.is_set():
            self.entered.set()
            self.failing.wait()
            raise StoreUnavailable("the server does not answer")
        return super().apply(verb, asks, now, at, writes)

    apply_async = Store.apply_async


@pytest.mark.parametrize(("actual", "used"), [(350, 350), (100, 300)])
async def test_a_commit_whose_task_is_cancelled_while_the_store_fails(actual, used):
    """Usage above the estimate is charged after the outage; a refund may have been made, so it is not repeated."""
    clock = ManualClock(START)
    server = MemoryStore(clock=clock)
    slow = SlowServer(server)
    guarded = GuardedStore(slow, clock=clock, background=False)
    limiter = AsyncLimiter(Policy("p", ("1000/1h fixed_window",)), store=guarded, clock=clock)
    reservation = await limiter.reserve("a", 300)
    committing = asyncio.create_task(reservation.commit(actual))
    await asyncio.to_thread(slow.entered.wait)
    committing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await committing
    slow.failing.set()
    await CONTINUED_CALLS.finish()
    guarded.maintain()
    assert server.apply_one("peek", limiter.policy, "a", (0,)).used == [used]
    await limiter.close()
