"""Refusals with the same cause reduce once; capacities that remember where calls were refused."""

from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest

from tests.swarm.conftest import START
from tests.swarm.test_calls import OwnError
from tidegate import ConfigError
from tidegate.adaptive import CapacityState, RecoverySettings, read_recovery_settings
from tidegate.core._bounds import SECOND
from tidegate.swarm import SwarmLimiter

REMEMBER = RecoverySettings(remember=True)


@pytest.fixture
def swarm(face, hub, clock):
    """Makes agents, and closes them."""
    made = []

    def make(count, **options):
        for _ in range(count):
            made.append(face.swarm(bus=hub(), agent_id=f"agent-{len(made)}", clock=clock, **options))
            face.run(made[-1].set_capacity("api", 100, 60))
        return made[-count:]

    yield make
    for limiter in made:
        face.run(limiter.close())


def totals(face, limiters):
    return [face.run(limiter.get_capacity("api")).total for limiter in limiters]


def test_calls_that_began_before_a_reduction_reduce_no_further(face, swarm, clock):
    agents = swarm(5)
    clock.advance(1)
    for agent in agents:  # all were refused at the same moment, and hear of each other one after another
        face.run(agent.announce_reduced("api", "429", began=START))
    assert totals(face, agents) == [50] * 5
    clock.advance(1)
    assert face.run(agents[0].announce_reduced("api", "429", began=START + 0.5)) is None
    face.run(agents[0].announce_reduced("api", "429", began=START + 1.5))
    assert totals(face, agents) == [25] * 5


def test_each_block_of_a_shared_object_has_its_own_beginning(hub, clock):
    with SwarmLimiter(hub(), agent_id="a", clock=clock) as limiter:
        limiter.set_capacity("api", 100, 60)
        block = limiter.limited("api")
        with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
            first.submit(block.__enter__).result()
            clock.advance(1)
            limiter.announce_reduced("api", "429")
            clock.advance(1)
            second.submit(block.__enter__).result()
            first.submit(block.__exit__, OwnError, OwnError(429), None).result()
            assert limiter.get_capacity("api").total == 50, "the refused call began before the reduction"
            second.submit(block.__exit__, OwnError, OwnError(429), None).result()
            assert limiter.get_capacity("api").total == 25


def test_without_began_every_announcement_counts_as_in_the_document(face, swarm):
    agents = swarm(3)
    for agent in agents:
        face.run(agent.announce_reduced("api", "429"))
    assert totals(face, agents) == [12] * 3


def test_the_wait_of_a_duplicate_still_freezes(face, swarm, clock):
    agents = swarm(2)
    clock.advance(1)
    for agent in agents:
        face.run(agent.announce_reduced("api", "429", retry_after=7.0, began=START))
    clock.advance(1)
    assert totals(face, agents) == [50, 50]
    assert face.run(agents[0].get_capacity("api")).frozen_for == 6


@pytest.mark.parametrize("began", ["now", float("nan"), True])
def test_began_must_be_a_number(hub, clock, began):
    with SwarmLimiter(hub(), agent_id="a", clock=clock) as limiter:
        limiter.set_capacity("api", 100, 60)
        with pytest.raises(ConfigError, match="began: must be a number of seconds"):
            limiter.announce_reduced("api", "429", began=began)


def test_limited_calls_know_when_they_began(hub, clock):
    agents = [SwarmLimiter(hub(), agent_id=f"a{number}", clock=clock) for number in range(5)]
    for agent in agents:
        agent.set_capacity("api", 100, 60)
    blocks = [agent.limited("api") for agent in agents]
    for block in blocks:
        block.__enter__()
    clock.advance(1)
    for block in blocks:
        error = OwnError(429)
        block.__exit__(OwnError, error, None)
    assert [agent.get_capacity("api").total for agent in agents] == [50] * 5
    for agent in agents:
        agent.close()


async def test_limited_coroutines_know_when_they_began(hub, clock):
    from tidegate.swarm import AsyncSwarmLimiter  # noqa: PLC0415 - used here only

    agents = [AsyncSwarmLimiter(hub(), agent_id=f"a{number}", clock=clock) for number in range(3)]
    for agent in agents:
        await agent.set_capacity("api", 100, 60)
    blocks = [agent.limited("api") for agent in agents]
    for block in blocks:
        await block.__aenter__()
    clock.advance(1)
    for block in blocks:
        await block.__aexit__(OwnError, OwnError(429), None)
    assert [(await agent.get_capacity("api")).total for agent in agents] == [50] * 3
    for agent in agents:
        await agent.close()


def test_a_remembered_refusal():
    """Low for two intervals, then just below the refused capacity, then slow growth, which doubles above it."""
    state = CapacityState(1000, REMEMBER).merge(0, 1, "peer", 160, refused_at=320)
    steps = [state.current(30 * SECOND * step) for step in range(70)]
    assert steps[:2] == [160] * 2
    assert steps[2:10] == [300] * 8
    assert [steps[2 + 8 * number] for number in range(8)] == [300, 305, 310, 315, 320, 325, 335, 355]
    end = state.recovered_at(0)
    assert end is not None
    assert state.current(end) == 1000
    assert state.current(end - 1) < 1000
    assert end < 3 * 3600 * SECOND


def test_refusals_soon_after_a_reduction_are_the_same_cause():
    state = CapacityState(100, REMEMBER).reduce(0, 1, "me")
    assert state.current(0) == 50
    assert state.reduce(29 * SECOND, 2, "me") is state
    assert state.reduce(45 * SECOND, 2, "me").current(45 * SECOND) == 25  # still refused at the low value


def test_a_reduction_of_the_document_is_remembered_by_its_factor():
    state = CapacityState(100, REMEMBER).merge(0, 1, "gopher", 40)
    assert state.current(60 * SECOND) == 80 - 5
    assert CapacityState(60, REMEMBER).merge(0, 1, "gopher", 40).current(60 * SECOND) == 57  # never above the original


def test_messages_in_any_order_give_the_same_capacity():
    reductions = [(1, "a", 50, 100), (2, "b", 30, 60), (3, "c", 28, 56)]
    states = []
    for order in (reductions, reductions[::-1], reductions * 2):
        state = CapacityState(100, REMEMBER)
        for epoch, agent, value, refused_at in order:
            state = state.merge(0, epoch, agent, value, refused_at=refused_at)
        states.append([state.current(30 * SECOND * step) for step in range(200)])
    assert states[0] == states[1] == states[2]
    assert states[0][2] == 53


def test_the_recovery_is_gradual_or_remembers():
    assert read_recovery_settings(recovery="remember").remember
    assert not read_recovery_settings().remember
    assert read_recovery_settings(Fraction(1, 4)).refused_value(25) == 100
    with pytest.raises(ConfigError, match="recovery: must be 'gradual' or 'remember', not 'fast'"):
        read_recovery_settings(recovery="fast")  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize(
    ("freeze", "starts"),
    [
        (60, (60, 140, 220, 460, 1580)),  # the intervals are 80 s: 1, 1, 3 and 14 of them
        (15, (15, 35, 55, 115, 395)),  # 20 s
    ],
)
def test_a_freeze_of_half_an_interval_or_more_replaces_the_time_at_the_reduced_capacity(freeze, starts):
    """Each value halves what is missing, and is held longer; then the capacity stays just below the refused one."""
    settings = read_recovery_settings(recovery="remember", recovery_interval=30)
    state = CapacityState(1000, settings).reduce(0, 1, "me", retry_after=freeze * SECOND)
    assert [state.current(second * SECOND) for second in starts] == [500, 735, 852, 911, 940]
    assert [state.current(second * SECOND - 1) for second in starts[1:]] == [500, 735, 852, 911]


def frozen_twice(until_refused):
    """A capacity of 1,000 that was refused, and again some seconds after its freeze of a minute; read after that."""
    settings = read_recovery_settings(recovery="remember", recovery_interval=30)
    state = CapacityState(1000, settings).reduce(0, 1, "me", retry_after=60 * SECOND)
    again = (60 + until_refused) * SECOND
    return state.reduce(again, 2, "me", retry_after=60 * SECOND, began=again).current(again + 60 * SECOND)


def test_a_call_that_begins_after_a_long_freeze_and_is_refused_reduces_again():
    assert frozen_twice(1) == 250


def test_a_refused_capacity_is_reduced_to_what_the_server_has_served():
    assert frozen_twice(90) == 444, "500 for 80 seconds and 735 for 10, less a burst of a sixth of 735"


def test_a_capacity_that_was_held_for_long_before_it_was_refused_is_hardly_reduced():
    assert frozen_twice(460 - 60 + 900) == 911 - 28


def test_many_duplicates_that_freeze_do_not_displace_the_reduction():
    """The duplicates of one refusal counted as reductions, so the next refusal counted as a duplicate of them."""
    settings = read_recovery_settings(recovery="remember", recovery_interval=30)
    state = CapacityState(1000, settings).reduce(SECOND, 1, "me", retry_after=60 * SECOND, began=0)
    for number in range(100):
        state = state.reduce(SECOND + number, 2 + number, "me", retry_after=60 * SECOND, began=0)
    assert state.reductions[0].value == 500
    assert state.frozen_until == 61 * SECOND + 99
    assert state.reduce(62 * SECOND, 200, "me", retry_after=60 * SECOND).current(62 * SECOND) == 250


def test_a_bucket_that_remembers_is_empty_after_a_freeze(hub, clock):
    """Agents that start with saved permits together would be refused at a rate that the server admits."""
    with SwarmLimiter(hub(), agent_id="a", clock=clock, recovery="remember") as limiter:
        limiter.set_capacity("api", 100, 60)
        limiter.announce_reduced("api", "429", retry_after=60.0)
        clock.advance(60)
        assert [limiter.try_acquire("api") for _ in range(2)] == [True, False]
        clock.advance(1.2)
        assert [limiter.try_acquire("api") for _ in range(2)] == [True, False]


def test_a_shorter_freeze_is_a_part_of_the_time_at_the_reduced_capacity():
    settings = read_recovery_settings(recovery="remember", recovery_interval=30)
    state = CapacityState(1000, settings).reduce(0, 1, "me", retry_after=10 * SECOND)
    assert [state.current(second * SECOND) for second in (10, 59, 60, 339, 340)] == [500, 500, 938, 938, 953]


def test_a_duplicate_that_freezes_does_not_delay_the_recovery():
    settings = read_recovery_settings(recovery="remember", recovery_interval=30)
    state = CapacityState(1000, settings).reduce(0, 1, "me", retry_after=SECOND)
    later = state.reduce(20 * SECOND, 2, "me", retry_after=SECOND)
    assert later.frozen_until == 21 * SECOND
    assert [later.current(s * SECOND) for s in range(0, 600, 10)] == [
        state.current(s * SECOND) for s in range(0, 600, 10)
    ]
