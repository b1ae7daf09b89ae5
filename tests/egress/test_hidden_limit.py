"""Short form of bench/egress_proof.py: a provider with a hidden limit refuses nothing, even if gateways are killed."""

import asyncio
import json
import socket
import subprocess
import sys
from contextlib import contextmanager

import aiohttp
import pytest

from tests.egress.harness import settled_by
from tests.outbound.server import QuotaServer, as_json
from tests.recipes import bodies
from tests.servers.process import free_port, until
from tests.servers.valkey import ValkeyServer

LIMIT, PERIOD = 30, 3
KILLED_PERIOD = 6  # a killed process is covered by a two-hundredth of the period: 30 ms from the permit to the arrival
DAY = 10**9  # a quota that is never used up: what is left of it tells what was settled
CALL = {"model": "gpt-4o-mini", "max_tokens": 500, "messages": [{"role": "user", "content": "Hello"}]}


class GatewayProcess:
    """A gateway that can be killed and started again."""

    def __init__(self, folder, upstream, store, period=PERIOD):
        self.port = free_port()
        self._folder = folder
        self.process = None
        counted = [f"{DAY}/1d fixed_window unit={unit} name=day_{unit}" for unit in ("requests", "tokens")]
        provider = {
            "domain": "127.0.0.1",
            "name": "up",
            "profile": "openai",
            "limits": [f"{LIMIT}/{period}s", *counted],
        }
        (folder / "up.yaml").write_text(json.dumps(provider))
        settings = {"store": store, "providers": ["up.yaml"], "upstreams": {"up": upstream.url}, "timeout": "2m"}
        (folder / "egress.yaml").write_text(json.dumps({**settings, "allow_private": ["127.0.0.1"]}))

    def start(self):
        command = [sys.executable, "-m", "tidegate", "egress", "egress.yaml", "--listen", f"127.0.0.1:{self.port}"]
        self.process = subprocess.Popen(command, cwd=self._folder, stdout=subprocess.DEVNULL)
        until(self._listens, "the gateway", 60)

    def _listens(self):
        with socket.create_connection(("127.0.0.1", self.port), 1):
            return True

    def kill(self):
        self.process.kill()
        self.process.wait()


@contextmanager
def gateways(folder, upstream, store, count, period=PERIOD):
    found = [GatewayProcess(folder, upstream, store, period) for _ in range(count)]
    try:
        for each in found:
            each.start()
        yield found
    finally:
        for each in found:
            if each.process is not None:
                each.kill()


async def send(ports, calls, connections=40):
    """Send calls until so many were answered with 200; a gateway that is killed is asked again."""
    answered = []

    async def worker(session, number):
        while len(answered) < calls:
            try:
                url = f"http://127.0.0.1:{ports[number % len(ports)]}/up/v1/chat/completions"
                async with session.post(url, json=CALL) as response:
                    await response.read()
                    if response.status == 200:
                        answered.append(1)
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(worker(session, number) for number in range(connections)))
    return len(answered)


def provider(period=PERIOD):
    return QuotaServer(LIMIT, period, respond=lambda _request: as_json(bodies.chat(CALL)))


def counted_by(upstream):
    calls = len(upstream.requests)
    return {"requests": calls, "tokens": calls * bodies.CHAT_USAGE["total_tokens"]}


async def settled(gateway):
    return await settled_by(f"http://127.0.0.1:{gateway.port}", "/up/v1/chat/completions", CALL, DAY)


async def test_a_gateway_that_is_killed_exceeds_nothing(tmp_path):
    period = KILLED_PERIOD
    with provider(period) as upstream, gateways(tmp_path, upstream, "sqlite:///quota.db", 1, period) as (gateway,):
        running = asyncio.create_task(send([gateway.port], 2 * LIMIT, connections=4))
        while len(upstream.requests) < LIMIT:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(gateway.kill)
        await asyncio.to_thread(gateway.start)
        assert await running >= 2 * LIMIT
        assert upstream.statuses[429] == 0
        assert upstream.most_within(period) <= LIMIT
        found, counted = await settled(gateway), counted_by(upstream)
        assert all(found[unit] >= counted[unit] for unit in counted)  # calls that were not settled keep their estimate


@pytest.mark.slow
async def test_two_gateways_on_one_server_share_the_quota(tmp_path):
    with ValkeyServer() as store, provider() as upstream:
        with gateways(tmp_path, upstream, f"{store.url}?timeout=5", 2) as found:
            assert await send([each.port for each in found], 2 * LIMIT) >= 2 * LIMIT
            async with asyncio.timeout(20):  # a client has its response before the store has settled its call
                while not await settled(found[0]) == await settled(found[1]) == counted_by(upstream):
                    await asyncio.sleep(0.01)
        assert upstream.statuses[429] == 0
        assert upstream.most_within(PERIOD) <= LIMIT
