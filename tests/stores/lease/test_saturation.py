"""Demand above the limit: permits gather, a process asks seldom, denials in memory tell when to retry, callers wait."""

import asyncio
from random import Random

import pytest

from tests.cases import cases
from tests.stores.lease.simulator import Network, Process, Simulation, overspent
from tidegate import AsyncLimiter, Limit, Limiter, Policy
from tidegate.core._algorithms import NEVER
from tidegate.core._bounds import SECOND
from tidegate.stores import MemoryStore
from tidegate.stores._lease import Lease
from tidegate.stores._lease.denial import wait_of
from tidegate.stores._lease.key_lease import TRANSITIONS, LeaseState
from tidegate.testing import ManualClock

ALGORITHMS = ["token_bucket", "sliding_log", "fixed_window", "sliding_window"]
RATE = 1000  # permits per second of the limits below
MAX_REQUESTS = 25  # per second, process and key: 100 for four processes
START = 1_700_000_000


class CountingStore(MemoryStore):
    """A shared store that counts its requests."""

    instant = False
    requests = 0

    def apply(self, verb, asks, now=None, at=None):
        self.requests += 1
        return super().apply(verb, asks, now, at)

    async def apply_async(self, verb, asks, now=None, at=None):
        return self.apply(verb, asks, now, at)


class CountingProcess(Process):
    """A process that counts the calls that it was allowed."""

    used = 0

    def record_use(self, decisions, at, costs):
        super().record_use(decisions, at, costs)
        self.used += decisions[0].allowed


def saturate(limit, processes, seconds, network, pause=100):
    """Let processes that start together call after each pause (in us); count requests after a second."""
    simulation = Simulation(Policy("p", (limit,)), Lease(), network, seed=1)
    started = [CountingProcess(simulation) for _ in range(processes)]
    begins = simulation.now + SECOND

    def call(number):
        started[number].call(1)
        simulation.after(pause, lambda: call(number))

    for number in range(processes):
        call(number)
    simulation.run(begins)
    requests = simulation.requests
    simulation.run(begins + seconds * SECOND)
    used = [process.used for process in started]
    return simulation, used, (simulation.requests - requests) / seconds


@pytest.mark.parametrize("processes", [1, 4])
def test_a_bucket_is_used_up_with_few_requests_and_never_exceeded(processes):
    simulation, _, requests = saturate(Limit(2 * RATE, "2s"), processes, 4, Network())
    later = sum(use.time >= simulation.now - 4 * SECOND for use in simulation.uses)
    assert later >= 0.97 * 4 * RATE
    assert requests <= MAX_REQUESTS * processes
    assert overspent(simulation) is None


@pytest.mark.parametrize("algorithm", ALGORITHMS[1:])
def test_other_algorithms_are_used_up_with_few_requests_and_never_exceeded(algorithm):
    limit = Limit(2 * RATE, "2s", algorithm)
    simulation, _, requests = saturate(limit, 4, 8, Network(), pause=1000)
    # The weight of the previous window denies a part; the store counts a log for a twentieth longer.
    part = {"sliding_window": 0.9, "sliding_log": 20 / 21}.get(algorithm, 1)
    assert len(simulation.uses) >= 0.97 * part * 8 * RATE
    assert requests <= 160  # permits come back in steps; calls ask for themselves while a share is fetched
    assert overspent(simulation) is None


def test_processes_that_start_in_step_get_similar_parts_of_a_bucket():
    _, used, _ = saturate(Limit(2 * RATE, "2s"), 8, 8, Network(delay=1))
    assert min(used) >= 0.75 * sum(used) / len(used)


@cases("algorithm", ALGORITHMS)
def test_a_call_is_allowed_at_its_retry_after(algorithm):
    clock = ManualClock(START)
    limiter = Limiter(f"2000/2s {algorithm}", store=CountingStore(clock=clock), lease=True)
    random = Random(1)
    for _ in range(100):
        cost = random.choice((1, 1, 1, 3, 50))
        while (decision := limiter.try_acquire("k", cost)).allowed:
            pass
        assert limiter.peek("k", cost).retry_after == decision.retry_after > 0
        clock.advance(decision.retry_after)
        assert limiter.try_acquire("k", cost)


@cases("algorithm", ALGORITHMS)
def test_a_wait_in_memory_is_never_shorter_than_in_the_store(algorithm):
    random, limit = Random(7), Limit(100, "10s", algorithm)
    known = 0
    for _ in range(2000):
        state, now = None, START * SECOND
        for _ in range(random.randrange(12)):
            now += random.randrange(3 * SECOND)
            state = limit.charge(state, limit, random.randint(1, 40), now) or state
        denied, cost = random.randint(0, 110), random.randint(1, 110)
        view = limit.rules.view(state, limit, denied, now)
        wait = wait_of(limit, cost, denied, view)
        if wait is not None:
            _, exact, _ = limit.rules.view(state, limit, cost, now)
            assert wait == NEVER if exact == NEVER else wait >= exact
            known += 1
    assert known > 500


def test_calls_of_other_costs_are_denied_in_memory_too():
    clock = ManualClock(START)
    shared = CountingStore(clock=clock)
    limiter = Limiter("2000/2s", store=shared, lease=True)
    while limiter.try_acquire("k"):
        pass
    requests = shared.requests
    decisions = [limiter.try_acquire("k", cost) for cost in range(1, 50)]
    assert shared.requests == requests
    assert not any(decisions)
    waits = [decision.retry_after for decision in decisions]
    assert waits == sorted(waits)


def test_a_small_call_is_not_denied_because_a_large_one_was():
    clock = ManualClock(START)
    limiter = Limiter("2000/2s", store=CountingStore(clock=clock), lease=True)
    assert limiter.try_acquire("k", 1500)
    assert not limiter.try_acquire("k", 1000)
    assert limiter.try_acquire("k")


def test_a_limit_that_has_permits_denies_nobody():
    clock = ManualClock(START)
    limits = [Limit(2000, "2s"), Limit(100_000, "2s", unit="tokens")]
    limiter = Limiter(limits, store=CountingStore(clock=clock), lease=True)
    while limiter.try_acquire("k", {"requests": 1, "tokens": 1}):
        pass
    assert limiter.try_acquire("k", {"tokens": 100})
    assert not limiter.try_acquire("k", {"requests": 1})


def test_waiting_callers_get_all_permits_with_few_requests():
    clock = ManualClock(START)
    shared = CountingStore(clock=clock)
    limiter = Limiter("2000/2s", store=shared, lease=True)
    while limiter.try_acquire("k"):
        pass
    requests, began, calls = shared.requests, clock.steady(), 2000
    for _ in range(calls):
        limiter.acquire("k", timeout=1)
    passed = (clock.steady() - began) / SECOND
    assert 0.95 * calls / RATE <= passed <= 1.05 * calls / RATE + 0.3  # a part of the burst may be left in the store
    assert shared.requests - requests <= MAX_REQUESTS * passed


async def test_waiting_tasks_are_served_in_order():
    clock = ManualClock(START)
    shared = CountingStore(clock=clock)
    limiter = AsyncLimiter("2000/2s", store=shared, lease=True)
    while await limiter.try_acquire("k"):
        pass
    requests, began = shared.requests, clock.steady()
    served = []

    async def wait(number):
        await limiter.acquire("k", timeout=5)
        served.append(number)

    await asyncio.gather(*(wait(number) for number in range(200)))
    assert served == list(range(200))
    assert shared.requests - requests <= 2 + MAX_REQUESTS * (clock.steady() - began) / SECOND
    await limiter.close()


def test_every_state_can_be_reached_and_left():
    assert set(TRANSITIONS) == set(LeaseState)
    reachable = {LeaseState.IDLE}
    while (more := {after for state in reachable for after in TRANSITIONS[state].values()}) - reachable:
        reachable |= more
    assert reachable == set(LeaseState) - {LeaseState.DROPPED}  # which `drop` sets, and which is final
    assert not TRANSITIONS[LeaseState.DROPPED]
