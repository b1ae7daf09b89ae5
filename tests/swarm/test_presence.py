"""Presence: agents answer requests for their state, and `tidegate swarm` shows them."""

import json

import pytest

from tidegate import _cli as cli
from tidegate._cli.output import Output
from tidegate._cli.swarm import SwarmView, clean
from tidegate.bus import open_bus
from tidegate.swarm import Capacity, SwarmLimiter
from tidegate.swarm import _presence as presence
from tidegate.swarm._presence import ANSWER_SUBJECT, Watcher


@pytest.fixture
def swarm(clock, hub):
    agents = [SwarmLimiter(hub(), agent_id=name, clock=clock) for name in ("b", "a")]
    for agent in agents:
        agent.set_capacity("api", 100, 60)
    yield agents
    for agent in agents:
        agent.close()


def test_agents_answer(swarm, hub, clock):
    swarm[0].try_acquire("api", cost=30)
    swarm[1].announce_reduced("api", "429", retry_after=5)
    watcher = Watcher(hub())
    assert watcher.agents() == []
    watcher.ask()
    found = watcher.agents()
    assert [agent.agent_id for agent in found] == ["a", "b"]
    assert found[0].resources == {"api": Capacity("api", 0, 50, 60.0, 0)}
    assert found[1].resources == {"api": Capacity("api", 0, 50, 60.0, 1)}
    assert (found[1].resources["api"].original, found[1].resources["api"].frozen_for) == (100, 5.0)
    clock.advance(10.1)
    assert watcher.agents() == [], "who does not answer is forgotten"
    watcher.close()


def test_malformed_answers_are_ignored(swarm, hub):
    watcher = Watcher(hub())
    for wrong in (b"", b"[]", b"{}", b'{"agent_id":"x","resources":[]}', b'{"agent_id":"x","resources":{"a":{}}}'):
        hub().publish(ANSWER_SUBJECT, wrong)
    received = {"resource": "a", "available": "many", "total": 1, "window": 1, "in_flight": 0}
    hub().publish(ANSWER_SUBJECT, json.dumps({"agent_id": "x", "resources": {"a": received}}).encode())
    received = {
        "resource": "a",
        "available": 1,
        "total": 1,
        "window": 1,
        "in_flight": 0,
        "original": 1,
        "frozen_for": 0,
    }
    bad = {
        "total": 1e999,
        "window": float("nan"),
        "original": True,
        "frozen_for": "5",
        "in_flight": 0.5,
        "available": 2**60,
    }
    for name, value in bad.items():
        hub().publish(
            ANSWER_SUBJECT, json.dumps({"agent_id": "x", "resources": {"a": {**received, name: value}}}).encode()
        )
    for wrong in ({"agent_id": "\ud800"}, {"agent_id": ""}, {"agent_id": 5}, {"resources": {"\ud800": received}}):
        hub().publish(ANSWER_SUBJECT, json.dumps({"agent_id": "x", "resources": {"a": received}, **wrong}).encode())
    assert watcher.agents() == []
    assert watcher.malformed == 6 + len(bad) + 4


def test_the_memory_of_a_watcher_is_bounded(hub, monkeypatch):
    watcher, bus = Watcher(hub()), hub()
    received = {"resource": "a", "available": 1, "total": 1, "window": 1, "in_flight": 0}
    monkeypatch.setattr(presence, "MAX_ANSWERS", 50)
    for number in range(200):
        bus.publish(ANSWER_SUBJECT, json.dumps({"agent_id": str(number), "resources": {"a": received}}).encode())
    assert len(watcher.agents()) == 50
    monkeypatch.setattr(presence, "MAX_ANSWERS_BYTES", 1000)
    bus.publish(ANSWER_SUBJECT, json.dumps({"agent_id": "last", "resources": {"a": received}}).encode())
    assert "last" in [agent.agent_id for agent in watcher.agents()]
    assert len(watcher.agents()) < 12


def test_an_agent_with_more_resources_than_a_message_holds_answers_with_some(hub, clock):
    limiter = SwarmLimiter(hub(), agent_id="a", clock=clock)
    for number in range(600):
        limiter.set_capacity(f"{number} " + "€" * 500, 5, 60)
    bus = hub()
    watcher = Watcher(bus)
    watcher.ask()
    (agent,) = watcher.agents()
    assert 50 < len(agent.resources) < 600
    assert bus.failed == 0
    limiter.close()


def test_with_a_secret_only_signed_answers_count(hub, clock):
    limiter = SwarmLimiter(hub(), agent_id="a", secret=b"shared", clock=clock)
    knows, does_not = Watcher(hub(), b"shared"), Watcher(hub(), b"guess")
    knows.ask()
    assert [agent.agent_id for agent in knows.agents()] == ["a"]
    assert does_not.agents() == []
    heard = []
    hub().subscribe(ANSWER_SUBJECT, heard.append)
    does_not.ask()
    assert heard == [], "nor do agents answer those"
    limiter.close()


def test_the_live_view(swarm, hub, clock, capsys):
    board, watcher = SwarmView(hub(), None, Output()), Watcher(hub())  # asked here instead of every second
    texts = []
    for happens in (
        lambda: None,
        lambda: swarm[0].announce_reduced("api", "received 429 response"),
        lambda: clock.advance(30),
        lambda: swarm[1].announce_reduced("api", "evil \x1b[2J", retry_after=8),
        lambda: clock.advance(1000),
    ):
        happens()
        watcher.ask()
        texts.append("\n".join(board.draw(watcher.agents())))
    lines = texts[0].splitlines()
    assert lines[:3] == ["swarm: 2 agents", "", "api"]
    assert lines[3].split() == ["agent", "capacity", "free", "in", "flight", "state"]
    assert lines[4].split() == ["a", "█" * 20, "100/100", "100", "0"]
    assert "reductions" not in texts[0]
    assert texts[1].count("50/100") == 2
    assert texts[1].count("reduced") == 2
    assert "00:00:00  api to 50 by b: received 429 response" in texts[1]
    assert texts[2].count("55/100") == texts[2].count("recovering") == 2
    assert texts[3].count("frozen for 8s") == 2
    assert "api to 27 by a: evil ?[2J, no calls for 8s" in texts[3]
    assert texts[4].count("recovered") == 2
    data = board.describe(watcher.agents())
    assert data["agents"]["a"]["api"]["original"] == 100
    assert [update["new_capacity"] for update in data["updates"]] == [50, 27]
    json.dumps(data)


def test_an_empty_live_view(hub):
    bus = hub()
    assert "no agent responds" in "\n".join(SwarmView(bus, None, Output()).draw([]))


def test_names_are_shown_safely():
    assert clean("a\x1b[31m\nb") == "a?[31m?b"
    assert len(clean("x" * 1000)) == 60


def test_the_command_once(swarm, hub, capsys, monkeypatch):
    monkeypatch.setenv("TIDEGATE_BUS", hub.url)
    assert cli.main(["swarm", "--once", "--interval", "0.01"]) == 0
    assert "swarm: 2 agents" in capsys.readouterr().out
    assert cli.main(["swarm", "--once", "--interval", "0.01", "--json"]) == 0
    received = json.loads(capsys.readouterr().out)
    assert received["agents"]["b"]["api"]["total"] == 100


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "expected the URL of a bus, such as: tidegate swarm nats://127.0.0.1:4222"),
        (["carrier-pigeon://x"], 2, "unknown scheme carrier-pigeon://: expected one of local://, nats://"),
        (
            ["redis://user:hidden@127.0.0.1:1"],
            3,
            "the bus at redis://…@127.0.0.1:1 does not respond: check that its server is running",
        ),
    ],
)
def test_the_command_explains_itself(words, code, message, capsys, monkeypatch):
    monkeypatch.delenv("TIDEGATE_BUS", raising=False)
    monkeypatch.setattr("tidegate._cli.swarm.CONNECT_TIMEOUT", 0.05)
    assert cli.main(["swarm", *words]) == code
    assert message in capsys.readouterr().err


def test_a_local_bus_is_forgotten_when_all_are_closed():
    with open_bus("local://short-lived") as bus:
        bus.publish("a.b", b"x")
        assert bus.metrics()["published"] == 1
    with open_bus("local://short-lived") as bus:
        assert bus.metrics()["retained"] == 0
