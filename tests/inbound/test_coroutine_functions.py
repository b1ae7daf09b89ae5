"""Key and cost functions: coroutines in async frameworks, called once per request, and the address that they see."""

import asyncio
from typing import Any

import flask
import httpx
import pytest
import quart
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from fastapi import FastAPI
from fastapi import Request as FastApiRequest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tests.cases import cases
from tidegate import ConfigError
from tidegate.inbound import aiohttp as aiohttp_limits
from tidegate.inbound import asgi, common_request, fastapi, starlette, wsgi
from tidegate.inbound import django as django_limits
from tidegate.inbound import flask as flask_limits
from tidegate.inbound import quart as quart_limits
from tidegate.inbound.testing import reset_limits

TestServer.__test__ = TestClient.__test__ = False  # not tests, in spite of their names

NO_CATEGORIES = {"defaults": False, "unmatched": None}
ONE_CATEGORY = {**NO_CATEGORIES, "unmatched": "many", "categories": {"many": {"limit": 1000, "window": "1m"}}}
ADDRESS, PROXY = "203.0.113.9", "10.0.0.1"


class AsgiClient:
    """Sends requests to an ASGI application from an address."""

    def __init__(self, app, peer=ADDRESS):
        self.app, self.peer = app, peer

    async def statuses(self, *bodies, **headers):
        transport = httpx.ASGITransport(self.app, client=(self.peer, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://site") as client:
            return [(await client.post("/login", json=body, headers=headers)).status_code for body in bodies]


def calls_of(function, calls):
    """Return a coroutine function that records how often it is called."""

    async def recorded(request):
        calls.append(request)
        await asyncio.sleep(0)
        return await function(request)

    return recorded


async def user_of(request):
    return ("user", (await request.json())["user"])


ANN, BOB = {"user": "ann"}, {"user": "bob"}


def fastapi_site(**options: Any) -> FastAPI:
    app = FastAPI()

    @app.post("/login")
    @fastapi.limit("2/1m", **options)
    async def login(request: FastApiRequest) -> str:
        return str((await request.json())["user"])

    return app


def fastapi_model_site(**options: Any) -> FastAPI:
    """The endpoint declares its body, which FastAPI reads before the limit is decided."""
    app = FastAPI()

    @app.post("/login")
    @fastapi.limit("2/1m", **options)
    def login(user: dict[str, str]) -> str:
        return user["user"]

    return app


def starlette_site(**options):
    @starlette.limit("2/1m", **options)
    async def login(request):
        return PlainTextResponse((await request.json())["user"])

    return Starlette(routes=[Route("/login", login, methods=["POST"])])


def quart_site(**options):
    app = quart.Quart(__name__)

    async def quart_user(request):
        return ("user", (await request.get_json())["user"])

    if options.get("key"):
        options["key"] = calls_of(quart_user, options.pop("calls"))

    @app.post("/login")
    @quart_limits.limit("2/1m", **options)
    async def login():
        return (await quart.request.get_json())["user"]

    return app


@cases("config", [None, NO_CATEGORIES, ONE_CATEGORY])
@cases("site", [fastapi_site, fastapi_model_site, starlette_site])
async def test_a_coroutine_reads_the_key_from_the_body_once_per_request(site, config, clock, own_limits):
    calls = []
    reset_limits(own_limits)
    app = site(key=calls_of(user_of, calls))
    if config is not None:
        app = asgi.RateLimitMiddleware(app, config, clock=clock)
    assert await AsgiClient(app).statuses(ANN, ANN, ANN, BOB) == [200, 200, 429, 200]
    assert len(calls) == 4


async def test_a_coroutine_of_quart(clock):
    calls = []
    app = quart_site(key=True, calls=calls)
    assert await AsgiClient(app).statuses(ANN, ANN, ANN, BOB) == [200, 200, 429, 200]
    assert len(calls) == 4


async def test_a_coroutine_of_aiohttp(clock):
    calls = []

    async def login(request):
        return web.Response(text=(await request.json())["user"])

    app = web.Application()
    app.add_routes([web.post("/login", aiohttp_limits.limit("2/1m", key=calls_of(user_of, calls))(login))])
    async with TestClient(TestServer(app)) as client:
        replies = [(await client.post("/login", json=body)).status for body in (ANN, ANN, ANN, BOB)]
    assert replies == [200, 200, 429, 200]
    assert len(calls) == 4


@pytest.mark.parametrize("config", [None, ONE_CATEGORY])
async def test_costs_limits_and_exemptions_may_be_coroutines(config, clock):
    async def cost(request):
        return (await request.json()).get("cost", 1)

    async def limits(request):
        return "4/1m" if (await request.json()).get("paying") else "2/1m"

    async def exempt_when(request):
        return (await request.json())["user"] == "root"

    @starlette.limit(limits, cost=cost, exempt_when=exempt_when)
    async def login(request):
        return PlainTextResponse("in")

    app = Starlette(routes=[Route("/login", login, methods=["POST"])])
    if config is not None:
        app = asgi.RateLimitMiddleware(app, config, clock=clock)
    client = AsgiClient(app)
    assert await client.statuses({**ANN, "cost": 2}, ANN) == [200, 429]
    assert await client.statuses(*[{"user": "root"}] * 9) == [200] * 9
    paying = {**BOB, "paying": True}
    assert await client.statuses({**paying, "cost": 2}, paying) == [200, 429]  # 2 of 4 were used before


@pytest.mark.parametrize("config", [NO_CATEGORIES, ONE_CATEGORY])
@pytest.mark.parametrize("coroutine", [False, True])
async def test_the_key_of_a_middleware_is_called_once_per_request(config, coroutine, clock):
    calls = []

    def key(request):
        calls.append(request.address)
        return request.header("x-user")

    async def later(request):
        await asyncio.sleep(0)
        return key(request)

    @starlette.limit("2/1m")
    async def login(request):
        return PlainTextResponse("in")

    app = Starlette(routes=[Route("/login", login, methods=["POST"])])
    app = asgi.RateLimitMiddleware(
        app, config, key=later if coroutine else key, clock=clock, block_after="9/1m", block_for="1m"
    )
    assert await AsgiClient(app).statuses(ANN, ANN, ANN, **{"x-user": "ann"}) == [200, 200, 429]
    assert await AsgiClient(app).statuses(BOB, **{"x-user": "bob"}) == [200]
    assert calls == [ADDRESS] * 4


@pytest.mark.parametrize("plain", [True, False])
def test_a_plain_key_is_called_once_per_request_of_flask(plain, clock):
    calls = []

    def key(request):
        calls.append(request)
        return request.get_json()["user"]

    app = flask.Flask(__name__)

    @app.post("/login")
    @flask_limits.limit("2/1m", key=key, cost=1 if plain else lambda request: 1)
    def login():
        return "in"

    client = app.test_client()
    assert [client.post("/login", json=body).status_code for body in (ANN, ANN, ANN, BOB)] == [200, 200, 429, 200]
    assert len(calls) == 4


def test_coroutines_are_refused_where_nothing_can_await_them(clock):
    def view(request):
        return "in"

    for limit in (flask_limits.limit, starlette.limit, quart_limits.limit, django_limits.limit):
        with pytest.raises(ConfigError, match="key: must be a plain function of an endpoint that is not a coroutine"):
            limit("2/1m", key=user_of)(view)
    limit = starlette.limit("2/1m", key=user_of, scope="x")
    request = Request({"type": "http", "method": "GET", "path": "/", "headers": [], "client": (ADDRESS, 1)})
    with pytest.raises(ConfigError, match="peek_async"):
        limit.peek(request)
    with pytest.raises(ConfigError, match="key: must be a plain function in a 'with' block"), limit.check(request):
        pass
    with pytest.raises(ConfigError, match="key: must be a plain function of a WSGI middleware"):
        wsgi.RateLimitMiddleware(lambda: None, default_limits=flask_limits.limit("2/1m", key=user_of))


# ---- the address of the client ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [NO_CATEGORIES, ONE_CATEGORY], ids=["no category", "category"])
@pytest.mark.parametrize("limited", [False, True])
async def test_the_common_request_has_the_address_of_the_client(config, limited, clock):
    seen = []

    async def page(request):
        seen.append(common_request(request).address)
        return PlainTextResponse("page")

    app = Starlette(routes=[Route("/login", starlette.limit("9/1m")(page) if limited else page, methods=["POST"])])
    app = asgi.RateLimitMiddleware(app, config, trusted_proxies=[PROXY], clock=clock)
    await AsgiClient(app, PROXY).statuses(ANN, **{"x-forwarded-for": ADDRESS})
    await AsgiClient(app, "198.51.100.7").statuses(ANN, **{"x-forwarded-for": ADDRESS})  # not trusted
    assert seen == [ADDRESS, "198.51.100.7"]


@pytest.mark.parametrize("config", [None, NO_CATEGORIES, ONE_CATEGORY])
def test_the_common_request_of_flask_has_the_address_of_the_client(config, clock):
    seen = []
    app = flask.Flask(__name__)

    @app.get("/")
    def page():
        seen.append(common_request(flask.request).address)
        return "page"

    if config is not None:
        app.wsgi_app = wsgi.RateLimitMiddleware(app.wsgi_app, config, trusted_proxies=[PROXY], clock=clock)
    sent = {"X-Forwarded-For": ADDRESS}
    app.test_client().get("/", headers=sent, environ_overrides={"REMOTE_ADDR": PROXY})
    assert seen == [PROXY if config is None else ADDRESS]


async def test_the_common_request_without_a_middleware_has_the_address_of_the_peer():
    seen = []

    async def page(request):
        seen.append(common_request(request).address)
        return PlainTextResponse("page")

    app = Starlette(routes=[Route("/login", page, methods=["POST"])])
    await AsgiClient(app).statuses(ANN, **{"x-forwarded-for": "198.51.100.1"})
    assert seen == [ADDRESS]
