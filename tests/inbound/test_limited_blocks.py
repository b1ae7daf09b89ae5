"""Blocks inside an endpoint that are limited: their charge may depend on the response, and they hold slots."""

import asyncio

import flask as flask_module
import httpx
import pytest
import quart as quart_module
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from fastapi import Depends, FastAPI, Request
from quart.testing import WebsocketResponseError
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tests.cases import cases
from tests.inbound.recording_store import RecordingStore
from tests.inbound.test_one_decision import FlaskClient, rules, statuses
from tests.inbound.test_routes import Client
from tidegate import ConfigError
from tidegate.inbound import aiohttp, asgi, fastapi, flask, quart, starlette, wsgi
from tidegate.inbound.testing import reset_limits

NO_CATEGORY = {"defaults": False, "unmatched": None}


def starlette_site(limit, outer=None):
    async def page(request):
        async with limit.check(request):
            if request.headers["x-status"] == "500":
                raise RuntimeError("failed")
            return PlainTextResponse("page", int(request.headers["x-status"]))

    return Starlette(routes=[Route("/", page if outer is None else outer(page))])


def starlette_thread_site(limit, outer=None):
    def page(request):
        with limit.check(request):
            return PlainTextResponse("page", int(request.headers["x-status"]))

    return Starlette(routes=[Route("/", page if outer is None else outer(page))])


def fastapi_site(limit, outer=None):
    app = FastAPI()

    async def page(request: Request):
        async with limit.check(request):
            return PlainTextResponse("page", int(request.headers["x-status"]))

    app.get("/", dependencies=[] if outer is None else [Depends(outer)])(page)
    return app


def quart_site(limit, outer=None):
    app = quart_module.Quart(__name__)

    async def page():
        async with limit.check(quart_module.request):
            return "page", int(quart_module.request.headers["x-status"])

    app.get("/")(page if outer is None else outer(page))
    return app


def flask_site(limit, outer=None):
    app = flask_module.Flask(__name__)

    def page():
        with limit.check(flask_module.request):
            return "page", int(flask_module.request.headers["x-status"])

    app.get("/")(page if outer is None else outer(page))
    return app


SITES = {
    "starlette": (starlette_site, starlette.limit),
    "starlette-thread": (starlette_thread_site, starlette.limit),
    "fastapi": (fastapi_site, fastapi.limit),
    "quart": (quart_site, quart.limit),
    "flask": (flask_site, flask.limit),
}


@pytest.fixture(params=SITES)
def site(request):
    return SITES[request.param]


def behind(app, *configs, clock):
    """Return a client of an application behind a middleware for each config."""
    if isinstance(app, flask_module.Flask):
        for config in configs:
            app.wsgi_app = wsgi.RateLimitMiddleware(app.wsgi_app, config, clock=clock)  # type: ignore[method-assign]  # as Flask's docs do
        return FlaskClient(app)
    for config in configs:
        app = asgi.RateLimitMiddleware(app, config, clock=clock)
    return Client(app)


def ask(client, status, times):
    return statuses(client, "/", times, headers={"x-status": str(status)})


@cases("configs", [[rules(100)], [NO_CATEGORY], [rules(90), rules(100)]])
@cases("limited_route", [False, True])
def test_the_response_decides_whether_a_block_counts(site, clock, configs, limited_route):
    build, limit = site
    outer = limit("50/1h", name="outer") if limited_route else None
    client = behind(build(limit("2/1m", scope="export", count=[401]), outer), *configs, clock=clock)
    assert ask(client, 200, 9) == [200] * 9
    assert ask(client, 401, 3) == [401, 401, 429]
    assert ask(client, 200, 1) == [429]


def test_the_headers_show_the_settled_block(site, clock):
    build, limit = site
    client = behind(build(limit("2/1m", scope="export", count=[401])), rules(100), clock=clock)
    remaining = [
        client.get("/", headers={"x-status": str(each)}).headers["x-ratelimit-remaining"] for each in (200, 401)
    ]
    assert remaining == ["2", "1"]


def test_a_failed_application_settles_the_block(clock):
    app = asgi.RateLimitMiddleware(
        starlette_site(starlette.limit("2/1m", scope="export", count=[401])),
        rules(),
        RecordingStore(clock),
        clock=clock,
    )
    with pytest.raises(RuntimeError, match="failed"):
        ask(Client(app), 500, 1)
    assert {policy for policy, _ in app.request_limiter.store.usages()} == {"all"}

    def failing(environ, start_response):
        with flask.limit("2/1m", scope="export", count=[401]).check(flask_module.Request(environ)):
            raise RuntimeError("failed")

    plain = wsgi.RateLimitMiddleware(failing, rules(), RecordingStore(clock), clock=clock)
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_ADDR": "203.0.113.9"}
    with pytest.raises(RuntimeError, match="failed"):
        plain(environ, lambda *_: None)
    assert {policy for policy, _ in plain.request_limiter.store.usages()} == {"all"}


@cases("config", [rules(100), NO_CATEGORY, None])
def test_a_block_holds_slots_until_its_end(site, clock, config):
    build, limit = site
    slots = limit("2/1m concurrency", scope="export")
    client = behind(build(slots), *([config] if config else []), clock=clock)
    assert ask(client, 200, 5) == [200] * 5


def test_slots_are_held_inside_the_block(clock):
    slots = starlette.limit("1/1m concurrency", scope="export")

    async def page(request):
        async with slots.check(request), slots.check(request):
            return PlainTextResponse("unreachable")

    app = asgi.RateLimitMiddleware(Starlette(routes=[Route("/", page)]), rules(100), RecordingStore(clock), clock=clock)
    assert statuses(Client(app), "/", 2) == [429, 429]
    assert sum(app.request_limiter.store.usages().values()) == 0


def test_a_limit_with_slots_and_count_is_settled_by_the_response(site, clock):
    build, limit = site
    both = limit(["1/1m concurrency name=slots", "2/1m"], scope="export", count=[401])
    client = behind(build(both), rules(100), clock=clock)
    assert ask(client, 200, 5) == [200] * 5
    assert ask(client, 401, 3) == [401, 401, 429]


def test_slots_of_a_dynamic_limit_are_released(site, clock):
    build, limit = site
    client = behind(build(limit(lambda request: "1/1m concurrency", scope="export")), rules(100), clock=clock)
    assert ask(client, 200, 4) == [200] * 4


async def test_blocks_in_aiohttp(clock):
    export = aiohttp.limit("2/1m", scope="export", count=[401])
    slots = aiohttp.limit("1/1m concurrency", scope="slots")

    async def page(request):
        async with slots.check(request), export.check(request):
            return web.Response(status=int(request.headers["x-status"]))

    app = web.Application(middlewares=[aiohttp.RateLimitMiddleware(rules(100), clock=clock)])
    app.router.add_get("/", page)
    async with TestClient(TestServer(app)) as client:
        asked = [200, 200, 200, 401, 401, 401]
        replies = [(await client.get("/", headers={"x-status": str(each)})).status for each in asked]
    assert replies == [200, 200, 200, 401, 401, 429]


# ---- nothing sees the response ---------------------------------------------------------------------------------------


def test_count_on_a_block_without_a_middleware_is_an_error(site, clock):
    build, limit = site
    app = build(limit("2/1m", scope="export", count=[401]))
    if isinstance(app, flask_module.Flask):
        app.testing = True  # raises instead of a 500
    if isinstance(app, quart_module.Quart):
        app.config["PROPAGATE_EXCEPTIONS"] = True
    with pytest.raises((ConfigError, ExceptionGroup)) as raised:
        ask(behind(app, clock=clock), 200, 1)
    error: BaseException = raised.value
    while isinstance(error, ExceptionGroup):  # of the task group of Quart
        (error,) = error.exceptions
    assert isinstance(error, ConfigError)
    assert "count= of a limit on a block needs a RateLimitMiddleware" in str(error)


def test_count_on_a_block_of_a_limited_view_needs_no_middleware(clock, own_limits):
    for build, limit in (SITES["starlette"], SITES["quart"], SITES["flask"]):
        reset_limits(own_limits)
        app = build(limit("2/1m", scope="export", count=[401]), limit("50/1h"))
        client = behind(app, clock=clock)
        assert ask(client, 200, 5) == [200] * 5
        assert ask(client, 401, 3) == [401, 401, 429]


@pytest.mark.parametrize("options", [{"limits": "2/1m", "count": [401]}, {"limits": "2/1m concurrency"}])
def test_fastapi_without_a_middleware_refuses_what_depends_on_the_response(options, clock):
    app = FastAPI()
    app.get("/", dependencies=[Depends(fastapi.limit(**options))])(lambda: "page")
    with pytest.raises(ConfigError, match="a concurrency limit or count= in FastAPI needs a RateLimitMiddleware"):
        statuses(Client(app), "/", 1)


@pytest.mark.parametrize("kind", [(flask_module, flask), (quart_module, quart)], ids=["flask", "quart"])
@pytest.mark.parametrize("config", [None, rules(100)], ids=["alone", "category"])
def test_limits_of_blueprints_depend_on_the_response_and_release_slots(kind, config, clock):
    library, module = kind
    app = getattr(library, "Flask" if library is flask_module else "Quart")(__name__)
    part = library.Blueprint("part", __name__)
    part.get("/")(lambda: ("page", int(library.request.headers["x-status"])))
    options = {}
    module.limit("2/1m", name="denied", count=[401], **options)(part)
    module.limit("1/1m concurrency", name="slots", **options)(part)
    app.register_blueprint(part)
    client = behind(app, *([config] if config else []), clock=clock)
    assert ask(client, 200, 4) == [200] * 4
    assert ask(client, 401, 3) == [401, 401, 429]
    assert client.get("/", headers={"x-status": "200"}).headers["x-ratelimit-limit"] == "2"


@pytest.mark.parametrize("kind", [(flask_module, flask), (quart_module, quart)], ids=["flask", "quart"])
def test_exempt_blueprints_are_not_charged_to_the_middleware(kind, clock):
    library, module = kind
    app = getattr(library, "Flask" if library is flask_module else "Quart")(__name__)
    part, inner = library.Blueprint("part", __name__), library.Blueprint("inner", __name__)
    part.get("/status", endpoint="status")(lambda: "well")
    inner.get("/deep", endpoint="deep")(lambda: "well")
    app.get("/page", endpoint="page")(lambda: "page")
    part.register_blueprint(inner)
    app.register_blueprint(module.exempt(part))
    client = behind(app, rules(1), clock=clock)
    assert statuses(client, "/status", 3) == [200] * 3
    assert statuses(client, "/deep", 3) == [200] * 3
    assert statuses(client, "/page", 2) == [200, 429]


def test_a_router_cannot_be_exempt():
    with pytest.raises(ConfigError, match="not FastAPI, which has several routes"):
        fastapi.exempt(FastAPI())


async def test_a_websocket_of_a_limited_blueprint_in_quart(clock):
    app = quart_module.Quart(__name__)
    part = quart_module.Blueprint("part", __name__)

    @part.websocket("/chat")
    async def chat():
        await quart_module.websocket.send("hello")

    app.register_blueprint(quart.limit("1/1m")(part))
    peer = {"client": ("203.0.113.9", 1234)}
    async with app.test_client().websocket("/chat", scope_base=peer) as socket:
        assert await socket.receive() == "hello"
    with pytest.raises(WebsocketResponseError) as denied:
        async with app.test_client().websocket("/chat", scope_base=peer) as socket:
            await socket.receive()
    assert denied.value.response.status_code == httpx.codes.TOO_MANY_REQUESTS


def test_a_block_that_reports_shows_its_own_limit(clock):
    app = flask_module.Flask(__name__)
    first, second = (flask.limit(text, scope=text, mode="shadow") for text in ("1/1m", "9/1m"))

    @app.get("/")
    def page():
        found = []
        for each in (first, second):
            with each.check(flask_module.request) as decision:
                found.append(not decision.within_limits)
        return found

    assert [FlaskClient(app).get("/").json for _ in range(2)] == [[False, False], [True, False]]


def test_limits_that_each_request_creates_share_a_count_by_their_scope():
    app = flask_module.Flask(__name__)

    @app.get("/")
    def page():
        with flask.limit("1/1m", scope="created-in-each-request").check(flask_module.request):
            return "page"

    app.testing = False
    assert [status == 200 for status in statuses(FlaskClient(app), "/", 4)] == [True, False, False, False]


def test_tasks_that_share_a_block_release_their_own_slots(clock):
    limit = starlette.limit("2/1m concurrency name=slots", scope="export")
    held = []

    async def page(request):
        block = limit.check(request)
        entered, leave = asyncio.Event(), asyncio.Event()

        async def first():
            async with block:
                entered.set()
                await leave.wait()

        task = asyncio.create_task(first())
        await entered.wait()
        clock.advance(30)
        async with block:
            leave.set()
            await task
            clock.advance(31)
            decision = await limit.peek_async(request, cost=0)
            held.append(decision.used)
        return PlainTextResponse("page")

    client = behind(Starlette(routes=[Route("/", page)]), rules(100), clock=clock)
    assert client.get("/").status_code == 200
    assert held == [[1]], "the second block is still running"


def test_a_late_denial_refunds_only_what_its_bucket_has_not_refilled_meanwhile(clock):
    """The bucket was full in between: the permit of the denied request is back already."""
    app = flask_module.Flask(__name__)
    block = flask.limit("1/1h", scope="export")
    seen = []

    @app.get("/slow")
    def slow():
        clock.advance(15)
        seen.extend(statuses(client, "/", 10))
        clock.advance(5)
        with block.check(flask_module.request):
            return "page"

    app.get("/")(lambda: "page")
    bucket = {"limit": 10, "window": "10s", "algorithm": "token_bucket"}
    client = behind(app, {"defaults": False, "unmatched": "all", "categories": {"all": bucket}}, clock=clock)
    assert client.get("/slow").status_code == 200
    clock.advance(60)
    seen.clear()
    assert statuses(client, "/", 8) == [200] * 8
    assert client.get("/slow").status_code == 429
    assert seen == [200] * 10
    assert statuses(client, "/", 10).count(200) == 5
