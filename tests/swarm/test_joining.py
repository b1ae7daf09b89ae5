"""An agent that joins a swarm does not spend its full capacity before it has read the reductions in effect."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.servers.nats import NatsServer
from tests.servers.process import free_port
from tests.servers.valkey import ValkeyServer
from tidegate import Closed, Denied
from tidegate.bus import open_bus
from tidegate.bus._local import LocalBus
from tidegate.swarm import AsyncSwarmLimiter, MemoryLimiter, SwarmLimiter


class SlowBus(LocalBus):
    """Delivers retained messages only when told to, as a server that answers slowly."""

    def __init__(self, name, clock):
        super().__init__(name, clock)
        self.joining = []

    def subscribe(self, subject, handler, synced=None):
        if synced is None:
            return super().subscribe(subject, handler)
        self.joining.append((subject, handler, synced))
        return super().subscribe("unused", handler)

    def answer(self):
        for joining in self.joining:
            super().subscribe(*joining)


@pytest.fixture
def slow(clock, hub):
    return SlowBus(hub().name, clock)


@pytest.fixture
def joining(slow, clock):
    with SwarmLimiter(slow, agent_id="joining", clock=clock) as limiter:
        limiter.set_capacity("api", 100, 60)
        yield limiter


@pytest.fixture
def known(hub, clock):
    with SwarmLimiter(hub(), agent_id="known", clock=clock) as limiter:
        limiter.set_capacity("api", 100, 60)
        yield limiter


@pytest.fixture(params=[NatsServer, ValkeyServer])
def frozen_swarm(request):
    """Give the URL of a bus on which an agent stopped all calls for an hour."""
    with request.param() as server:
        with SwarmLimiter(server.url, agent_id="known") as known:
            known.set_capacity("api", 100, 60)
            assert known.wait_until_synced(20)
            known.announce_reduced("api", "received 429 response", retry_after=3600)
        yield server.url


def test_acquire_waits_until_a_freeze_of_the_swarm_is_known(frozen_swarm):
    with SwarmLimiter(frozen_swarm, agent_id="joining") as joining, ThreadPoolExecutor() as threads:
        joining.set_capacity("api", 100, 60)
        call = threads.submit(joining.acquire, "api")
        assert joining.wait_until_synced(20)
        assert joining.get_capacity("api").frozen_for > 3000
        joining.close()
        with pytest.raises(Closed):
            call.result()


def test_tasks_wait_until_a_freeze_of_the_swarm_is_known(frozen_swarm):
    async def join():
        async with AsyncSwarmLimiter(frozen_swarm, agent_id="joining") as joining:
            await joining.set_capacity("api", 100, 60)
            call = asyncio.create_task(joining.acquire("api"))
            assert await joining.wait_until_synced(20)
            assert (await joining.get_capacity("api")).frozen_for > 3000
            await joining.close()
            with pytest.raises(Closed):
                await call

    asyncio.run(join())


def test_try_acquire_answers_from_a_reduced_share_until_the_bus_was_read(joining, slow):
    assert sum(joining.try_acquire("api") for _ in range(100)) == 50
    slow.answer()
    assert joining.wait_until_synced()
    assert sum(joining.try_acquire("api") for _ in range(100)) == 50, "without reductions, nothing is lost"


def test_permits_granted_before_the_bus_was_read_count_against_a_reduction(known, joining, slow):
    known.announce_reduced("api", "received 429 response")
    assert sum(joining.try_acquire("api") for _ in range(30)) == 30
    slow.answer()
    assert sum(joining.try_acquire("api") for _ in range(100)) == 20, "50 in all, as if it had known"


def test_a_reservation_without_a_timeout_is_bounded_by_the_share(joining):
    joining.reserve("api", cost=40)
    with pytest.raises(Denied) as caught:
        joining.reserve("api", cost=40)
    assert 0 < caught.value.decision.retry_after <= 5
    joining.reserve("api", cost=10)


def test_a_denied_call_uses_nothing_of_the_share(joining):
    assert not joining.try_acquire("api", cost=101)
    assert sum(joining.try_acquire("api") for _ in range(100)) == 50


def test_the_share_ends_after_the_timeout(joining, clock):
    assert sum(joining.try_acquire("api") for _ in range(100)) == 50
    clock.advance(5)
    assert sum(joining.try_acquire("api") for _ in range(100)) > 50


def test_wait_until_synced_waits_for_the_bus(joining, slow):
    assert joining.wait_until_synced(timeout=0) is False
    threading.Timer(0.01, slow.answer).start()
    assert joining.wait_until_synced() is True


def test_wait_until_synced_ends_when_the_limiter_is_closed(slow, clock):
    limiter = SwarmLimiter(slow, agent_id="joining", clock=clock)
    threading.Timer(0.01, limiter.close).start()
    with pytest.raises(Closed):
        limiter.wait_until_synced()


def test_a_limiter_without_a_bus_is_synced(clock):
    with MemoryLimiter(clock=clock) as limiter:
        assert limiter.wait_until_synced(0) is True


def test_an_agent_whose_bus_is_down_starts_after_the_timeout_and_says_so(caplog):
    url = f"nats://127.0.0.1:{free_port()}"
    with open_bus(url) as bus, SwarmLimiter(bus, agent_id="alone", sync_timeout=0.2) as limiter:
        limiter.set_capacity("api", 10, 3600)
        assert sum(limiter.try_acquire("api") for _ in range(10)) == 5
        for _ in range(5):
            limiter.acquire("api", timeout=10)
    lines = [r.getMessage() for r in caplog.records if r.name == "tidegate.swarm"]
    assert lines == ["the bus did not send its state within 0.2 s: this agent starts with its full capacity"]
