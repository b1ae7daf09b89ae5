"""Replayed signed messages: an old message has no effect as a new one."""

import json
import shutil

import pytest

from tests.servers.nats import NatsServer
from tests.servers.process import until
from tidegate import ConfigError
from tidegate._runtime.clock import ThreadSignal
from tidegate.adaptive import SUBJECT
from tidegate.bus import Retain, open_bus
from tidegate.swarm import SwarmLimiter
from tidegate.swarm._clearing import clear_reductions
from tidegate.swarm._presence import ANSWER_SUBJECT, ASK_SUBJECT, Watcher
from tidegate.testing import ManualClock

WEEK = 7 * 86_400
CLEARED = "tidegate swarm --clear"  # part of the keys of clearings
SKEW = 300  # seconds by which clocks may differ


class Recorder:
    """Somebody who hears everything on the bus, and knows no secret."""

    def __init__(self, bus, *subjects):
        self.bus = bus
        self.heard = {subject: [] for subject in subjects}
        for subject in subjects:
            bus.subscribe(subject, lambda event, subject=subject: self.heard[subject].append(event.payload))

    def replay(self, subject, **how):
        for payload in list(self.heard[subject]):
            self.bus.publish(subject, payload, **how)


@pytest.fixture
def agent(clock, hub):
    """Make agents that share a secret."""
    made = []

    def make(name, secret="shared", **options):  # noqa: S107 - of a test
        limiter = SwarmLimiter(hub(), agent_id=name, secret=secret, clock=clock, **options)
        limiter.set_capacity("api", 100, 60)
        made.append(limiter)
        return limiter

    yield make
    for limiter in made:
        limiter.close()


@pytest.fixture
def recorded(hub, agent):
    """Record what an agent announced, with a freeze of a minute."""
    recorder = Recorder(hub(), SUBJECT)
    first = agent("first")
    first.announce_reduced("api", "received 429 response", retry_after=60)
    return recorder


@pytest.mark.parametrize("late", [False, True])
def test_a_week_old_message_is_ignored_by_a_new_agent(recorded, agent, clock, late):
    clock.advance(WEEK)
    new = agent("new", recovery_interval=10**9)
    recorded.replay(SUBJECT, late=late)
    assert new.get_capacity("api").total == 100
    assert new.get_capacity("api").frozen_for == 0
    assert new.try_acquire("api")
    assert new.metrics()["expired"] == 1


def test_a_week_old_retained_message_is_ignored_by_a_new_agent(recorded, agent, clock):
    clock.advance(WEEK)
    (payload,) = recorded.heard[SUBJECT]
    recorded.bus.publish(SUBJECT, payload, Retain("key", 2**52, 3600))
    new = agent("new", recovery_interval=10**9)
    assert new.get_capacity("api").total == 100
    assert new.metrics()["expired"] == 1


def test_an_hours_old_message_counts_from_its_timestamp(recorded, agent, clock):
    """Sent again as a new one after three hours: the freeze is long over, and capacity has recovered."""
    clock.advance(3 * 3600)
    new = agent("new")
    recorded.replay(SUBJECT)
    assert new.get_capacity("api").total == 100
    assert new.get_capacity("api").frozen_for == 0


def test_a_freeze_in_force_applies_however_late_it_arrives(hub, agent, clock):
    recorder = Recorder(hub(), SUBJECT)
    agent("first").announce_reduced("api", "come back tomorrow", retry_after=7200)
    clock.advance(3600)
    new = agent("new")
    recorder.replay(SUBJECT)
    assert new.get_capacity("api").frozen_for == 3600


def test_a_replayed_message_is_stale(recorded, agent, clock):
    other = agent("other")
    clock.advance(61)
    for _ in range(3):
        recorded.replay(SUBJECT)
    assert other.get_capacity("api").frozen_for == 0
    assert other.metrics()["stale"] >= 3
    other.set_capacity("api", 0, 60)
    other.set_capacity("api", 100, 60)
    recorded.replay(SUBJECT)
    assert other.get_capacity("api").total == 100, "also where the resource was removed and set again"


def test_a_reformatted_message_is_still_a_replay(recorded, agent, clock):
    other = agent("other")
    clock.advance(61)
    before = other.metrics()["stale"]
    (payload,) = recorded.heard[SUBJECT]
    fields = json.loads(payload)
    recorded.bus.publish(SUBJECT, json.dumps(dict(reversed(fields.items())), indent=3).encode())
    assert other.metrics()["stale"] == before + 1
    assert other.get_capacity("api").frozen_for == 0


@pytest.mark.parametrize(("ahead", "total"), [(SKEW, 50), (SKEW + 1, 100)])
def test_clocks_may_differ_by_five_minutes(hub, clock, agent, ahead, total):
    """A message from a clock that is further ahead would stay new for as long as that."""
    recorder = Recorder(hub(), SUBJECT)
    clock.advance(ahead)
    agent("first").announce_reduced("api", "received 429 response")
    clock.advance(-ahead)
    new = agent("new")
    recorder.replay(SUBJECT)
    assert new.get_capacity("api").total == total


def test_a_clock_five_minutes_behind_is_accepted(hub, clock, agent):
    """Its freeze counts from its arrival, not from its timestamp."""
    new, behind = agent("new"), ManualClock(clock.now() - SKEW)
    with SwarmLimiter(hub(behind), agent_id="first", secret="shared", clock=behind) as first:  # noqa: S106 - of a test
        first.set_capacity("api", 100, 60)
        first.announce_reduced("api", "received 429 response", retry_after=12)
    assert new.get_capacity("api").frozen_for == 12


def test_without_a_secret_the_messages_of_the_specification_are_accepted(hub, clock, agent):
    """Timestamps that nobody signed say nothing; a clock may be wrong by years."""
    new = agent("new", secret=None)
    plain = {"resource": "api", "agent_id": "other", "new_capacity": 40, "reason": "429"}
    for timestamp in ("2001-01-01T00:00:00Z", "2101-01-01T00:00:00Z"):
        hub().publish(SUBJECT, json.dumps({**plain, "timestamp": timestamp}).encode())
    assert new.get_capacity("api").total == 40
    assert new.metrics()["applied"] >= 1
    assert new.metrics()["expired"] == 0


def test_replayed_requests_and_answers_of_watchers_are_ignored(hub, agent, clock):
    agent("first")
    recorder = Recorder(hub(), ASK_SUBJECT, ANSWER_SUBJECT)
    watcher = Watcher(hub(), "shared")
    watcher.ask()
    assert [found.agent_id for found in watcher.agents()] == ["first"]
    assert (len(recorder.heard[ASK_SUBJECT]), len(recorder.heard[ANSWER_SUBJECT])) == (1, 1)
    recorder.replay(ASK_SUBJECT)
    assert len(recorder.heard[ANSWER_SUBJECT]) == 1, "no answer to a question that was answered"
    clock.advance(60)
    recorder.replay(ANSWER_SUBJECT)
    assert watcher.agents() == [], "an answer of a minute ago is none"
    late = Watcher(hub(), "shared")
    clock.advance(SKEW)
    recorder.replay(ANSWER_SUBJECT)
    assert late.agents() == []


def test_swarms_with_different_secrets_use_different_retain_keys(hub, agent, clock):
    """What one retains under its name does not replace what the other retains under the same name."""
    agent("first", secret="one").announce_reduced("api", "429")  # noqa: S106 - of a test
    agent("first", secret=None).announce_reduced("api", "429")
    clock.advance(1)
    agent("first", secret="two").announce_reduced("api", "429")  # noqa: S106 - of a test
    for secret in ("one", "two"):
        assert agent("late", secret=secret).get_capacity("api").total == 50


def test_a_long_reason_is_cut_so_that_others_can_read_it(hub, agent):
    other = agent("other")
    agent("first").announce_reduced("api", "x\ud800" * 5000)
    assert other.get_capacity("api").total == 50
    assert other.metrics()["malformed"] == 0


@pytest.mark.parametrize("name", ["x" * 1025, "\ud800"])
def test_names_that_no_bus_can_carry_are_refused(hub, agent, clock, name):
    with pytest.raises(ConfigError, match="agent_id: must be a unique string"):
        SwarmLimiter(hub(), agent_id=name, clock=clock)
    with pytest.raises(ConfigError, match="resource: must be a string"):
        agent("a").set_capacity(name, 5, 60)


# ---- another namespace, and after a clearing -------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("namespace", ["", "eu"])
def test_a_message_is_refused_in_another_namespace(hub, agent, namespace, late):
    """Two swarms of one operator may have the same secret."""
    heard = f"{namespace}.{SUBJECT}".removeprefix(".")
    recorder = Recorder(hub(), heard)
    agent("first", namespace=namespace).announce_reduced("api", "received 429 response", retry_after=60)
    other = agent("other", namespace="us")
    for payload in recorder.heard[heard]:
        recorder.bus.publish(f"us.{SUBJECT}", payload, late=late)
    assert other.get_capacity("api").total == 100
    assert other.try_acquire("api")
    assert other.metrics()["malformed"] == 1


def test_answers_and_questions_are_refused_on_another_subject(hub, agent):
    recorder = Recorder(hub(), ASK_SUBJECT, ANSWER_SUBJECT, f"us.{ANSWER_SUBJECT}")
    agent("first")
    agent("other", namespace="us")
    Watcher(hub(), "shared").ask()
    watcher = Watcher(hub(), "shared", "us")
    for payload in recorder.heard[ASK_SUBJECT]:
        recorder.bus.publish(f"us.{ASK_SUBJECT}", payload)
    assert not recorder.heard[f"us.{ANSWER_SUBJECT}"]
    for payload in recorder.heard[ANSWER_SUBJECT]:
        recorder.bus.publish(f"us.{ANSWER_SUBJECT}", payload)
    assert watcher.malformed == 1
    assert not watcher.agents()


@pytest.mark.parametrize("cleared", ["api", None])
@pytest.mark.parametrize("late", [False, True])
def test_a_message_from_before_a_clearing_is_refused_by_new_agents(recorded, agent, hub, clock, cleared, late):
    clock.advance(1)
    assert clear_reductions(hub(), cleared, "shared") == {"api": 1}
    new = agent("new")
    later = SwarmLimiter(hub(), agent_id="later", secret="shared", clock=clock)  # noqa: S106 - of a test
    recorded.replay(SUBJECT, late=late)
    later.set_capacity("api", 100, 60)  # configured after the message
    for limiter in (new, later):
        assert limiter.get_capacity("api").total == 100
        assert limiter.get_capacity("api").frozen_for == 0
    later.close()


def test_clearing_all_covers_resources_without_a_retained_message(hub, agent, clock):
    recorder = Recorder(hub(), SUBJECT)
    agent("first").announce_reduced("api", "received 429 response", retry_after=60)
    recorded, recorder.heard[SUBJECT] = recorder.heard[SUBJECT], []
    clock.advance(1)
    clear_reductions(hub(), "api", "shared")
    clear_reductions(hub(), None, "shared")
    new = agent("new")
    for payload in recorded:
        recorder.bus.publish(SUBJECT, payload)
    assert new.get_capacity("api").total == 100


def test_a_reduction_after_a_clearing_counts(recorded, agent, hub, clock):
    clear_reductions(hub(), None, "shared")  # at the same instant as the reduction
    new = agent("new")
    new.announce_reduced("api", "received 429 response")
    assert new.get_capacity("api").total == 50
    assert agent("newer").get_capacity("api").total == 50


def test_agents_publish_a_clearing_again_that_the_server_lost():
    with (
        NatsServer() as server,
        open_bus(server.url) as bus,
        SwarmLimiter(bus, agent_id="running", secret="shared") as running,  # noqa: S106 - of a test
    ):
        assert bus.wait(20)
        running.set_capacity("api", 100, 60)
        recorder = Recorder(bus, SUBJECT)
        running.announce_reduced("api", "received 429 response", retry_after=600)
        until(lambda: recorder.heard[SUBJECT], "the reduction")
        recorded = recorder.heard[SUBJECT][0]
        with open_bus(server.url) as operator:
            assert operator.wait(20)
            clear_reductions(operator, None, "shared")
        until(lambda: running.metrics()["cleared"], "the clearing")
        server.kill()
        shutil.rmtree(server.folder / "store")
        server.start()
        assert bus.wait(20)
        until(lambda: any(CLEARED in key for key in retained(server)), "the clearing in the new server")
        with open_bus(server.url) as other, SwarmLimiter(other, agent_id="new", secret="shared") as new:  # noqa: S106 - as above
            assert other.wait(20)
            new.set_capacity("api", 100, 60)
            until(lambda: new.metrics()["cleared"] + new.metrics()["unknown"], "the retained clearing")
            other.publish(SUBJECT, recorded)
            until(lambda: new.metrics()["stale"], "the replayed message")
            assert new.get_capacity("api").total == 100


def retained(server):
    """Return the keys of the messages that a server retains for the swarm."""
    keys, synced = [], ThreadSignal()
    with open_bus(server.url) as bus:
        bus.subscribe(SUBJECT, lambda _event: None, lambda found: (keys.extend(found), synced.set()))
        assert synced.wait(20)
    return keys
