"""Leases leave little of the quota unused: only the unused permits of shares, and those are few."""

import pytest

from tests.stores.lease.simulator import Network, Process, Simulation
from tidegate import Limit, Policy
from tidegate.core._bounds import SECOND, ceil_div
from tidegate.stores._lease import Lease
from tidegate.stores._lease.terms import compute_terms

LIMITS = [
    Limit(1000, "10s"),
    Limit(1000, "10s", "sliding_log"),
    Limit(1000, "10s", "fixed_window"),
    Limit(1000, "10s", "sliding_window"),
    Limit(1000, "minute", "calendar_window"),
]


def saturate(limit, processes, seconds, lease=None):
    """Run processes that together request twice the quota, evenly."""
    policy = Policy("p", (limit,))
    simulation = Simulation(policy, lease or Lease(), Network(), seed=1)
    simulation.now = 1_700_000_040 * SECOND  # the start of a minute
    all_processes = [Process(simulation) for _ in range(processes)]
    pause = limit.length * processes // (2 * limit.quota)

    def call(process):
        process.call(1)
        simulation.after(simulation.random.randrange(1, 2 * pause), lambda: call(process))

    for process in all_processes:
        call(process)
    simulation.run(simulation.now + seconds * SECOND)
    return simulation, all_processes


def max_permits(limit, seconds):
    """Return how many permits the stricter limit of the store can admit at most in that time."""
    policy = Policy("p", (limit,))
    strict = compute_terms(policy, Lease()).strict.limits[0]
    if limit.algorithm == "token_bucket":
        return strict.burst + limit.quota * seconds * SECOND // limit.length
    return limit.quota * ceil_div(seconds * SECOND, strict.length)


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.algorithm)
def test_one_process_gets_nearly_the_whole_quota(limit):
    seconds = 30
    simulation, _ = saturate(limit, 1, seconds)
    assert len(simulation.uses) >= 0.97 * max_permits(limit, seconds) * (
        0.9 if limit.algorithm == "sliding_window" else 1
    )


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.algorithm)
def test_several_processes_get_nearly_the_whole_quota_together(limit):
    seconds = 30
    simulation, _ = saturate(limit, 5, seconds)
    assert len(simulation.uses) >= 0.9 * max_permits(limit, seconds) * (
        0.9 if limit.algorithm == "sliding_window" else 1
    )


def test_demand_below_the_limit_is_never_denied_and_needs_few_store_requests():
    simulation = Simulation(Policy("p", (Limit(100_000, "1m"),)), Lease(), Network(), seed=2)
    process = Process(simulation)
    for i in range(20_000):
        simulation.after(i * 1000, lambda: process.call(1))
    simulation.run(simulation.now + 20 * SECOND)
    assert len(simulation.uses) == 20_000
    assert simulation.requests < 100


def test_permits_of_an_idle_process_are_returned_when_its_lease_ends():
    limit = Limit(1000, "1d", "fixed_window")
    simulation = Simulation(Policy("p", (limit,)), Lease(), Network(), seed=3)
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


def test_permits_of_a_killed_process_are_lost_only_until_the_window_ends():
    limit = Limit(1000, "10s", "fixed_window")
    simulation = Simulation(Policy("p", (limit,)), Lease(), Network(), seed=4)
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
