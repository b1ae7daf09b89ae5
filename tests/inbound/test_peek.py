"""`limit.peek(request)` reads a limit and charges nothing, in every framework that has `check`."""

import asyncio

import flask as flask_module
import httpx
import pytest
import quart as quart_module
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from fastapi import FastAPI, Request
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tests.cases import cases
from tests.inbound.recording_store import RecordingStore
from tests.inbound.sites import django_site
from tests.inbound.test_one_decision import FlaskClient, rules
from tests.inbound.test_routes import Client
from tests.inbound.test_store_failures import BrokenStore
from tidegate import ConfigError
from tidegate.inbound import aiohttp, asgi, django, fastapi, flask, quart, starlette, wsgi

assert django_site.urlpatterns  # configures Django

SHARED = {"scope": "logins"}


def tell(decision, now):
    """Write decisions as the body of a response: about the request, and about one that costs nothing."""
    if decision is None or now is None:
        return f"none {now}" if decision is None else "failed"
    return f"{decision.allowed} {now.remaining} {round(decision.retry_after or 0)}"


def starlette_site(limit):
    async def read(request):
        return PlainTextResponse(tell(await limit.peek_async(request), await limit.peek_async(request, 0)))

    async def login(request):
        async with limit.check(request):
            return PlainTextResponse("in")

    return Starlette(routes=[Route("/read", read), Route("/login", login)])


def starlette_thread_site(limit):
    def read(request):
        return PlainTextResponse(tell(limit.peek(request), limit.peek(request, cost=0)))

    return Starlette(routes=[Route("/read", read), Route("/login", limit(lambda _request: PlainTextResponse("in")))])


def fastapi_site(limit):
    app = FastAPI()

    async def read(request: Request):
        return PlainTextResponse(tell(await limit.peek_async(request), await limit.peek_async(request, 0)))

    app.get("/read")(read)

    @app.get("/login")
    @limit
    def login():
        return PlainTextResponse("in")

    return app


def quart_site(limit):
    app = quart_module.Quart(__name__)

    @app.get("/read")
    async def read():
        return tell(await limit.peek_async(quart_module.request), await limit.peek_async(quart_module.request, 0))

    @app.get("/login")
    @limit
    async def login():
        return "in"

    return app


def flask_site(limit):
    app = flask_module.Flask(__name__)

    @app.get("/read")
    def read():
        return tell(limit.peek(flask_module.request), limit.peek(flask_module.request, cost=0))

    @app.get("/login")
    @limit
    def login():
        return "in"

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


def behind(app, *configs, **options):
    """Return a client of an application behind a middleware for each config."""
    if isinstance(app, flask_module.Flask):
        for config in configs:
            app.wsgi_app = wsgi.RateLimitMiddleware(app.wsgi_app, config, **options)  # type: ignore[method-assign]  # as Flask's docs do
        return FlaskClient(app)
    for config in configs:
        app = asgi.RateLimitMiddleware(app, config, **options)
    return Client(app)


@cases("configs", [(), (rules(100),), (rules(90), rules(100))])
def test_it_tells_what_is_left_and_charges_nothing(site, clock, configs):
    build, limit = site
    limited = limit("2/1m", **SHARED)
    client = behind(build(limited), *configs, clock=clock)
    told = [client.get(path).text for path in ("/read", "/read", "/login", "/read", "/login", "/read", "/read")]
    assert told == ["True 2 0", "True 2 0", "in", "True 1 0", "in", "False 0 60", "False 0 60"]
    assert client.get("/read", peer="203.0.113.10").text == "True 2 0"  # another client
    clock.advance(60)
    assert client.get("/read").text == "True 2 0"


@pytest.mark.parametrize("name", ["starlette", "starlette-thread", "fastapi", "quart"])
async def test_shared_stores_are_read(name, clock, tmp_path):
    build, limit = SITES[name]
    url = f"sqlite:///{tmp_path}/limits.db"
    app = asgi.RateLimitMiddleware(build(limit("2/1m", **SHARED)), rules(100), store=url, clock=clock)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://site") as client:
        told = [(await client.get(path)).text for path in ("/read", "/login", "/read")]
    await app.close()
    assert told == ["True 2 0", "in", "True 1 0"]


def test_flask_reads_a_shared_store(clock, tmp_path):
    app = flask_site(flask.limit("2/1m", **SHARED))
    client = behind(app, rules(100), clock=clock, store=f"sqlite:///{tmp_path}/limits.db")
    assert [client.get(path).text for path in ("/read", "/login", "/read")] == ["True 2 0", "in", "True 1 0"]
    app.wsgi_app.close()


def test_it_uses_the_options_of_the_limit(site, clock):
    build, limit = site
    limited = limit(
        lambda request: request.headers.get("x-limit"),
        key=lambda request: request.headers.get("x-user"),
        cost=lambda request: int(request.headers.get("x-cost", 1)),
        exempt_when=lambda request: "x-staff" in request.headers,
        **SHARED,
    )
    client = behind(build(limited), rules(100), clock=clock)
    five = {"x-limit": "5/1m"}
    assert client.get("/read").text == "none None"  # no limit
    assert client.get("/read", headers={**five, "x-staff": "1"}).text == "none None"
    assert client.get("/login", headers={**five, "x-cost": "3"}).text == "in"
    assert client.get("/read", headers=five).text == "True 2 0"
    assert client.get("/read", headers={**five, "x-cost": "3"}).text == "False 2 60"
    assert client.get("/read", headers={**five, "x-user": "ann"}).text == "True 5 0"


def test_the_key_of_the_middleware_applies(site, clock):
    build, limit = site
    client = behind(build(limit("2/1m", **SHARED)), rules(100), key=lambda request: request.header("x-user"))
    ann = {"headers": {"x-user": "ann"}}
    assert client.get("/login", **ann).text == "in"
    assert (client.get("/read", **ann).text, client.get("/read").text) == ("True 1 0", "True 2 0")


def test_a_limit_without_a_scope_cannot_be_read():
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_ADDR": "203.0.113.9"}
    with pytest.raises(ConfigError, match="scope: a limit that is read needs a scope"):
        flask.limit("2/1m").peek(flask_module.Request(environ))


@cases(("on_store_error", "told"), [("allow", "none None"), ("deny", "False 0 1")])
def test_a_store_error_is_handled_as_for_a_charge(site, clock, on_store_error, told):
    build, limit = site
    limited = limit("2/1m", **SHARED, on_store_error=on_store_error)
    config = {"defaults": False, "unmatched": None}
    client = behind(build(limited), config, store=BrokenStore(), clock=clock)
    assert client.get("/read").text == told


def test_django_views(clock):
    from django.http import HttpResponse  # noqa: PLC0415 - configured by django_site
    from django.test import RequestFactory  # noqa: PLC0415 - as above

    logins = django.limit("1/1m", **SHARED)
    login = logins(lambda _request: HttpResponse("in"))

    async def read(request):
        return tell(await logins.peek_async(request), await logins.peek_async(request, 0))

    request = RequestFactory().get("/")
    told = [
        tell(logins.peek(request), logins.peek(request, cost=0)),
        login(request).status_code,
        tell(logins.peek(request), logins.peek(request, cost=0)),
    ]
    assert [*told, asyncio.run(read(request))] == ["True 1 0", 200, "False 0 60", "False 0 60"]


async def test_aiohttp_handlers(clock):
    logins = aiohttp.limit("1/1m", **SHARED)

    async def read(request):
        return web.Response(text=tell(await logins.peek_async(request), await logins.peek_async(request, 0)))

    async def login(request):
        async with logins.check(request):
            return web.Response(text="in")

    middleware = aiohttp.RateLimitMiddleware(rules(100), clock=clock)
    app = web.Application(middlewares=[middleware])
    app.add_routes([web.get("/read", read), web.get("/login", login)])
    async with TestClient(TestServer(app)) as client:
        told = [await (await client.get(path)).text() for path in ("/read", "/login", "/read")]
    assert told == ["True 1 0", "in", "False 0 60"]


async def test_a_denied_view_may_read_the_limit_without_effect_on_other_limits(clock):
    logins = starlette.limit("1/1m", **SHARED)

    @starlette.limit("5/1m", name="pages")
    async def page(request):
        return PlainTextResponse(tell(await logins.peek_async(request), await logins.peek_async(request, 0)))

    app = asgi.RateLimitMiddleware(Starlette(routes=[Route("/", page)]), rules(10), RecordingStore(clock), clock=clock)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://site") as client:
        reply = await client.get("/")
    assert (reply.text, reply.headers["x-ratelimit-limit"]) == ("True 1 0", "5")
    assert sum(app.request_limiter.store.usages().values()) == 2  # the category and `pages`
