"""An announcement is sent before the process ends, even if the program closes nothing."""

import itertools
import subprocess
import sys
import time

import pytest

from tests.servers.nats import NatsServer
from tests.servers.process import free_port, until
from tests.servers.valkey import ValkeyServer
from tidegate.swarm import SwarmLimiter

numbers = itertools.count()
THREADS = """
from tidegate.swarm import SwarmLimiter

limiter = SwarmLimiter({url!r}, agent_id="short-lived")
limiter.set_capacity({resource!r}, 100, 60)
{wait}limiter.wait_until_synced(20)
limiter.announce_reduced({resource!r}, "received 429 response", retry_after=3600)
"""
TASKS = """
import asyncio
from tidegate.swarm import AsyncSwarmLimiter

async def main():
    limiter = AsyncSwarmLimiter({url!r}, agent_id="short-lived")
    await limiter.set_capacity({resource!r}, 100, 60)
    {wait}await limiter.wait_until_synced(20)
    await limiter.announce_reduced({resource!r}, "received 429 response", retry_after=3600)

asyncio.run(main())
"""
RAISING = (
    THREADS
    + """
raise SystemExit(3)
"""
)


def run(program, url, resource="api", *, connected=True):
    text = program.format(url=url, resource=resource, wait="" if connected else "#")
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module", params=[NatsServer, ValkeyServer])
def server(request):
    with request.param() as server:
        yield server


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "connecting"])
@pytest.mark.parametrize("program", [THREADS, TASKS, RAISING], ids=["threads", "tasks", "exit"])
def test_an_announcement_is_sent_before_the_process_ends(server, program, connected):
    """Agents that are there receive it, and agents that join later."""
    resource = f"api-{next(numbers)}"
    with SwarmLimiter(server.url, agent_id="long-lived") as agent:
        agent.set_capacity(resource, 100, 60)
        assert agent.wait_until_synced(20)
        done = run(program, server.url, resource, connected=connected)
        assert (done.returncode, done.stderr) == (3 if program is RAISING else 0, "")
        until(lambda: agent.get_capacity(resource).frozen_for > 3000, "the announcement")
    with SwarmLimiter(server.url, agent_id="joins later") as later:
        later.set_capacity(resource, 100, 60)
        assert later.wait_until_synced(20)
        assert later.get_capacity(resource).frozen_for > 3000


def test_the_end_of_a_process_is_delayed_only_for_a_bounded_time():
    """Nobody answers at this address."""
    started = time.monotonic()
    done = run(THREADS, f"nats://127.0.0.1:{free_port()}", connected=False)
    assert done.returncode == 0
    assert time.monotonic() - started < 30
