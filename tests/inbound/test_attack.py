"""Attacks with rotating addresses and concurrent requests. TIDEGATE_ATTACK=1000000 runs the full size."""

import asyncio
import gc
import os
import sys

import pytest

from tests.inbound.harness import AsgiHarness

ADDRESSES = int(os.environ.get("TIDEGATE_ATTACK", "12000"))
CALLS = int(os.environ.get("TIDEGATE_CALLS", "10000"))
MAX_ENTRIES = 1000
pytestmark = pytest.mark.timeout(120 + ADDRESSES // 500)  # the full size takes minutes


def address(number):
    return f"{11 + number // 2**24}.{number // 65_536 % 256}.{number // 256 % 256}.{number % 256}"


def allocated_blocks(api):
    """Count allocated memory blocks, after clearing the bounded caches."""
    api.limiter.update_rules(api.limiter.rules)
    gc.collect()
    return sys.getallocatedblocks()


@pytest.mark.slow
def test_rotating_addresses_neither_fill_the_memory_nor_reset_exhausted_clients(caplog):
    api = AsgiHarness({"max_entries": MAX_ENTRIES}, log_burst=0)
    api.statuses(6, "/api/cluster", peer="203.0.113.1")
    api.statuses(30, "/api/feeds", peer="203.0.113.2")
    api.flood(address(number) for number in range(ADDRESSES // 2))  # until every cache is full
    before = allocated_blocks(api)
    api.flood(address(number) for number in range(ADDRESSES // 2, ADDRESSES))
    assert allocated_blocks(api) - before < MAX_ENTRIES
    assert api.limiter.store.metrics()["entries"] == MAX_ENTRIES
    assert api.limiter.category_limiters["read"].recent_clients.remove_expired(api.limiter.now()) <= MAX_ENTRIES
    assert api.request("/api/cluster", peer="203.0.113.1").status == 429  # still exhausted
    assert api.request("/api/feeds", peer="203.0.113.2").remaining == 29  # still known
    assert caplog.text.count("memory store is full") == 1
    api.close()


async def concurrent_statuses(api, peers):
    """Send all requests concurrently: each one is decided before any response."""
    tasks = [asyncio.create_task(api.request_async("/api/feeds", peer=peer)) for peer in peers]
    return [(await task).status for task in tasks]


def waiting_app(width):
    """Return an application that responds when `width` requests have arrived."""
    inside = []
    full = asyncio.Event()

    async def app(scope, receive, send):
        inside.append(scope["client"])
        if len(inside) >= width:
            full.set()
        await full.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    return app


@pytest.mark.parametrize("store", ["memory", "sqlite"])
async def test_concurrent_requests_of_one_address_get_exactly_the_limit(tmp_path, store):
    url = "memory://" if store == "memory" else f"sqlite:///{tmp_path / 'limits.db'}?deadline=60s"
    calls = CALLS if store == "memory" else CALLS // 10
    api = AsgiHarness(app=waiting_app(60), store=url, log_burst=0)
    statuses = await concurrent_statuses(api, ["203.0.113.9"] * calls)
    assert (statuses.count(200), statuses.count(429)) == (60, calls - 60)
    await api.middleware.close()
    api.runner.close()


async def test_concurrent_requests_of_different_addresses_are_all_allowed():
    spare = 2 * 256  # for the last /24 networks: none may have more clients than free entries
    api = AsgiHarness({"max_entries": CALLS + spare}, app=waiting_app(CALLS), log_burst=0)
    statuses = await concurrent_statuses(api, [address(number) for number in range(CALLS)])
    assert statuses.count(200) == CALLS
    assert api.limiter.store.metrics()["entries"] == CALLS
    await api.middleware.close()
    api.runner.close()
