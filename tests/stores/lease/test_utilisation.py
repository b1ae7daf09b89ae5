"""Leases must not cost much of the quota either: what is under-admitted is what is held unused, and that is little."""

import pytest

from tests.stores.lease.simulator import Net, Process, Simulation
from tidegate import Limit, Policy
from tidegate.core.bounds import SECOND, ceil_div
from tidegate.stores.lease import Lease
from tidegate.stores.lease.terms import terms

LIMITS = [
    Limit(1000, "10s"),
    Limit(1000, "10s", "sliding_log"),
    Limit(1000, "10s", "fixed_window"),
    Limit(1000, "10s", "sliding_window"),
    Limit(1000, "minute", "calendar_window"),
]


def saturated(limit, processes, seconds, lease=None):
    """Everybody asks for twice the quota, evenly, for so long."""
    policy = Policy("p", (limit,))
    simulation = Simulation(policy, lease or Lease(), Net(), seed=1)
    simulation.now = 1_700_000_040 * SECOND  # the start of a minute
    everyone = [Process(simulation) for _ in range(processes)]
    pause = limit.length * processes // (2 * limit.quota)

    def call(process):
        process.call(1)
        simulation.after(simulation.random.randrange(1, 2 * pause), lambda: call(process))

    for process in everyone:
        call(process)
    simulation.run(simulation.now + seconds * SECOND)
    return simulation, everyone


def possible(limit, seconds):
    """Count what the limit that the store is asked can admit at most in that time."""
    policy = Policy("p", (limit,))
    asked = terms(policy, Lease()).strict.limits[0]
    if limit.algorithm == "token_bucket":
        return asked.burst + limit.quota * seconds * SECOND // limit.length
    return limit.quota * ceil_div(seconds * SECOND, asked.length)


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.algorithm)
def test_a_lone_process_gets_nearly_all(limit):
    seconds = 30
    simulation, _ = saturated(limit, 1, seconds)
    assert len(simulation.uses) >= 0.97 * possible(limit, seconds) * (0.9 if limit.algorithm == "sliding_window" else 1)


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.algorithm)
def test_several_processes_get_nearly_all_between_them(limit):
    seconds = 30
    simulation, _ = saturated(limit, 5, seconds)
    assert len(simulation.uses) >= 0.9 * possible(limit, seconds) * (0.9 if limit.algorithm == "sliding_window" else 1)


def test_demand_below_the_limit_asks_the_store_rarely_and_is_never_denied():
    simulation = Simulation(Policy("p", (Limit(100_000, "1m"),)), Lease(), Net(), seed=2)
    process = Process(simulation)
    for i in range(20_000):
        simulation.after(i * 1000, lambda: process.call(1))
    simulation.run(simulation.now + 20 * SECOND)
    assert len(simulation.uses) == 20_000
    assert simulation.asked < 100


def test_what_is_held_by_an_idle_process_comes_back_when_its_lease_ends():
    limit = Limit(1000, "1d", "fixed_window")
    simulation = Simulation(Policy("p", (limit,)), Lease(), Net(), seed=3)
    busy, other = Process(simulation), Process(simulation)
    for _ in range(300):
        simulation.after(simulation.random.randrange(100_000), lambda: busy.call(1))
    simulation.run(simulation.now + 200_000)
    held = busy.store.metrics()["lease_outstanding_requests"]
    assert held > 0
    simulation.run(simulation.now + 3 * SECOND)
    assert busy.store.metrics()["lease_outstanding_requests"] == 0
    for _ in range(1000):
        simulation.after(simulation.random.randrange(SECOND), lambda: other.call(1))
    simulation.run(simulation.now + 3 * SECOND)
    assert len(simulation.uses) == 1000  # the whole quota, to the last permit


def test_what_a_killed_process_held_is_lost_until_the_window_ends_and_no_more_than_that():
    limit = Limit(1000, "10s", "fixed_window")
    simulation = Simulation(Policy("p", (limit,)), Lease(), Net(), seed=4)
    killed, other = Process(simulation), Process(simulation)
    for _ in range(300):
        simulation.after(simulation.random.randrange(100_000), lambda: killed.call(1))
    simulation.run(simulation.now + 200_000)
    held = killed.store.metrics()["lease_outstanding_requests"]
    killed.kill()
    for _ in range(1000):
        simulation.after(simulation.random.randrange(SECOND), lambda: other.call(1))
    simulation.run(simulation.now + 3 * SECOND)
    assert held > 0
    assert len(simulation.uses) == 1000 - held
    simulation.run(simulation.now + 10 * SECOND)
    before = len(simulation.uses)
    for _ in range(1500):
        simulation.after(simulation.random.randrange(SECOND), lambda: other.call(1))
    simulation.run(simulation.now + 3 * SECOND)
    assert len(simulation.uses) - before == 1000
