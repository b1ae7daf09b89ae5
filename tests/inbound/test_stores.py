"""The door on shared stores: doors that share one share the limit, leased or not; all is closed at the end."""

import asyncio

import pytest

from tests.inbound.harness import AsgiDoor, WsgiDoor
from tests.servers.valkey import ValkeyServer
from tidegate.clock import SystemClock
from tidegate.inbound.asgi import RateLimitMiddleware
from tidegate.stores import MemoryStore

RULES = {"categories": {"read": {"limit": 40, "window": "1h", "on_store_error": "deny"}}}


@pytest.fixture(scope="module")
def valkey():
    with ValkeyServer() as server:
        yield server


@pytest.fixture(params=["sqlite", "redis"])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'limits.db'}?deadline=60s"
    server = request.getfixturevalue("valkey")
    server.ask("FLUSHALL")
    return f"{server.url}?deadline=60s"


@pytest.mark.parametrize("lease", [None, True], ids=["asked", "leased"])
def test_doors_on_one_store_share_the_limit(url, lease):
    doors = [kind(RULES, store=url, lease=lease, clock=SystemClock(), log_burst=0) for kind in (AsgiDoor, WsgiDoor)]
    statuses = [door.ask().status for _ in range(60) for door in doors]
    for door in doors:
        door.close()
    # What one door holds in a lease the other may miss; never is there more.
    assert statuses.count(200) == 40 if lease is None else 20 <= statuses.count(200) <= 40
    assert set(statuses) == {200, 429}


async def test_the_store_is_closed_with_the_application(url):
    async def app(scope, receive, send):
        assert (await receive())["type"] == "lifespan.startup"
        await send({"type": "lifespan.startup.complete"})
        assert (await receive())["type"] == "lifespan.shutdown"
        await send({"type": "lifespan.shutdown.complete"})

    middleware = RateLimitMiddleware(app, RULES, store=url, lease=True)
    coming = iter(["lifespan.startup", "lifespan.shutdown"])
    sent = []

    async def receive():
        return {"type": next(coming)}

    async def send(message):
        sent.append(message["type"])

    gate = middleware.guard.gates["read"]
    assert (await gate.decide("a", 1)).allowed
    await middleware({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "leases"]


def test_a_store_of_ones_own_stays_open(door):
    store = MemoryStore()
    api = door(RULES, store=store)
    assert api.ask().status == 200
    assert not api.guard.owns_store
    assert store.metrics()["max_entries"] == 1_000_000  # it has its own bound
