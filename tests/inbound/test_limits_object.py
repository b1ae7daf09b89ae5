"""`Limits`: one limiter for an application without a middleware, and the one that all bare limits share."""

import aiohttp.test_utils
import django
import pytest
from aiohttp import web
from django.conf import settings
from fastapi import Depends, FastAPI
from flask import Flask
from quart import Quart
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tests.cases import cases
from tests.inbound.recording_store import RecordingStore
from tests.inbound.test_one_decision import FlaskClient
from tests.inbound.test_routes import Client
from tidegate import ConfigError
from tidegate.inbound import aiohttp as aiohttp_limits
from tidegate.inbound import asgi, by_header, current_limits, fastapi, flask, functions, quart, starlette
from tidegate.inbound.testing import limits_disabled, limits_replaced, reset_limits
from tidegate.testing import ManualClock

settings.configured or settings.configure()
django.setup()


def starlette_site(*decorators):
    async def page(request):
        return PlainTextResponse(str(len(current_limits(request))))

    for decorate in reversed(decorators):
        page = decorate(page)
    return Client(Starlette(routes=[Route("/", page), Route("/other", page)]))


def fastapi_site(*limits):
    app = FastAPI()
    app.get("/", dependencies=[Depends(each) for each in limits])(lambda: "page")
    return Client(app)


def flask_site(*decorators):
    def page():
        return "page"

    for decorate in reversed(decorators):
        page = decorate(page)
    app = Flask(__name__)
    app.get("/")(page)
    return FlaskClient(app)


def quart_site(*decorators):
    async def page():
        return "page"

    for decorate in reversed(decorators):
        page = decorate(page)
    app = Quart(__name__)
    app.get("/")(page)
    return Client(app)


SITES = [(starlette, starlette_site), (fastapi, fastapi_site), (flask, flask_site), (quart, quart_site)]


def statuses(client, count, **options):
    return [client.get("/", **options).status_code for _ in range(count)]


@cases(("module", "site"), SITES)
def test_the_limits_of_one_object_are_one_call_of_its_store(module, site, clock):
    store = RecordingStore(clock)
    limits = module.Limits(store=store, clock=clock)
    client = site(limits.limit("2/1m"), limits.limit("9/1h"))
    assert statuses(client, 4) == [200, 200, 429, 429]
    assert store.calls == 4
    assert sorted(store.usages().values()) == [2, 2]


@cases(("module", "site"), SITES)
def test_the_object_has_the_proxies_headers_and_keys_of_all_its_limits(module, site, clock):
    limits = module.Limits(
        clock=clock, trusted_proxies=["203.0.113.9"], headers={"limit": "X-Quota"}, key=by_header("x-user")
    )
    client = site(limits.limit("1/1m"))
    first = client.get("/", headers={"x-forwarded-for": "198.51.100.1"})
    assert (first.status_code, first.headers["x-quota"]) == (200, "1")
    assert statuses(client, 1, headers={"x-forwarded-for": "198.51.100.2"}) == [200]
    assert statuses(client, 1, headers={"x-forwarded-for": "198.51.100.2"}) == [429]
    ann = {"x-forwarded-for": "198.51.100.2", "x-user": "ann"}
    assert statuses(client, 2, headers=ann) == [200, 429]


def test_exempt_clients_and_blocks_need_no_middleware(clock):
    limits = starlette.Limits(
        clock=clock,
        exempt_when=lambda request: request.header("x-staff") is not None,
        block_after="2/1m",
        block_for="1h",
    )
    client = starlette_site(limits.limit("1/1m"))
    assert statuses(client, 3, headers={"x-staff": "yes"}) == [200] * 3
    assert statuses(client, 3) == [200, 429, 429]
    clock.advance(120)
    assert statuses(client, 1) == [429]  # blocked
    clock.advance(3600)
    assert statuses(client, 1) == [200]


def test_limits_of_an_object_keep_their_store_behind_a_middleware(clock):
    store = RecordingStore(clock)
    limits = starlette.Limits(store=store, clock=clock)
    app = Starlette(routes=[Route("/", limits.limit("1/1m")(lambda request: PlainTextResponse("page")))])
    rules = {"defaults": False, "categories": {"all": {"limit": 5, "window": "1m", "endpoints": ["/*"]}}}
    middleware = asgi.RateLimitMiddleware(app, rules, clock=clock)
    assert statuses(Client(middleware), 3) == [200, 429, 429]
    assert list(store.usages().values()) == [1]
    # The denied requests were charged to neither store.
    category = middleware.request_limiter.category_limiters["all"].limiter
    assert category.peek("203.0.113.9", 0).remaining == 4


def test_bare_limits_share_one_object_that_tests_replace(clock):
    client = starlette_site(starlette.limit("1/1m", scope="both"))
    other = flask_site(flask.limit("1/1m", scope="both"))
    assert [*statuses(client, 1), *statuses(other, 1)] == [200, 429]
    inner = ManualClock(start=0)
    with limits_replaced(clock=inner) as limits:
        assert [*statuses(client, 1), *statuses(other, 1)] == [200, 429]
        reset_limits(limits)
        assert statuses(client, 1) == [200]
        inner.advance(60)
        assert statuses(client, 2) == [200, 429]
        with limits_disabled(limits):
            assert statuses(client, 2) == [200, 200]
    assert statuses(client, 1) == [429]


async def test_aiohttp(clock):
    async def page(_request):
        return web.Response(text="page")

    limits = aiohttp_limits.Limits(clock=clock)
    app = web.Application()
    app.add_routes([web.get("/", limits.limit("1/1m")(page))])
    async with aiohttp.test_utils.TestClient(aiohttp.test_utils.TestServer(app)) as client:
        assert [(await client.get("/")).status for _ in range(2)] == [200, 429]


def test_an_object_closes_its_store(tmp_path):
    limits = functions.Limits(store=f"sqlite:///{tmp_path}/limits.db")
    function = limits.limit("1/1h")(lambda: "done")
    assert function() == "done"
    limits.close()
    shared = starlette.Limits(store=f"sqlite:///{tmp_path}/routes.db")
    assert statuses(starlette_site(shared.limit("1/1h")), 2) == [200, 429]
    shared.close()


@pytest.mark.parametrize("option", ["plan", "default_limits", "admin", "root_path", "count"])
def test_options_that_need_a_middleware_are_refused(option):
    with pytest.raises(ConfigError, match=f"{option}: needs a RateLimitMiddleware around the application"):
        starlette.Limits(**{option: None})


def test_options_of_one_limit_cannot_be_those_of_all():
    with pytest.raises(TypeError, match="store"):
        starlette.limit("1/1m", store="memory://")
