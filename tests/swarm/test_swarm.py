"""SwarmLimiter on a bus of this process, in virtual time: one reduces, all follow, all recover."""

import asyncio
import json
import logging
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tests.swarm.conftest import START
from tests.swarm.test_capacity import TIMELINE
from tidegate import Closed, ConfigError, Denied
from tidegate.adaptive import SUBJECT
from tidegate.bus import open_bus
from tidegate.swarm import AsyncSwarmLimiter, Capacity, SwarmLimiter
from tidegate.testing import ManualClock


@pytest.fixture
def agents(face, clock, hub):
    """Makes agents of one swarm."""
    made = []

    def make(count=2, resource=("api", 100, 60), **options):
        options = {"clock": clock, **options}
        for _ in range(count):
            made.append(face.swarm(bus=hub(options["clock"]), agent_id=f"agent-{len(made)}", **options))
            if resource:
                face.run(made[-1].set_capacity(*resource))
        return made[-count:]

    yield make
    for limiter in made:
        try:
            face.run(limiter.close())
        except Closed:
            continue


def totals(face, limiters, resource="api"):
    return [face.run(limiter.get_capacity(resource)).total for limiter in limiters]


def plain(**fields):
    """A message as an agent of another language sends it: the document's five fields."""
    message = {
        "resource": "api",
        "agent_id": "gopher",
        "new_capacity": 40,
        "reason": "429",
        "timestamp": "2024-10-04T00:00:00Z",
    }
    return json.dumps({**message, **fields}).encode()


def test_all_agents_reduce_and_recover_as_specified(face, agents, clock):
    swarm = agents(3)
    update = face.run(swarm[0].announce_reduced("api", "received 429 response"))
    assert (update.resource, update.agent_id, update.new_capacity, update.reason) == (
        "api",
        "agent-0",
        50,
        "received 429 response",
    )
    assert update.timestamp == datetime.fromtimestamp(START, UTC)
    assert totals(face, swarm) == [50] * 3
    seen = []
    for _ in range(10):
        clock.advance(29.999_999)
        before = totals(face, swarm)
        clock.advance(0.000_001)
        seen.append((before, totals(face, swarm)))
    assert seen == [([a] * 3, [b] * 3) for a, b in zip([*TIMELINE, 100], [*TIMELINE[1:], 100, 100], strict=True)]


def test_available_permits_are_capped_and_refill_gradually(face, agents, clock):
    first, second = agents(2, ("api", 100, 1000))
    face.run(second.try_acquire("api", cost=20))
    face.run(first.announce_reduced("api", "429"))
    assert face.run(first.get_capacity("api")) == Capacity("api", 50, 50, 1000.0, 0)
    assert face.run(second.get_capacity("api")) == Capacity("api", 50, 50, 1000.0, 1)
    clock.advance(30)
    assert face.run(first.get_capacity("api")) == Capacity("api", 50, 55, 1000.0, 0)


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=12))
def test_reading_the_capacity_does_not_change_it(steps):
    """A bucket nobody looks at while it recovers has, in the end, what one has that is looked at all the time."""
    clock = ManualClock(START)
    with open_bus("local://looks", clock=clock) as bus:
        watched, left_alone = (SwarmLimiter(bus, agent_id=name, clock=clock) for name in "ab")
        for limiter in (watched, left_alone):
            limiter.set_capacity("api", 100, 100)
            limiter.try_acquire("api", cost=90)
        watched.announce_reduced("api", "429", retry_after=3)
        for step in steps:
            clock.advance(step / 1000)
            watched.get_capacity("api")
        assert watched.get_capacity("api") == left_alone.get_capacity("api")
        for limiter in (watched, left_alone):
            limiter.close()


def test_the_message_on_the_bus(face, agents, hub):
    (limiter,) = agents(1)
    heard = []
    hub().subscribe(SUBJECT, heard.append)
    face.run(limiter.announce_reduced("api", "received 429 response", retry_after=12))
    fields = json.loads(heard[0].payload)
    assert SUBJECT == "ratelimit.capacity"
    assert fields == {
        "resource": "api",
        "agent_id": "agent-0",
        "new_capacity": 50,
        "reason": "received 429 response",
        "timestamp": "2024-10-04T00:00:00.000000Z",
        "epoch": START * 1_000_000,
        "retry_after": 12,
        "refused_at": 100,
        "recovers_after": 252.0,
        "original": 100,
        "window": 60.0,
        "factor": 0.5,
    }


def test_messages_of_other_implementations_are_accepted(face, agents, hub, clock):
    (limiter,) = agents(1)
    seen = []
    face.run(limiter.on_capacity_change(seen.append))
    hub().publish(SUBJECT, plain())
    assert totals(face, [limiter]) == [40]
    assert [(update.agent_id, update.new_capacity) for update in seen] == [("gopher", 40)]
    clock.advance(30)
    assert totals(face, [limiter]) == [44]
    hub().publish(SUBJECT, plain())
    assert totals(face, [limiter]) == [44], "the same message again undoes nothing"
    hub().publish(SUBJECT, plain(timestamp="2024-10-04T00:00:31Z"))
    assert totals(face, [limiter]) == [40], "a new one counts"


@cases(
    ("message", "counted"),
    [
        (plain(agent_id="agent-0", new_capacity=10), "own"),
        (plain(new_capacity=101), "above"),
        (plain(resource="other"), "unknown"),
        (plain(new_capacity=0), "malformed"),
        (plain(new_capacity="50"), "malformed"),
        (b"hello", "malformed"),
        (b"\xff" * 100_000, "malformed"),
    ],
)
def test_messages_that_are_ignored_are_counted(face, agents, hub, message, counted):
    (limiter,) = agents(1)
    seen = []
    face.run(limiter.on_capacity_change(seen.append))
    hub().publish(SUBJECT, message)
    assert totals(face, [limiter]) == [100]
    assert seen == []
    counts = {name: count for name, count in limiter.metrics().items() if count}
    assert counts == {counted: 1}


def test_reductions_of_several_agents_compound(face, agents):
    swarm = agents(2)
    for number, total in enumerate([50, 25, 12, 6, 3, 1, 1]):
        face.run(swarm[number % 2].announce_reduced("api", "429"))
        assert totals(face, swarm) == [total, total]


def test_within_a_cooldown_a_duplicate_does_not_reduce(face, agents, clock):
    swarm = agents(2, cooldown=5)
    face.run(swarm[0].announce_reduced("api", "429"))
    assert face.run(swarm[1].announce_reduced("api", "429")) is None
    assert totals(face, swarm) == [50, 50]
    clock.advance(5)
    face.run(swarm[1].announce_reduced("api", "429"))
    assert totals(face, swarm) == [25, 25]


def test_custom_factors(face, agents, clock):
    swarm = agents(2, reduce_factor=0.1, recovery_interval=timedelta(seconds=1), recovery_factor=3.0)
    face.run(swarm[0].announce_reduced("api", "429"))
    seen = [totals(face, swarm)[1]]
    for _ in range(4):
        clock.advance(1)
        seen.append(totals(face, swarm)[1])
    assert seen == [10, 30, 90, 100, 100]


def test_max_recovery_off_lets_the_last_step_go_past_the_original(face, agents, clock):
    swarm = agents(2, max_recovery=False)
    face.run(swarm[0].announce_reduced("api", "429"))
    clock.advance(240)
    assert totals(face, swarm) == [103, 103]
    clock.advance(300)
    assert totals(face, swarm) == [103, 103]


def test_a_retry_after_freezes_all_agents(face, agents, clock):
    swarm = agents(3)
    face.run(swarm[0].announce_reduced("api", "429", retry_after=12))
    for limiter in swarm:
        assert face.run(limiter.try_acquire("api")) is False
        assert face.run(limiter.get_capacity("api")).frozen_for == 12
    face.run(swarm[2].acquire("api"))
    assert clock.now() == START + 12
    assert face.run(swarm[1].try_acquire("api")) is True
    clock.advance(29.999_999)
    assert totals(face, swarm) == [50] * 3
    clock.advance(0.000_001)
    assert totals(face, swarm) == [55] * 3, "recovery begins where the freeze ends"


def test_waiters_notice_a_recovery(face, agents, clock):
    """At a tenth the rate a permit would take 100 s; recovered after 30 s, it takes less."""
    (limiter,) = agents(1, ("api", 10, 100), reduce_factor=0.1, recovery_factor=10)
    face.run(limiter.announce_reduced("api", "429"))
    face.run(limiter.acquire("api"))
    face.run(limiter.acquire("api"))
    assert clock.now() == START + 30 + 7, "30 s at 1 per 100 s, then 0.7 of a permit at 10 per 100 s"


def test_a_cost_that_fits_again_after_recovery_waits_for_it(face, agents, clock):
    (limiter,) = agents(1, ("tokens", 1000, 100))
    face.run(limiter.announce_reduced("tokens", "429"))
    assert face.run(limiter.try_acquire("tokens", cost=600)) is False
    with pytest.raises(Denied) as denied:
        face.run(limiter.acquire("tokens", cost=1001))
    assert denied.value.decision.retry_after is None, "that will never fit"
    with pytest.raises(Denied) as denied:
        face.run(limiter.acquire("tokens", cost=600, timeout=10))
    assert denied.value.decision.retry_after == 20
    reservation = face.run(limiter.reserve("tokens", cost=600, timeout=None))
    assert 68 < clock.now() - START < 69, "after two steps it holds 605; then 50 more have to come in"
    face.run(reservation.cancel())


def test_a_late_joiner_receives_the_reductions_in_force(face, agents, clock):
    swarm = agents(1)
    face.run(swarm[0].announce_reduced("api", "429"))
    clock.advance(60)
    swarm += agents(1)
    assert totals(face, swarm) == [60, 60]
    swarm += agents(1, resource=None)
    clock.advance(30)
    face.run(swarm[2].set_capacity("api", 100, 60))
    assert totals(face, swarm) == [66, 66, 66]
    clock.advance(150)
    swarm += agents(1)
    assert totals(face, swarm) == [100] * 4


def test_a_restarted_agent_receives_its_own_reductions(face, hub, clock):
    totals_seen = []
    for _ in range(2):
        limiter = face.swarm(bus=hub(), agent_id="phoenix", clock=clock)
        face.run(limiter.set_capacity("api", 100, 60))
        totals_seen += totals(face, [limiter])
        face.run(limiter.announce_reduced("api", "429"))
        totals_seen += totals(face, [limiter])
        face.run(limiter.close())
    assert totals_seen == [100, 50, 50, 25]


def test_setting_the_capacity_ends_a_reduction_for_good(face, agents, hub):
    swarm = agents(2)
    heard = []
    hub().subscribe(SUBJECT, heard.append)
    face.run(swarm[0].announce_reduced("api", "429"))
    face.run(swarm[1].set_capacity("api", 80, 60))
    assert totals(face, swarm) == [50, 80]
    hub().publish(SUBJECT, heard[0].payload)
    assert totals(face, swarm) == [50, 80], "a stale message does not bring it back"
    face.run(swarm[0].announce_reduced("api", "429"))
    assert totals(face, swarm) == [25, 20], "a quarter of each"


def test_a_wrong_clock_has_no_advantage(face, agents):
    """The agent whose clock is an hour behind is heard; the one an hour ahead does not silence the others."""
    slow, fast, right = (agents(1, clock=ManualClock(START + shift))[0] for shift in (-3600, 3600, 0))
    swarm = [slow, fast, right]
    for announcer, total in ((fast, 50), (slow, 25), (right, 12)):
        face.run(announcer.announce_reduced("api", "429"))
        assert totals(face, swarm) == [total] * 3


def test_signed_messages(face, agents, hub):
    swarm = agents(2, secret=b"shared")
    stranger, guesser = agents(1)[0], agents(1, secret=b"guessed")[0]
    for outsider in (stranger, guesser):
        face.run(outsider.announce_reduced("api", "let them be slow"))
    hub().publish(SUBJECT, plain())
    assert totals(face, swarm) == [100, 100]
    assert [limiter.metrics()["malformed"] for limiter in swarm] == [3, 3]
    face.run(swarm[0].announce_reduced("api", "429"))
    assert totals(face, swarm) == [50, 50]


def test_an_exception_in_a_callback_is_logged(face, agents, caplog):
    first, second = agents(2)
    seen = []

    def fail(update):
        raise RuntimeError(update.reason)

    face.run(second.on_capacity_change(fail))
    face.run(second.on_capacity_change(seen.append))
    with caplog.at_level(logging.ERROR):
        face.run(first.announce_reduced("api", "on purpose"))
    assert "a callback of on_capacity_change failed" in caplog.text
    assert [update.reason for update in seen] == ["on purpose"]
    assert totals(face, [second]) == [50]


def test_closed_agents_receive_nothing_and_the_bus_stays_open(face, hub, clock):
    bus = hub()
    limiter = face.swarm(bus=bus, agent_id="a", clock=clock)
    face.run(limiter.close())
    with pytest.raises(Closed):
        face.run(limiter.close())
    assert bus.connected
    bus.publish(SUBJECT, plain())
    assert limiter.metrics()["unknown"] == 0


def test_a_bus_may_be_closed_before_its_agents(face, hub, clock):
    bus = hub()
    limiter = face.swarm(bus=bus, agent_id="a", clock=clock)
    face.run(limiter.set_capacity("api", 100, 60))
    bus.close()
    face.run(limiter.announce_reduced("api", "429"))
    assert totals(face, [limiter]) == [50]
    face.run(limiter.close())


def test_a_bus_given_as_url_is_closed_with_the_limiter(face, monkeypatch):
    opened = []

    def open_one(*arguments, **options):
        opened.append(open_bus(*arguments, **options))
        return opened[-1]

    monkeypatch.setattr("tidegate.swarm._resources.open_bus", open_one)
    limiter = face.swarm(bus="local://by-url", agent_id="a")
    (bus,) = opened
    assert bus.connected
    face.run(limiter.close())
    assert not bus.connected


@cases(
    ("options", "field"),
    [
        ({}, "bus"),
        ({"agent_id": "a"}, "bus"),
        ({"bus": None, "agent_id": "a"}, "bus"),
        ({"bus": object(), "agent_id": "a"}, "bus"),
        ({"bus": "local://x", "agent_id": ""}, "agent_id"),
        ({"bus": "local://x", "agent_id": 7}, "agent_id"),
        ({"bus": "ftp://x", "agent_id": "a"}, "bus"),
        ({"bus": "local://x", "agent_id": "a", "reduce_factor": 2}, "reduce_factor"),
        ({"bus": "local://x", "agent_id": "a", "recovery_interval": 0}, "recovery_interval"),
        ({"bus": "local://x", "agent_id": "a", "secret": ""}, "secret"),
        ({"bus": "local://x", "agent_id": "a", "lease": True}, "lease"),
    ],
)
def test_invalid_configuration_is_refused(face, options, field):
    with pytest.raises(ConfigError) as refused:
        face.swarm(**options)
    assert refused.value.field == field


def test_an_absurd_retry_after_is_refused(face, agents):
    (limiter,) = agents(1)
    for wrong in (-1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="retry_after: must be a non-negative number of seconds"):
            face.run(limiter.announce_reduced("api", "429", retry_after=wrong))
    assert totals(face, [limiter]) == [100]


def test_two_agents_on_one_bus(face, hub, clock):
    bus = hub()
    pair = [face.swarm(bus=bus, agent_id=name, clock=clock) for name in "ab"]
    for limiter in pair:
        face.run(limiter.set_capacity("api", 10, 60))
    face.run(pair[0].announce_reduced("api", "429"))
    assert totals(face, pair) == [5, 5]
    assert pair[1].metrics()["applied"] == 1
    for limiter in pair:
        face.run(limiter.close())


async def test_async_callbacks_may_be_coroutines(clock, hub):
    limiter, other = (AsyncSwarmLimiter(bus=hub(), agent_id=name, clock=clock) for name in "ab")
    seen = []

    async def receive(update):
        await asyncio.sleep(0)
        seen.append(update.new_capacity)

    limiter.on_capacity_change(receive)
    for agent in (limiter, other):
        await agent.set_capacity("api", 10, 60)
    await other.announce_reduced("api", "429")
    for _ in range(5):
        await asyncio.sleep(0)
    assert seen == [5]
    for agent in (limiter, other):
        await agent.close()


async def test_async_callbacks_run_in_their_loop(clock, hub):
    """The update comes on another thread, as from a server."""
    limiter, loops = AsyncSwarmLimiter(bus=hub(), agent_id="a", clock=clock), []
    limiter.on_capacity_change(lambda update: loops.append(asyncio.get_running_loop()))
    await limiter.set_capacity("api", 100, 60)
    await asyncio.to_thread(hub().publish, SUBJECT, plain())
    for _ in range(100):
        if loops:
            break
        await asyncio.sleep(0.01)
    assert loops == [asyncio.get_running_loop()]
    assert (await limiter.get_capacity("api")).total == 40
    await limiter.close()


def test_a_deadline_passes_while_frozen(clock, hub):
    with SwarmLimiter(hub(), agent_id="a", clock=clock) as limiter:
        limiter.set_capacity("api", 10, 60)
        limiter.announce_reduced("api", retry_after=3600)
        with pytest.raises(Denied):
            limiter.acquire("api", timeout=10)
        assert clock.now() == START + 10


def test_the_same_capacity_again_changes_nothing(face, agents, hub, clock):
    """A program may set its capacities again, for example after reading its configuration again."""
    swarm = agents(2)
    heard = []
    face.run(swarm[1].announce_reduced("api", "429", retry_after=12))
    hub().subscribe("ratelimit.capacity", lambda event: None if event.late else heard.append(event))
    face.run(swarm[0].set_capacity("api", 100, timedelta(minutes=1)))
    capacity = face.run(swarm[0].get_capacity("api"))
    assert (capacity.total, capacity.frozen_for) == (50, 12)
    clock.advance(12)
    assert face.run(swarm[0].try_acquire("api", cost=50))
    face.run(swarm[0].set_capacity("api", 100, "1m"))
    assert face.run(swarm[0].get_capacity("api")).available == 0
    assert heard == []
    face.run(swarm[0].set_capacity("api", 101, "1m"))
    assert totals(face, swarm) == [101, 50], "another value ends the reduction, as documented"


@pytest.mark.parametrize(
    "retry_after", ["12", " 12 ", b"12", "Fri, 04 Oct 2024 00:00:12 GMT", "Fri Oct  4 00:00:12 2024", 12.0]
)
def test_a_retry_after_may_be_the_text_of_the_header(face, agents, retry_after):
    swarm = agents(2)
    face.run(swarm[0].announce_reduced("api", "429", retry_after=retry_after))
    assert [face.run(agent.get_capacity("api")).frozen_for for agent in swarm] == [12.0, 12.0]


@pytest.mark.parametrize("wrong", ["soon", "", "-1", "12s", True, [12], timedelta(-1)])
def test_other_text_than_that_of_the_header_is_refused(face, agents, wrong):
    (limiter,) = agents(1)
    expected = "retry_after: must be a non-negative number of seconds, a timedelta, or a Retry-After field such as '12'"
    with pytest.raises(ConfigError, match=expected):
        face.run(limiter.announce_reduced("api", "429", retry_after=wrong))
    assert totals(face, [limiter]) == [100]
