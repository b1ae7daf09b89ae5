"""Clients that disconnect while they wait for a permit leave the wait queue and do not delay other calls."""

import asyncio
import json
import socket
from contextlib import ExitStack, suppress

import pytest

from tests.cases import cases
from tests.servers.process import until
from tests.service.harness import serving
from tidegate.service.client._client import AsyncClient

pytestmark = pytest.mark.once

RULES = "max_concurrency: 64\npolicies: {slow: 1/1h fixed_window, steady: 1/2s fixed_window, api: 1000/1m}\n"


@pytest.fixture(params=["memory", "valkey"])
def service(request, tmp_path):
    store = "memory://"
    if request.param == "valkey":
        store = f"{request.getfixturevalue('shared_valkey').url}?deadline=20s&prefix=abandoned"
    with serving(tmp_path, f"store: {store}\n{RULES}") as running:
        yield running


def waiting(service):
    (line,) = (line for line in service.get("/metrics").text.splitlines() if line.startswith("tidegate_waiting "))
    return int(line.split()[1])


def request(verb, key, body):
    """Write a request that waits, as any HTTP client would."""
    result = json.dumps({**body, "timeout": 25}).encode()
    named = f"Idempotency-Key: {key}\r\n" if key else ""
    head = f"POST /v1/{verb} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{named}"
    return f"{head}Content-Length: {len(result)}\r\n\r\n".encode() + result


@cases("keyed", [True, False])
@cases("verb", ["acquire", "reserve"])
def test_many_abandoned_waits_do_not_make_the_service_busy(service, verb, keyed):
    ask = {"policy": "slow", "key": f"{verb} {keyed}"}
    service.post("acquire", ask)
    for number in range(0, 160, 40):  # more in all than may be under way
        with ExitStack() as stack:
            for each in range(number, number + 40):
                caller = stack.enter_context(socket.create_connection(("127.0.0.1", service.port)))
                caller.sendall(request(verb, f"{verb} {each}" if keyed else None, ask))
            until(lambda: waiting(service) == 40, "calls that wait")
        until(lambda: waiting(service) == 0, "the end of their waits")
    assert service.post("acquire", {"policy": "api", "key": "k"}).json()["allowed"]


async def test_cancelled_waits_do_not_delay_other_calls(service):
    async with AsyncClient(service.url) as client:
        while await client.try_acquire("steady", "k"):
            pass
        abandoned = [asyncio.create_task(client.acquire("steady", "k", timeout=25)) for _ in range(20)]
        while await asyncio.to_thread(waiting, service) < 15:  # they would be served in forty seconds
            await asyncio.sleep(0)
        for task in abandoned:
            task.cancel()
        for task in abandoned:
            with suppress(asyncio.CancelledError):
                await task
        assert (await client.acquire("steady", "k", timeout=20)).allowed
