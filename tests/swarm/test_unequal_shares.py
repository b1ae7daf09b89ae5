"""Agents with different capacities and windows: a reduction leaves the same share of each."""

import pytest

from tests.swarm.test_swarm import plain
from tidegate.adaptive import SUBJECT, Capacities, CapacityUpdate, read_recovery_settings

SHARES = [(1000, 60), (100, 60), (30, 60), (3, 1), (2, "1s"), (1, 60)]


@pytest.fixture
def swarm(face, hub, clock):
    """Makes one agent for each share, and closes them."""
    made = []

    def make(shares, **options):
        for capacity, window in shares:
            made.append(face.swarm(bus=hub(), agent_id=f"agent-{len(made)}", clock=clock, **options))
            face.run(made[-1].set_capacity("api", capacity, window))
        return made

    yield make
    for limiter in made:
        face.run(limiter.close())


def totals(face, agents):
    return [face.run(agent.get_capacity("api")).total for agent in agents]


@pytest.mark.parametrize("sender", [0, 1, 2, 3])
def test_every_agent_reduces_its_own_capacity_by_the_factor(face, swarm, sender):
    agents = swarm(SHARES)
    face.run(agents[sender].announce_reduced("api", "429"))
    assert totals(face, agents) == [500, 50, 15, 1, 1, 1]


def test_a_second_reduction_multiplies_again(face, swarm):
    agents = swarm(SHARES)
    face.run(agents[2].announce_reduced("api", "429"))
    face.run(agents[0].announce_reduced("api", "429"))
    assert totals(face, agents) == [250, 25, 7, 1, 1, 1]


def test_thirds_are_not_lost_in_rounding(face, swarm):
    agents = swarm([(3, 60), (30, 60), (3_000_000, 60)], reduce_factor=0.7)
    face.run(agents[0].announce_reduced("api", "429"))
    assert totals(face, agents) == [2, 21, 2_100_000]
    face.run(agents[0].announce_reduced("api", "429"))
    assert totals(face, agents) == [1, 14, 1_400_000], "0.7 of 2 of 3"


def test_a_freeze_applies_to_every_share(face, swarm):
    agents = swarm(SHARES)
    face.run(agents[0].announce_reduced("api", "429", retry_after=9))
    assert [face.run(agent.get_capacity("api")).frozen_for for agent in agents] == [9.0] * len(SHARES)


def test_every_agent_remembers_its_own_share_of_the_refused_capacity(face, swarm, clock):
    agents = swarm([(1000, 60), (100, 60)], recovery="remember")
    face.run(agents[0].announce_reduced("api", "429"))
    clock.advance(60)
    assert totals(face, agents) == [938, 94]


def test_a_message_with_the_five_fields_of_the_document_is_obeyed_as_the_number_it_says(face, swarm, hub):
    agents = swarm(SHARES)
    hub().publish(SUBJECT, plain(new_capacity=40))
    assert totals(face, agents) == [40, 40, 30, 3, 2, 1], "above the others' capacity: no reduction"


def test_an_agent_that_joins_later_reduces_its_own_share(face, swarm):
    agents = swarm([(1000, 60)])
    face.run(agents[0].announce_reduced("api", "429"))
    assert totals(face, swarm([(10, 60)])) == [500, 5]


def test_the_lowest_reduction_that_all_know_does_not_depend_on_the_order(hub, clock):
    """The messages of two agents with different shares, in both orders."""
    settings = read_recovery_settings(reduce_factor=0.3)
    heard = []
    hub().subscribe(SUBJECT, lambda event: heard.append(event.payload))
    for name, capacity in (("a", 7), ("b", 90)):
        sender = Capacities(name, settings=settings, clock=clock, bus=hub())
        sender.set("api", capacity, 60.0)
        sender.reduce("api", "429")
        sender.close()
    found = []
    for order in (heard, heard[::-1]):
        receiver = Capacities("c", settings=settings, clock=clock)
        receiver.set("api", 1000, 60.0)
        for payload in order:
            receiver.receive(CapacityUpdate.from_json(payload), payload)
        found.append(receiver.snapshot("api").current)
    assert found[0] == found[1] == 90
