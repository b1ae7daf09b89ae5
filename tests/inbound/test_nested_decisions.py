"""Requests that several places decide: nested middlewares and blueprints, WebSockets, options of the middleware."""

import asyncio
from random import Random

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from fastapi import Depends, FastAPI
from flask import Blueprint, Flask
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route, WebSocketRoute

from tests.cases import cases
from tests.inbound.harness import PEER, START, AsgiHarness, run_websocket
from tidegate.inbound import aiohttp, by_header, fastapi, flask, starlette
from tidegate.inbound.asgi import RateLimitMiddleware as AsgiMiddleware
from tidegate.inbound.wsgi import RateLimitMiddleware as WsgiMiddleware
from tidegate.testing import ManualClock

EVERYTHING = {"defaults": False, "unmatched": "all", "categories": {"all": {"limit": 50, "window": "1h"}}}


@pytest.fixture
def clock():
    return ManualClock(start=START)


def used(middleware):
    """Return how many requests of the client are charged to the category `all`."""
    (usage,) = middleware.request_limiter.category_limiters["all"].limiter.usage(PEER).values()
    return usage.used


def flask_statuses(app, path, count, method="GET"):
    client = app.test_client()
    return [client.open(path, method=method, environ_base={"REMOTE_ADDR": PEER}).status_code for _ in range(count)]


async def asgi_statuses(app, path, count, **options):
    transport = httpx.ASGITransport(app, client=(PEER, 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://site", **options) as client:
        return [(await client.get(path)).status_code for _ in range(count)]


def blueprint_site(limit):
    """Return an application with a blueprint in a blueprint, each with limits."""
    parent, child = Blueprint("parent", "parent", url_prefix="/p"), Blueprint("child", "child", url_prefix="/c")
    limit("4/1m", name="parent")(parent)
    limit("3/1m", name="child")(child)

    @child.get("/own")
    @limit("2/1m", name="own")
    def own():
        return "own"

    @child.get("/plain")
    def plain():
        return "plain"

    parent.register_blueprint(child)
    app = Flask("site")
    app.register_blueprint(parent)
    return app


@pytest.mark.parametrize("behind", [True, False], ids=["middleware", "alone"])
def test_each_limit_of_nested_blueprints_is_charged_once(clock, behind):
    app = blueprint_site(flask.limit if behind else flask.Limits(clock=clock).limit)
    if behind:
        app.wsgi_app = WsgiMiddleware(app.wsgi_app, EVERYTHING, clock=clock)
    assert flask_statuses(app, "/p/c/own", 4) == [200, 200, 429, 429]
    assert flask_statuses(app, "/p/c/plain", 4) == [200, 200, 200, 429]
    if behind:
        assert used(app.wsgi_app) == 5


@pytest.mark.parametrize("behind", [True, False], ids=["middleware", "alone"])
def test_options_that_flask_answers_itself_are_not_charged_to_limits_of_the_route(clock, behind):
    app = blueprint_site(flask.limit if behind else flask.Limits(clock=clock).limit)
    if behind:
        app.wsgi_app = WsgiMiddleware(app.wsgi_app, EVERYTHING, clock=clock)
    assert flask_statuses(app, "/p/c/own", 5, "OPTIONS") == [200] * 5
    assert flask_statuses(app, "/p/c/own", 3) == [200, 200, 429]


def inner_rules(limit):
    return {"defaults": False, "unmatched": "inner", "categories": {"inner": {"limit": limit, "window": "1m"}}}


def test_a_route_behind_two_asgi_middlewares_refunds_both(clock):
    api = FastAPI()

    @api.get("/item", dependencies=[Depends(fastapi.limit("2/1m"))])
    async def item():
        return "item"

    outer = AsgiMiddleware(
        Starlette(routes=[Mount("/sub", AsgiMiddleware(api, inner_rules(9), clock=clock))]), EVERYTHING, clock=clock
    )
    assert asyncio.run(asgi_statuses(outer, "/sub/item", 5)) == [200, 200, 429, 429, 429]
    assert used(outer) == 2


def test_a_route_behind_two_asgi_middlewares_that_is_not_reached_refunds_both(clock):
    async def page(request):
        return PlainTextResponse("page")

    class Rewriting:
        """Sends requests to another path than the one that the middleware has seen."""

        def __init__(self, app):
            self.app = app

        async def __call__(self, scope, receive, send):
            await self.app({**scope, "path": "/free"}, receive, send)

    app = Starlette(routes=[Route("/page", starlette.limit("1/1m")(page)), Route("/free", page)])
    app.add_middleware(Rewriting)
    outer = AsgiMiddleware(AsgiMiddleware(app, inner_rules(9), clock=clock), EVERYTHING, clock=clock)
    assert asyncio.run(asgi_statuses(outer, "/page", 3)) == [200, 429, 429]
    assert used(outer) == 1


def test_a_view_behind_two_wsgi_middlewares_refunds_both(clock):
    app = Flask("site")
    app.add_url_rule("/page", "page", flask.limit("2/1m")(lambda: "page"))
    app.wsgi_app = WsgiMiddleware(WsgiMiddleware(app.wsgi_app, inner_rules(9), clock=clock), EVERYTHING, clock=clock)
    assert flask_statuses(app, "/page", 5) == [200, 200, 429, 429, 429]
    assert used(app.wsgi_app) == 2


@pytest.mark.parametrize("behind", [True, False], ids=["middleware", "alone"])
def test_a_denied_websocket_of_starlette_is_closed(clock, behind):
    """Without a message, servers answer with an error of their own, or clients wait."""

    async def chat(websocket):
        await websocket.accept()
        await websocket.close()

    limit = starlette.limit if behind else starlette.Limits(clock=clock).limit
    app = Starlette(routes=[WebSocketRoute("/ws", limit("1/1m")(chat))])
    target = AsgiMiddleware(app, EVERYTHING, clock=clock) if behind else app
    first, second = (asyncio.run(run_websocket(target, [], "/ws", peer=PEER)) for _ in range(2))
    assert first[0]["type"] == "websocket.accept"
    assert second == [{"type": "websocket.close", "code": 1008, "reason": "Rate limit exceeded"}]


def test_a_limit_by_header_works_beside_options_of_the_middleware(clock):
    """The options of `application_limits` cannot be prepared: the key function got no request then."""

    async def page(request):
        return PlainTextResponse("page")

    app = Starlette(routes=[Route("/page", starlette.limit("1/1m", key=by_header("x-user"))(page))])
    options = starlette.limit("9/1m", methods=["GET"])
    target = AsgiMiddleware(app, application_limits=options, clock=clock)
    for user in ("ann", "bob"):
        assert asyncio.run(asgi_statuses(target, "/page", 2, headers={"x-user": user})) == [200, 429]


async def test_key_functions_in_aiohttp_receive_its_request(clock):
    @aiohttp.limit("1/1m", key=lambda request: request.match_info["number"])
    async def item(request):
        return web.Response(text="item")

    app = web.Application(middlewares=[aiohttp.RateLimitMiddleware(EVERYTHING, clock=clock)])
    app.router.add_get("/items/{number}", item)
    async with TestClient(TestServer(app)) as client:
        found = [(await client.get(f"/items/{number}")).status for number in (1, 1, 2)]
    assert found == [200, 429, 200]


@cases("seed", range(12))
def test_header_fields_of_two_steps_are_those_of_one(seed):
    """A key function of the request is called at the endpoint, one of headers before the application runs."""
    random = Random(seed)
    category = {"limits": [f"{random.randint(2, 9)}/1m {random.choice(['sliding_log', 'token_bucket'])}"]}
    config = {"defaults": False, "unmatched": "all", "categories": {"all": category}}
    texts = [f"{random.randint(2, 9)}/{period}" for period in random.sample(["10s", "1m", "5m"], random.randint(1, 2))]
    options = {"name": "route", "count": random.choice([None, ["2xx"]])}
    sites = []
    for key in (lambda request: request.headers["x-user"], by_header("x-user")):

        async def page(request):
            return PlainTextResponse("page", asked_status(request))

        app = Starlette(routes=[Route("/page", starlette.limit(texts, key=key, **options)(page))])
        sites.append(AsgiHarness(config, app=app))
    for _ in range(60):
        step, user, status = random.choice([0, 0, 1, 7]), random.choice(["ann", "bob"]), random.choice(["200", "404"])
        replies = []
        for each in sites:
            each.clock.advance(step)
            replies.append(each.request("/page", headers=[("x-user", user), ("x-status", status)]))
        assert replies[0].status == replies[1].status
        if replies[0].status != 429:  # a denial of the first step does not know those of the second
            assert replies[0].headers == replies[1].headers
    for each in sites:
        each.close()


def asked_status(request):
    """Return the status that a request asks for."""
    return int(request.headers["x-status"])
