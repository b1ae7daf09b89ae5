"""Shared stores: middlewares on one store share the limit, with and without leases, and close it."""

import asyncio

import pytest

from tests.inbound.harness import AsgiHarness, WsgiHarness
from tests.servers.valkey import ValkeyServer
from tidegate._runtime.clock import SystemClock
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


@pytest.mark.parametrize("lease", [None, True], ids=["direct", "leased"])
def test_middlewares_on_one_store_share_the_limit(url, lease):
    apps = [
        kind(RULES, store=url, lease=lease, clock=SystemClock(), log_burst=0) for kind in (AsgiHarness, WsgiHarness)
    ]
    statuses = [app.request().status for _ in range(60) for app in apps]
    for app in apps:
        app.close()
    # One application may lack the permits that the other has leased; the limit is never exceeded.
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

    assert (await middleware.request_limiter.check_async("203.0.113.9", "read")).allowed
    await middleware({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "leases"]


def test_a_store_passed_as_object_stays_open(make_app):
    store = MemoryStore()
    api = make_app(RULES, store=store)
    assert api.request().status == 200
    assert not api.limiter.opened_store.owned
    assert store.metrics()["max_entries"] == 1_000_000  # it has its own bound


@pytest.mark.parametrize("lease", [None, True], ids=["direct", "leased"])
def test_a_limit_of_0_is_closed_on_every_store(url, lease):
    config = {"categories": {"shut": {"limits": ["0/1m", "5/1h"], "endpoints": ["/*"]}}}
    for kind in (AsgiHarness, WsgiHarness):
        app = kind(config, store=url, lease=lease, clock=SystemClock(), log_burst=0)
        denied = [app.request("/") for _ in range(3)]
        app.close()
        assert {(reply.status, reply["x-ratelimit-limit"], "retry-after" in reply.headers) for reply in denied} == {
            (429, "0", False)
        }


def test_middlewares_on_one_store_share_blocks_and_a_reset(url):
    rule = {"limit": 1, "window": "1h", "endpoints": ["/*"]}
    config = {"categories": {"all": rule}, "block_after": "3/1h", "block_for": "2h"}
    apps = [kind(config, store=url, clock=SystemClock(), log_burst=0) for kind in (AsgiHarness, WsgiHarness)]
    statuses = [app.request("/").status for _ in range(2) for app in apps]
    assert statuses == [200, 429, 429, 429]
    assert {int(app.request("/")["retry-after"]) > 3600 for app in apps} == {True}
    apps[0].limiter.reset_all()
    assert [app.request("/").status for app in apps] == [200, 429]
    assert int(apps[1].request("/")["retry-after"]) <= 3600
    for app in apps:
        app.close()
