"""Namespaces, the end of retained reductions, clearing them, and calls after close."""

import json
import time
from contextlib import suppress

import pytest

from tests.servers.nats import NatsServer
from tests.servers.valkey import ValkeyServer
from tidegate import Closed, ConfigError
from tidegate._cli import main
from tidegate.adaptive import SUBJECT
from tidegate.bus import open_bus
from tidegate.stores import MemoryStore
from tidegate.swarm import SwarmLimiter
from tidegate.swarm._clearing import clear_reductions
from tidegate.swarm._presence import Watcher


@pytest.fixture
def agent(hub, clock):
    """Makes agents of one hub."""
    made = []

    def make(name, capacity=100, **options):
        made.append(SwarmLimiter(bus=hub(), agent_id=name, clock=clock, **options))
        made[-1].set_capacity("api", capacity, 60)
        return made[-1]

    yield make
    for limiter in made:
        with suppress(Closed):  # some tests close it
            limiter.close()


def total(limiter, resource="api"):
    return limiter.get_capacity(resource).total


def test_agents_of_different_namespaces_do_not_affect_each_other(agent, hub):
    alone, one, two, other = agent("a"), agent("b", namespace="x"), agent("c", namespace="x"), agent("d", namespace="y")
    subjects = []
    for subject in (SUBJECT, f"x.{SUBJECT}", f"y.{SUBJECT}"):
        hub().subscribe(subject, lambda event: subjects.append(event.subject))
    one.announce_reduced("api", "429")
    assert [total(limiter) for limiter in (alone, one, two, other)] == [100, 50, 50, 100]
    assert subjects == [f"x.{SUBJECT}"]
    alone.announce_reduced("api", "429")
    alone.announce_reduced("api", "429")
    assert [total(limiter) for limiter in (alone, one, two, other)] == [25, 50, 50, 100]
    assert [total(agent(f"late-{name}", namespace=name)) for name in ("", "x", "y")] == [25, 50, 100]


def test_a_watcher_sees_the_agents_of_its_namespace(agent, hub):
    agent("a"), agent("b", namespace="x")
    found = []
    for namespace in ("", "x", "y"):
        watcher = Watcher(hub(), namespace=namespace)
        watcher.ask()
        found.append([each.agent_id for each in watcher.agents()])
    assert found == [["a"], ["b"], []]


def test_namespaces_do_not_share_a_quota_in_a_store(agent, clock):
    store = MemoryStore(clock=clock)
    one, two = (agent(name, 10, namespace=name, store=store) for name in ("x", "y"))
    assert sum(limiter.try_acquire("api") for limiter in (one, two) * 20) == 20
    same = agent("z", 10, namespace="x", store=store)
    assert not same.try_acquire("api")


@pytest.mark.parametrize("namespace", ["a b", "a.", ".a", "a>", "*", "x" * 101, 7])
def test_invalid_namespaces_are_refused(namespace):
    with pytest.raises(ConfigError, match="namespace: must be words of letters, digits"):
        SwarmLimiter(bus="local://n", agent_id="a", namespace=namespace)


def test_a_retained_reduction_ends_when_its_sender_has_recovered(agent, clock):
    """Another program on the same bus, with the same resource name, that recovers quickly."""
    example = agent("example", 40, recovery_interval=0.5)
    for _ in range(4):
        example.announce_reduced("api", "429")
    assert total(example) == 2
    clock.advance(3)
    assert total(agent("soon")) < 20  # still in force at its sender
    clock.advance(20)
    assert total(example) == 40
    assert total(agent("later")) == 100


def test_a_retained_reduction_of_the_document_ends_after_the_longest_recovery(agent, hub, clock):
    """Without the time of its sender, it counts from its timestamp, with the recovery of the reader."""
    fields = {"resource": "api", "agent_id": "go", "new_capacity": 1, "reason": "", "timestamp": "2024-10-04T00:00:00Z"}
    update = json.dumps(fields).encode()
    clock.advance(30 * 60)
    hub().publish(SUBJECT, update, late=True)
    reader = agent("reader")
    hub().publish(SUBJECT, update, late=True)
    assert total(reader) == 100


def test_clearing_ends_the_reductions_of_running_and_later_agents(agent, hub, clock):
    one, two = agent("one"), agent("two")
    two.set_capacity("other", 100, 60)
    one.set_capacity("other", 100, 60)
    one.announce_reduced("api", "429")
    two.announce_reduced("api", "429")
    one.announce_reduced("other", "429")
    clock.advance(1)
    assert clear_reductions(hub(), "api") == {"api": 2}
    assert [total(one), total(two), total(agent("later"))] == [100, 100, 100]
    assert [total(one, "other"), total(two, "other")] == [50, 50]
    assert clear_reductions(hub()) == {"other": 1}
    assert [total(one, "other"), total(two, "other")] == [100, 100]
    clock.advance(1)
    two.announce_reduced("api", "429")
    assert total(one) == 50


def test_clearing_needs_the_secret(agent, hub, clock):
    one = agent("one", secret="s3cret")  # noqa: S106 - of a test
    one.announce_reduced("api", "429")
    clock.advance(1)
    assert clear_reductions(hub(), "api") == {"api": 0}
    assert total(one) == 50
    assert clear_reductions(hub(), "api", "s3cret") == {"api": 1}
    assert total(one) == 100


@pytest.mark.parametrize("kind", [NatsServer, ValkeyServer])
def test_the_command_clears_what_a_server_retains(kind, capsys):
    with kind() as server:
        with open_bus(server.url) as bus, SwarmLimiter(bus, agent_id="yesterday", namespace="x") as limiter:
            assert bus.wait(20)
            limiter.set_capacity("api", 100, 60)
            limiter.announce_reduced("api", "429")
        assert main(["swarm", server.url, "--namespace", "x", "--clear", "api"]) == 0
        assert capsys.readouterr().out == "api: 1 retained reduction cleared\n"
        with open_bus(server.url) as bus, SwarmLimiter(bus, agent_id="today", namespace="x") as limiter:
            assert bus.wait(20)
            limiter.set_capacity("api", 100, 60)
            until = time.monotonic() + 20
            while limiter.metrics()["cleared"] + limiter.metrics()["unknown"] == 0:
                assert time.monotonic() < until, "nothing was retained"
            assert total(limiter) == 100
        assert main(["swarm", server.url, "--clear", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"cleared": {}}


def test_calls_after_close(face, hub, clock):
    limiter = face.swarm(bus=hub(), agent_id="a", clock=clock)
    face.run(limiter.set_capacity("api", 10, 60))
    face.run(limiter.close())
    for capacity in (20, 0):
        with pytest.raises(Closed, match="the limiter is closed"):
            face.run(limiter.set_capacity("api", capacity, 60))
    with pytest.raises(ConfigError):
        face.run(limiter.set_capacity("", 20, 60))
    assert face.run(limiter.get_capacity("api")) is None
    assert face.run(limiter.try_acquire("api")) is False
    assert face.run(limiter.announce_reduced("api", "429")) is None
    with pytest.raises(Closed):
        face.run(limiter.acquire("api", timeout=0))
    face.run(limiter.release("api"))
