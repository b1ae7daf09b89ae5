"""Reset everything, and switch limits off in tests."""

import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from fastapi import Depends, FastAPI
from flask import Flask
from quart import Quart
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tests.inbound.harness import AsgiHarness, WsgiHarness
from tests.inbound.test_routes import Client
from tidegate import ConfigError
from tidegate.inbound import aiohttp, asgi, fastapi, flask, wsgi
from tidegate.inbound.testing import limits_disabled, reset_limits
from tidegate.stores._memory.store import MemoryStore

STATS = "/api/admin/rate-limit-stats"
TOKEN = "a-long-admin-token"  # noqa: S105 - of these tests
ONE = {"categories": {"all": {"limit": 1, "window": "1m", "endpoints": ["/*"]}}}
PEERS = [f"203.0.113.{host}" for host in range(1, 6)]


def statuses(api):
    return {api.request("/", peer=peer).status for peer in PEERS}


@pytest.mark.parametrize("store", ["memory://", "sqlite", "object"])
@pytest.mark.parametrize("kind", [AsgiHarness, WsgiHarness])
@pytest.mark.parametrize("way", ["method", "admin", "testing"])
def test_reset_all(kind, store, way, tmp_path):
    urls = {"sqlite": f"sqlite:///{tmp_path}/limits.db", "object": MemoryStore()}
    block = {"block_after": "3/1m", "block_for": "10m"}
    api = kind({**ONE, **block}, store=urls.get(store, store), admin_token=TOKEN)
    assert statuses(api) == {200}
    for _ in range(3):
        assert statuses(api) == {429}
    if way == "method":
        api.limiter.reset_all()
    elif way == "testing":
        reset_limits(api.middleware)
    else:
        headers = [("Authorization", f"Bearer {TOKEN}")]
        reply = api.request(STATS, "POST", headers, body=b'{"action": "reset_all"}')
        assert json.loads(reply.body) == {"done": "reset_all", "clients": 5}
    assert statuses(api) == {200}
    stats = json.loads(api.request(f"{STATS}?top=1", peer="127.0.0.1").body)
    assert (stats["total_entries"], stats["blocked_for_denials"]) == (5, {})
    api.close()


def test_reset_all_of_a_store_in_memory_forgets_clients_that_are_no_longer_listed(make_app):
    api = make_app({**ONE, "max_entries": 1000})
    assert statuses(api) == {200}
    api.limiter.category_limiters["all"].last_decisions.clear()
    api.limiter.reset_all()
    assert statuses(api) == {200}
    assert api.limiter.store.metrics()["entries"] == 5


def test_reset_all_leaves_other_policies_of_a_shared_store_alone(make_app):
    store = MemoryStore()
    one, two = make_app(ONE, store=store), make_app({"categories": {"b": ONE["categories"]["all"]}}, store=store)
    for api in (one, two):
        assert statuses(api) == {200}
    one.limiter.reset_all()
    assert (statuses(one), statuses(two)) == ({200}, {429})


# ---- disabled limits -------------------------------------------------------------------------------------------------


def test_disabled_limits_count_nothing(make_app):
    api = make_app(ONE)
    with limits_disabled(api.middleware):
        assert api.statuses(5, "/") == [200] * 5
        assert "x-ratelimit-limit" not in api.request("/").headers
        with limits_disabled(api.middleware, api.limiter):  # nested
            assert api.request("/").status == 200
        assert api.request("/").status == 200
    assert api.statuses(2, "/") == [200, 429]


def test_limits_are_enabled_again_after_an_error(make_app):
    api = make_app(ONE)
    with pytest.raises(ZeroDivisionError), limits_disabled(api.middleware):
        raise ZeroDivisionError
    assert api.statuses(2, "/") == [200, 429]


def test_a_reload_does_not_enable_disabled_limits(make_app, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("rate_limiting: {categories: {all: {limit: 1, endpoints: [/*]}}}\n")
    api = make_app(path)
    with limits_disabled(api.middleware):
        path.write_text("rate_limiting: {categories: {all: {limit: 2, endpoints: [/*]}}}\n")
        assert api.limiter.reload() is None
        assert api.statuses(5, "/") == [200] * 5
    assert api.statuses(3, "/") == [200, 200, 429]


def test_a_starlette_application():
    async def home(request):
        return PlainTextResponse("hello")

    app = Starlette(routes=[Route("/", home)])
    app.add_middleware(asgi.RateLimitMiddleware, config=ONE)
    client = Client(app)
    with limits_disabled(app):  # before its first request
        assert {client.get("/").status_code for _ in range(3)} == {200}
    assert [client.get("/").status_code for _ in range(2)] == [200, 429]
    reset_limits(app)
    assert client.get("/").status_code == 200


def test_a_flask_application_with_route_limits():
    app = Flask(__name__)

    @app.get("/")
    @flask.limit("1/1m")
    def home():
        return "hello"

    app.wsgi_app = wsgi.RateLimitMiddleware(app.wsgi_app, {"defaults": False})  # type: ignore[method-assign]  # as Flask documents
    client = app.test_client()
    with limits_disabled(app):
        assert {client.get("/").status_code for _ in range(3)} == {200}
    assert [client.get("/").status_code for _ in range(2)] == [200, 429]
    reset_limits(app)
    assert client.get("/").status_code == 200


def test_a_route_limit_without_a_middleware():
    app = FastAPI()
    once = fastapi.limit("1/1m")

    @app.get("/", dependencies=[Depends(once)])
    async def home():
        return "hello"

    client = Client(app)
    with limits_disabled(once):
        assert {client.get("/").status_code for _ in range(3)} == {200}
    assert [client.get("/").status_code for _ in range(2)] == [200, 429]
    reset_limits(once)
    assert client.get("/").status_code == 200


def test_something_without_limits_is_an_error():
    with pytest.raises(ConfigError, match="has no RateLimitMiddleware: pass the application, the middleware or the"):
        reset_limits(object())
    with pytest.raises(ConfigError, match="has no RateLimitMiddleware"), limits_disabled(Flask("x")):
        pass


def test_enabled_false_disables_route_limits_too():
    """As the table of settings says: it disables all limits."""
    app = FastAPI()

    @app.get("/", dependencies=[Depends(fastapi.limit("1/1m"))])
    async def home():
        return "hello"

    app.add_middleware(asgi.RateLimitMiddleware, config={"enabled": False})
    client = Client(app)
    assert {client.get("/").status_code for _ in range(3)} == {200}


def test_the_middleware_of_a_quart_application_is_found():
    app = Quart(__name__)
    app.get("/")(lambda: "page")
    app.asgi_app = asgi.RateLimitMiddleware(app.asgi_app, ONE)  # type: ignore[method-assign]  # as Quart's docs do
    client = Client(app)
    assert [client.get("/").status_code for _ in range(2)] == [200, 429]
    with limits_disabled(app):
        assert client.get("/").status_code == 200
    reset_limits(app)
    assert client.get("/").status_code == 200


async def test_the_middleware_of_an_aiohttp_application_is_found():
    async def page(request):
        return web.Response(text="page")

    app = web.Application(middlewares=[aiohttp.RateLimitMiddleware(ONE)])
    app.router.add_get("/", page)
    async with TestClient(TestServer(app)) as client:
        assert [(await client.get("/")).status for _ in range(2)] == [200, 429]
        with limits_disabled(app):
            assert (await client.get("/")).status == 200
        reset_limits(app)
        assert (await client.get("/")).status == 200
