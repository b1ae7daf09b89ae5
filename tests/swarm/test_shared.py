"""The shared mode: all agents together never exceed the capacity in any window, whatever happens to them."""

import random

import pytest

from tidegate import ConfigError, Denied
from tidegate.stores import MemoryStore
from tidegate.swarm import AsyncSwarmLimiter, Capacity, SwarmLimiter


def most_in_a_window(instants, window):
    """The most admissions in any half-open window of that length."""
    instants, most, first = sorted(instants), 0, 0
    for last, instant in enumerate(instants):
        while instants[first] <= instant - window:
            first += 1
        most = max(most, last - first + 1)
    return most


@pytest.fixture
def swarm(clock, hub):
    """Makes agents that share a store."""
    store, made = MemoryStore(clock=clock), []

    def make(count, **options):
        options = {"store": store, "clock": clock, **options}
        for _ in range(count):
            made.append(SwarmLimiter(hub(), agent_id=f"agent-{len(made)}", **options))
            made[-1].set_capacity("api", 100, 60)
        return made[-count:]

    yield make
    for limiter in made:
        limiter.close()


def test_agents_share_one_quota(swarm):
    agents = swarm(4)
    admitted = [agent.try_acquire("api") for _ in range(50) for agent in agents]
    assert sum(admitted) == 100
    assert {agent.get_capacity("api") for agent in agents} == {Capacity("api", 0, 100, 60.0, 25)}


def test_a_reduction_holds_for_the_shared_quota(swarm, clock):
    agents = swarm(4)
    for _ in range(15):
        for agent in agents:
            agent.acquire("api")
    agents[0].announce_reduced("api", "429")
    assert not any(agent.try_acquire("api") for agent in agents), "60 of what is now 50 are used"
    clock.advance(60)
    assert sum(agent.try_acquire("api") for _ in range(30) for agent in agents) == 60, "recovered twice meanwhile"


def test_a_freeze_applies_to_leased_permits(swarm, clock):
    agents = swarm(2, lease=True)
    assert agents[1].try_acquire("api")
    agents[0].announce_reduced("api", "429", retry_after=10)
    assert not agents[1].try_acquire("api"), "also where permits are at hand"
    with pytest.raises(Denied):
        agents[1].acquire("api", timeout=9.999)
    assert agents[1].acquire("api", timeout=0.001)


def test_calls_are_spread_over_the_window_that_a_freeze_left_empty(swarm, clock):
    """If all agents called at once, the delays of their calls would let more arrive in a window than were granted."""
    agents = swarm(4)
    agents[0].announce_reduced("api", "429", retry_after=60)  # 50 are left
    clock.advance(60)
    granted = []
    for _ in range(60):
        granted.append(sum(agent.try_acquire("api") for _ in range(15) for agent in agents))
        clock.advance(1)
    assert max(granted) <= 5
    assert 50 <= sum(granted) <= 60, "it recovers from 50 to 55 and 60"
    assert sum(agent.try_acquire("api") for _ in range(30) for agent in agents) < 10, "no burst in the next window"


def test_a_short_freeze_leaves_most_of_the_window_as_it_was(swarm, clock):
    agents = swarm(2)
    agents[0].announce_reduced("api", "429", retry_after=6)
    clock.advance(6)
    assert sum(agent.try_acquire("api") for _ in range(60) for agent in agents) == 47, "in steps of 1/20"
    clock.advance(6)
    assert sum(agent.try_acquire("api") for _ in range(60) for agent in agents) == 3


def test_a_call_that_costs_more_than_the_spread_capacity_waits_for_it(swarm, clock):
    (agent,) = swarm(1)
    agent.announce_reduced("api", "429", retry_after=60)
    clock.advance(60)
    agent.acquire("api", cost=40, timeout=60)
    assert clock.now() >= 1_728_000_000 + 60 + 40


def test_release_returns_a_permit_to_all_agents(swarm):
    first, second = swarm(2)
    while first.try_acquire("api"):
        pass
    assert not second.try_acquire("api")
    first.release("api")
    assert second.try_acquire("api")
    first.release("api", return_token=False)
    assert not second.try_acquire("api")


def test_removing_a_shared_resource_keeps_the_usage_of_others(swarm):
    first, second = swarm(2)
    first.try_acquire("api", cost=70)
    first.set_capacity("api", 0, 0)
    assert second.get_capacity("api").available == 30
    first.set_capacity("api", 100, 60)
    assert first.get_capacity("api").available == 30


@pytest.mark.parametrize("lease", [None, True, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_never_above_the_quota_in_any_window(swarm, clock, lease, seed):
    """Agents come, go without a word, are reduced and recover, at random; the oracle is the list of admissions."""
    rng = random.Random(seed)
    agents, admitted = swarm(8, lease=lease), []
    for _ in range(1500):
        clock.advance(rng.choice((0, 0.01, 0.3, 1)))
        agent = rng.choice(agents)
        chance = rng.random()
        if chance < 0.9:
            admitted += [clock.now()] * sum(agent.try_acquire("api") for _ in range(rng.randint(1, 6)))
        elif chance < 0.903:
            agent.announce_reduced("api", "429", retry_after=rng.choice((None, 1, 5)))
        elif chance < 0.92:
            agents[agents.index(agent)] = swarm(1, lease=lease)[0]  # the old one is not closed: it crashed
    assert most_in_a_window(admitted, 60) <= 100
    assert len(admitted) > 200


async def test_async_agents_share_one_quota(clock, hub):
    store = MemoryStore(clock=clock)
    agents = [AsyncSwarmLimiter(hub(), agent_id=name, store=store, lease=True, clock=clock) for name in "ab"]
    for agent in agents:
        await agent.set_capacity("api", 100, 60)
    admitted = [await agent.try_acquire("api") for _ in range(100) for agent in agents]
    assert sum(admitted) <= 100
    async with agents[0].limited("api", timeout=120):
        pass
    for agent in agents:
        await agent.close()


def test_a_store_by_its_url_is_closed_with_the_limiter(hub, tmp_path):
    url = f"sqlite:///{tmp_path}/swarm.db"
    with SwarmLimiter(hub(), agent_id="a", store=url) as one, SwarmLimiter(hub(), agent_id="b", store=url) as two:
        for agent in (one, two):
            agent.set_capacity("api", 3, 3600)
        assert [agent.try_acquire("api") for agent in (one, two, one, two)] == [True, True, True, False]


def test_a_lease_needs_a_store(hub):
    with pytest.raises(ConfigError, match="lease: a lease needs a shared store"):
        SwarmLimiter(hub(), agent_id="a", lease=True)
