"""A pool and a spending ceiling in virtual time: 200 agents, 5 keys, `max_tokens` 64,000, strict calls, $25 per day."""

from functools import partial

import pytest

from tests.outbound.virtual_pool import HiddenPoolSimulation, PoolSimulation

USABLE_MONEY = 0.97
USABLE_QUOTAS = 0.95
LEFT = 0.03
DEAR = (1, 4)  # dollars per million tokens of input and output: the ceiling is reached within two minutes
CHEAP = (0.001, 0.004)


def check_nothing_is_exceeded(world):
    assert world.spent <= world.ceiling
    assert world.most_charged <= world.ceiling
    for windows in (world.tokens_of, world.requests_of):
        assert all(window.most <= window.quota for window in windows.values())
    assert sum(gate.metrics()["overrun"] for gate in world.gates) == 0


def spend_a_day(world, seconds=100):
    """Let the agents spend the money of a day; returns the used share."""
    world.next_day()
    world.run(world.now() + seconds)
    return world.spent / world.ceiling


@pytest.mark.slow
def test_the_money_of_a_day_is_used_and_never_exceeded():
    world = PoolSimulation(DEAR, processes=4)
    world.run(130)  # the first day: answers are learned
    check_nothing_is_exceeded(world)
    used = spend_a_day(world)
    check_nothing_is_exceeded(world)
    assert used >= USABLE_MONEY
    assert world.money_left
    assert max(world.money_left) <= LEFT


def test_nothing_is_exceeded_while_processes_are_killed():
    world = PoolSimulation(DEAR, processes=4, seed=2)
    for number in range(3):
        world.at(10 * number + 10 * world.random.random(), partial(world.kill, world.random.randrange(4)))
    world.run(60)
    check_nothing_is_exceeded(world)
    assert world.spent


@pytest.mark.slow
def test_the_money_is_used_while_processes_are_killed():
    world = PoolSimulation(DEAR, processes=8, seed=2)
    world.run(130)
    world.next_day()
    for number in range(5):
        world.at(10 * number + 10 * world.random.random(), partial(world.kill, world.random.randrange(8)))
    world.run(world.now() + 100)
    check_nothing_is_exceeded(world)
    assert world.spent / world.ceiling >= USABLE_MONEY
    assert max(world.money_left) <= LEFT


def test_the_quotas_of_all_keys_are_used():
    world = PoolSimulation(CHEAP, processes=4)
    world.run(100)
    for window in world.tokens_of.values():
        window.total = 0
    world.refusals.clear()
    world.run(world.now() + 60)
    check_nothing_is_exceeded(world)
    used = sum(window.total for window in world.tokens_of.values()) / world.tokens.quota
    assert used >= USABLE_QUOTAS
    assert max((left for _, left in world.refusals), default=0) <= LEFT


@pytest.mark.slow
def test_hidden_quotas_are_learned_and_used_without_a_refusal():
    """Each key is configured with the sum of all quotas; the provider reports the quota of the key."""
    world = HiddenPoolSimulation(CHEAP, processes=4)
    world.run(100)
    for window in world.tokens_of.values():
        window.total = 0
    world.refusals.clear()
    world.run(world.now() + 60)
    check_nothing_is_exceeded(world)
    assert not world.refused
    used = sum(window.total for window in world.tokens_of.values()) / world.tokens.quota
    assert used >= USABLE_QUOTAS
    assert max((left for _, left in world.refusals), default=0) <= LEFT


@pytest.mark.slow
def test_the_money_is_used_with_hidden_quotas_while_processes_are_killed():
    world = HiddenPoolSimulation(DEAR, processes=8, seed=3)
    world.run(130)
    world.next_day()
    for number in range(5):
        world.at(10 * number + 10 * world.random.random(), partial(world.kill, world.random.randrange(8)))
    world.run(world.now() + 100)
    check_nothing_is_exceeded(world)
    assert not world.refused
    assert world.spent / world.ceiling >= USABLE_MONEY
    assert max(world.money_left) <= LEFT


@pytest.mark.slow
def test_quotas_that_only_refusals_tell_are_found_within_minutes():
    """Refusals with nothing but Retry-After: the capacity of each key is found by trying."""
    world = HiddenPoolSimulation(CHEAP, processes=4, reports=False, seed=2)
    world.run(360)
    for window in world.tokens_of.values():
        window.total = 0
    refused, failed, answers = len(world.refused), world.failed, world.answers
    world.run(world.now() + 60)
    assert sum(window.total for window in world.tokens_of.values()) / world.tokens.quota >= USABLE_QUOTAS
    assert len(world.refused) - refused <= 0.01 * (world.answers - answers)
    assert world.failed == failed
