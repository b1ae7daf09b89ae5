"""Joint reservations over slots, stores, leases, outages and cancelled tasks, in random schedules, against an oracle.

The oracle adds up what callers were told: each permit that a caller holds, from its charge until it leaves the window.
It never exceeds a limit. Without outages it is also what the store has counted, once cancelled calls are refunded.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from random import Random

import pytest

from tests.seeds import seeds
from tidegate import AsyncLimiter, Denied, Limit, Policy, StoreUnavailable, reserve_async
from tidegate.stores import DelegatingStore, MemoryStore
from tidegate.stores._cancellation import CONTINUED_CALLS, refund_if_cancelled
from tidegate.stores._lease import Lease
from tidegate.stores._outage import GuardedStore
from tidegate.testing import ManualClock

START = 1_750_000_000
QUOTA = 12  # of the limits below
SLOTS = 3  # the last letter of a key is its slot


class Server(DelegatingStore):
    """A shared store with slots, whose calls take a few iterations of the event loop, and may fail or be lost."""

    def __init__(self, inner, random, failures):
        super().__init__(inner)
        self.instant = False
        self.random = random
        self.failures = failures

    def key_slots(self, asks):
        return [ord(str(key)[-1]) % SLOTS for _, key, _ in asks]

    async def apply_async(self, verb, asks, now=None, at=None, writes=()):
        assert len(set(self.key_slots(asks))) == 1
        return await refund_if_cancelled(self, self._call(verb, asks, now, at), verb, asks, now, at)

    async def _call(self, verb, asks, now, at):
        for _ in range(self.random.randrange(3)):
            await asyncio.sleep(0)
        fate = self.random.random()
        if fate < self.failures / 2:
            raise StoreUnavailable("lost on the way")
        decisions = self.inner.apply(verb, asks, now, at)
        for _ in range(self.random.randrange(3)):
            await asyncio.sleep(0)
        if fate < self.failures:
            raise StoreUnavailable("the answer is lost")
        return decisions


@dataclass
class Use:
    """What a caller was told it has: permits of a key, from an instant on."""

    key: str
    cost: int
    at: int


class Schedule:
    """Some tasks that reserve, settle and are cancelled, in an order that the seed decides."""

    def __init__(self, seed, limit, *, failures=0.0, lease=None, mode="deny"):
        self.random = Random(seed)
        self.clock = ManualClock(START)
        self.shared = [MemoryStore(clock=self.clock) for _ in range(2)]
        self.servers = [Server(store, self.random, failures) for store in self.shared]
        stores = self.servers
        if failures:
            stores = self.guards = [
                GuardedStore(server, clock=self.clock, background=False, processes=1) for server in self.servers
            ]
        else:
            self.guards = []
        self.length = limit.length
        self.limiters = [
            AsyncLimiter(
                Policy(f"p{number}", (limit,), on_store_error=mode), store=store, clock=self.clock, lease=lease
            )
            for number, store in enumerate(stores)
        ]
        self.uses = []
        self.lost = 0

    async def run(self):
        for _ in range(self.random.randrange(4, 10)):
            tasks = [asyncio.create_task(self.work()) for _ in range(self.random.randrange(1, 7))]
            for _ in range(self.random.randrange(12)):
                await asyncio.sleep(0)
                if self.random.random() < 0.15:
                    self.random.choice(tasks).cancel()
                self.check()
            for raised in await asyncio.gather(*tasks, return_exceptions=True):
                assert raised is None or isinstance(raised, asyncio.CancelledError), raised
            await CONTINUED_CALLS.finish()
            self.check()
            for guard in self.guards:
                guard.maintain()
            self.clock.advance(self.random.choice((0, 0.5, 7, 30, 61)))

    async def work(self):
        asks = [
            (limiter, key, self.random.randrange(1, 5))
            for limiter in self.random.sample(self.limiters, self.random.randrange(1, 3))
            for key in self.random.sample("abcd", self.random.randrange(1, 4))
        ]
        try:
            reservation = await reserve_async(
                asks, ttl=1000, timeout=0 if self.guards else self.random.choice((0, 0, 3))
            )
        except (Denied, StoreUnavailable):
            return
        own = [Use(f"{limiter.policy.name}{key}", cost, self.now()) for limiter, key, cost in asks]
        self.uses += own
        for _ in range(self.random.randrange(3)):
            await asyncio.sleep(0)
        part = self.random.choice((None, 0, 1))
        if part is None:
            return  # the estimate stays
        for use in own:
            use.cost = min(use.cost, part)
        with suppress(StoreUnavailable):
            await (reservation.commit(1) if part else reservation.cancel())

    def now(self):
        return self.clock.ns() // 1000

    def counted(self, key):
        return sum(use.cost for use in self.uses if use.key == key and use.at > self.now() - self.length)

    def check(self):
        for key in {use.key for use in self.uses}:
            assert self.counted(key) <= QUOTA * (1 + self.local), (key, self.uses)

    @property
    def local(self):
        return any(limiter.policy.on_store_error == "local" for limiter in self.limiters)

    def stored(self):
        return {
            f"{limiter.policy.name}{key}": store.apply_one("peek", limiter.policy, key, (0,)).used[0]
            for limiter, store in zip(self.limiters, self.shared, strict=True)
            for key in "abcd"
        }


@pytest.mark.seeds
@pytest.mark.parametrize("limit", ["12/1m sliding_log", "12/52w fixed_window", "12/52w sliding_window"])
async def test_without_outages_the_store_counts_what_callers_have(limit):
    for seed in seeds(50):
        schedule = Schedule(seed, Limit.parse(limit))
        await schedule.run()
        stored = schedule.stored()
        assert stored == {key: schedule.counted(key) for key in stored}, seed
        for limiter in schedule.limiters:
            await limiter.close()


@pytest.mark.seeds
@pytest.mark.parametrize("mode", ["deny", "local"])
@pytest.mark.parametrize("lease", [None, Lease()])
async def test_with_outages_and_leases_no_limit_is_exceeded(mode, lease):
    for seed in seeds(50):
        schedule = Schedule(seed, Limit.parse("12/1m sliding_log"), failures=0.15, lease=lease, mode=mode)
        await schedule.run()
        for limiter in schedule.limiters:
            with suppress(StoreUnavailable):
                await limiter.close()
