"""Limits on single routes in each framework, with and without a middleware."""

import asyncio
import functools
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI, WebSocket
from flask import Blueprint, Flask
from quart import Quart
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from tests.inbound.harness import run_websocket
from tests.inbound.sites import django_site
from tidegate import ConfigError, Denied, Limit
from tidegate.inbound import asgi, django, fastapi, flask, functions, starlette, wsgi
from tidegate.inbound._client.request import by_api_key, by_header
from tidegate.testing import ManualClock

START = 1_728_000_000


@pytest.fixture
def clock():
    return ManualClock(start=START)


class Client:
    """Sends requests to an ASGI application in process, from any address."""

    def __init__(self, app, peer="203.0.113.9"):
        self.app = app
        self.peer = peer

    def get(self, path, method="GET", peer=None, **options):
        async def ask():
            transport = httpx.ASGITransport(self.app, client=(peer or self.peer, 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://site") as client:
                return await client.request(method, path, **options)

        return asyncio.run(ask())


# ---- FastAPI ---------------------------------------------------------------------------------------------------------


def fastapi_site(limit: Any) -> FastAPI:
    app = FastAPI()
    router = APIRouter(prefix="/r", dependencies=[Depends(limit)])

    @app.get("/items/{number}", dependencies=[Depends(limit)])
    async def item(number: int):
        return number

    @app.post("/items/{number}", dependencies=[Depends(limit)])
    def change(number: int):
        return number

    @router.get("/one")
    async def one():
        return 1

    @router.get("/two")
    async def two():
        return 2

    @app.websocket("/ws", dependencies=[Depends(limit)])
    async def socket(websocket: WebSocket):
        await websocket.accept()
        await websocket.close()

    app.include_router(router)
    return app


def test_fastapi_counts_by_route_not_by_url(clock):
    client = Client(fastapi_site(fastapi.limit("2/1m")))
    replies = [client.get(f"/items/{number}") for number in (1, 2, 3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert replies[0].headers["x-ratelimit-remaining"] == "1"
    denied = replies[2]
    assert denied.json() == {"detail": "Rate limit exceeded. Try again later."}
    assert denied.headers["retry-after"] == "60"
    assert denied.headers["cache-control"] == "no-store"
    assert denied.headers["x-ratelimit-reset"] == str(START + 60)
    assert client.get("/items/1", "POST").status_code == 200  # a separate route
    assert client.get("/r/one").status_code == 200
    assert client.get("/items/1", peer="198.51.100.1").status_code == 200
    clock.advance(60)
    assert client.get("/items/1").status_code == 200


def test_fastapi_routes_of_several_routers_and_mounts_are_counted_separately(clock):
    """Their templates are equal within their routers, but each is a separate route."""
    limit = Depends(fastapi.limit("1/1m"))

    def part() -> APIRouter:
        router = APIRouter()

        @router.get("/items/{number}", dependencies=[limit])
        async def item(number: int) -> int:
            return number

        return router

    app, mounted, tenants = FastAPI(), FastAPI(), FastAPI()
    shared = part()
    app.include_router(shared, prefix="/a")
    app.include_router(shared, prefix="/b")
    mounted.include_router(part())
    app.mount("/c", mounted)
    tenants.include_router(part())
    app.mount("/d/{tenant}", tenants)
    client = Client(app)
    for prefix in ("/a", "/b", "/c", "/d/ann"):
        assert [client.get(f"{prefix}/items/{number}").status_code for number in (1, 2)] == [200, 429]
    assert client.get("/d/bob/items/1").status_code == 429  # a client cannot have another count by its mount point


def test_fastapi_routes_with_a_scope_are_counted_together(clock):
    client = Client(fastapi_site(fastapi.limit("2/1m", scope="all")))
    assert [client.get(path).status_code for path in ("/items/1", "/r/one", "/r/two")] == [200, 200, 429]


async def test_fastapi_limits_websocket_connections(clock):
    app = fastapi_site(fastapi.limit("1/1m"))
    assert [message["type"] for message in await run_websocket(app, [], path="/ws")] == [
        "websocket.accept",
        "websocket.close",
    ]
    (close,) = await run_websocket(app, [], path="/ws")
    assert (close["type"], close["code"]) == ("websocket.close", 1008)


def test_fastapi_behind_a_middleware_uses_its_store_clients_and_headers(clock):
    limit = fastapi.limit("2/1m")
    site = fastapi_site(limit)
    app = asgi.RateLimitMiddleware(site, clock=clock, trusted_proxies=["203.0.113.9"])
    client = Client(app)
    ann = {"headers": {"X-Forwarded-For": "1.1.1.1"}}
    replies = [client.get("/items/1", **ann) for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert replies[0].headers.get_list("x-ratelimit-limit") == ["2"]  # the tightest, once
    assert replies[2].headers.get_list("retry-after") == ["60"]
    assert client.get("/items/1", headers={"X-Forwarded-For": "2.2.2.2"}).status_code == 200
    assert app.request_limiter.store.metrics()["entries"] == 4  # two clients, the category and the route


def test_fastapi_exception_handlers_can_replace_denials(clock):
    app = fastapi_site(fastapi.limit("1/1m"))

    @app.exception_handler(fastapi.RateLimitExceeded)
    async def answer(request, error):
        return PlainTextResponse(f"{error.decision.retry_after:.0f} s", 429, error.headers)

    client = Client(app)
    client.get("/r/one")
    assert client.get("/r/one").text == "60 s"


# ---- Starlette -------------------------------------------------------------------------------------------------------


def starlette_site(limit):
    @limit
    async def items(request):
        return PlainTextResponse("item")

    @limit
    def threaded(request):
        return PlainTextResponse("thread")

    class Page(HTTPEndpoint):
        @limit
        async def get(self, request):
            return PlainTextResponse("page")

    return Starlette(
        routes=[
            Route("/items/{number}", items),
            Route("/threaded", threaded),
            Mount("/mounted", routes=[Route("/page", Page)]),
        ]
    )


def test_starlette_limits_endpoints(clock):
    client = Client(starlette_site(starlette.limit("2/1m")))
    for paths in (["/items/1", "/items/2", "/items/3"], ["/threaded"] * 3, ["/mounted/page"] * 3):
        replies = [client.get(path) for path in paths]
        assert [reply.status_code for reply in replies] == [200, 200, 429]
        assert [reply.headers["x-ratelimit-remaining"] for reply in replies] == ["1", "0", "0"]
        assert replies[2].text == "Rate limit exceeded. Try again later."
    problem = client.get("/items/1", headers={"Accept": "application/json"})
    assert problem.json()["violated-policies"] == ["1m"]


def test_starlette_behind_a_middleware_writes_headers_once(clock):
    limit = starlette.limit("2/1m", denied=lambda request, decision: {"no": request.url.path})
    app = asgi.RateLimitMiddleware(starlette_site(limit), clock=clock)
    client = Client(app)
    replies = [client.get("/items/1") for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert replies[2].json() == {"no": "/items/1"}
    assert replies[2].headers.get_list("retry-after") == ["60"]
    assert replies[2].headers.get_list("x-ratelimit-limit") == ["2"]
    assert [client.get("/threaded").status_code for _ in range(3)] == [200, 200, 429]


def test_an_endpoint_without_a_request_argument_raises(clock):
    @starlette.limit("2/1m")
    async def nothing():
        return None

    with pytest.raises(ConfigError, match="has no request argument"):
        asyncio.run(nothing())


# ---- keys, costs, dynamic limits -------------------------------------------------------------------------------------


def one_route(limit):
    @limit
    async def page(request):
        return PlainTextResponse("page")

    return Client(Starlette(routes=[Route("/{name}", page)]))


def test_limits_per_user_per_api_key_and_per_address_combined(clock):
    by_user = starlette.limit("2/1m", key=by_header("x-user"))
    by_key = starlette.limit("3/1m", key=by_api_key())
    by_address = starlette.limit("5/1m")
    client = one_route(lambda page: by_address(by_user(by_key(page))))

    def ask(user, key, peer="203.0.113.9"):
        return client.get("/page", peer=peer, headers={"x-user": user, "x-api-key": key}).status_code

    assert [ask("ann", "k1"), ask("ann", "k1"), ask("ann", "k1")] == [200, 200, 429]  # the user's limit
    assert [ask("bob", "k1"), ask("eve", "k1")] == [200, 429]  # the key's
    assert [ask("zoe", "k2"), ask("zoe", "k2"), ask("fay", "k3")] == [200, 200, 429]  # the address's: five were allowed
    assert ask("fay", "k3", peer="198.51.100.1") == 200


def test_limits_returned_by_a_function(clock):
    plans = {"free": "1/1m", "paid": ["3/1m", "100/1d"], "own": Limit(2, "1m"), "staff": None}
    limit = starlette.limit(lambda request: plans[request.headers["x-plan"]], key=by_header("x-plan"))
    client = one_route(limit)

    def count(plan):
        return [client.get("/page", headers={"x-plan": plan}).status_code for _ in range(4)].count(200)

    assert {plan: count(plan) for plan in plans} == {"free": 1, "paid": 3, "own": 2, "staff": 4}


def test_a_changed_dynamic_limit_keeps_the_usage(clock):
    plan = ["3/1m"]
    client = one_route(starlette.limit(lambda request: plan[0]))
    assert [client.get("/page").status_code for _ in range(4)] == [200, 200, 200, 429]
    plan[0] = "5/1m"
    assert [client.get("/page").status_code for _ in range(3)] == [200, 200, 429]


def test_costs_by_function_and_shadow_mode(clock):
    client = one_route(starlette.limit("10/1m", cost=lambda request: len(request.url.path)))
    assert [client.get(path).status_code for path in ("/abcd", "/abcd", "/")] == [200, 200, 404]
    assert client.get("/a").status_code == 429
    shadow = one_route(starlette.limit("1/1m", mode="shadow"))
    assert [shadow.get("/page").status_code for _ in range(3)] == [200] * 3


def test_route_limits_use_sliding_log_by_default(clock):
    client = one_route(starlette.limit("2/1m"))
    assert client.get("/page").status_code == 200
    clock.advance(30)
    assert [client.get("/page").status_code for _ in range(2)] == [200, 429]  # a bucket would have refilled one
    bucket = one_route(starlette.limit("2/1m token_bucket"))
    bucket.get("/page")
    clock.advance(30)
    assert [bucket.get("/page").status_code for _ in range(2)] == [200, 200]


def test_exempt_clients_of_the_middleware_are_exempt_on_routes(clock):
    site = starlette_site(starlette.limit("1/1m"))
    client = Client(asgi.RateLimitMiddleware(site, {"exempt_clients": ["203.0.113.9"]}, clock=clock))
    assert [client.get("/items/1").status_code for _ in range(3)] == [200] * 3


def test_a_limit_on_an_exempt_route_identifies_the_client(clock):
    site = starlette_site(starlette.limit("1/1m"))
    app = asgi.RateLimitMiddleware(site, {"exempt": ["/items/*"]}, clock=clock, trusted_proxies=["203.0.113.9"])
    client = Client(app)
    replies = [client.get("/items/1", headers={"X-Forwarded-For": f"1.1.1.{host}"}) for host in (1, 2, 1)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert [reply.headers.get_list("x-ratelimit-limit") for reply in replies] == [["1"]] * 3
    assert replies[2].headers["retry-after"] == "60"
    flask_app = flask_site(flask.limit("1/1m"))
    flask_app.wsgi_app = wsgi.RateLimitMiddleware(  # type: ignore[method-assign]  # as Flask's docs do
        flask_app.wsgi_app, {"exempt": ["/items/*"]}, clock=clock, trusted_proxies=["127.0.0.1"]
    )
    ask = flask_app.test_client().get
    replies = [ask("/items/1", headers={"X-Forwarded-For": f"1.1.1.{host}"}) for host in (1, 2, 1)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert replies[0].headers.getlist("X-RateLimit-Limit") == ["1"]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (["five a minute"], {}, "expected a limit such as"),
        ([[]], {}, "needs at least one limit"),
        ([5], {}, "expected a limit such as"),
        (["5/1m"], {"key": "x-user"}, "must be a function such as by_header"),
        (["5/1m"], {"mode": "quiet"}, "must be one of enforce, shadow"),
    ],
)
def test_invalid_arguments_are_rejected_by_the_constructor(arguments, options, message):
    with pytest.raises(ConfigError, match=message):
        starlette.limit(*arguments, **options)


# ---- Flask, Django, plain functions ----------------------------------------------------------------------------------


def flask_site(limit):
    app = Flask(__name__)

    @app.get("/items/<number>")
    @limit
    def items(number):
        return f"item {number}"

    @app.get("/pair")
    @limit
    def pair():
        return {"a": 1}, 201

    return app


def test_flask_limits_views(clock):
    client = flask_site(flask.limit("2/1m")).test_client()
    replies = [client.get(f"/items/{number}") for number in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert [reply.headers["X-RateLimit-Remaining"] for reply in replies] == ["1", "0", "0"]
    assert replies[2].text == "Rate limit exceeded. Try again later."
    assert replies[2].headers["Retry-After"] == "60"
    assert client.get("/pair").status_code == 201
    assert client.get("/items/1", environ_base={"REMOTE_ADDR": "198.51.100.1"}).status_code == 200


def test_flask_behind_a_middleware_writes_headers_once(clock):
    app = flask_site(flask.limit("2/1m"))
    app.wsgi_app = wsgi.RateLimitMiddleware(app.wsgi_app, clock=clock)  # type: ignore[method-assign]  # as Flask's docs do
    replies = [app.test_client().get("/items/1") for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert replies[0].headers.getlist("X-RateLimit-Limit") == ["2"]
    assert replies[2].headers.getlist("Retry-After") == ["60"]


def test_django_limits_views(clock):
    from django.http import HttpResponse  # noqa: PLC0415 - configured by django_site
    from django.test import RequestFactory  # noqa: PLC0415 - as above

    assert django_site.urlpatterns

    @django.limit("2/1m")
    def view(request, name):
        return HttpResponse(name)

    ask = RequestFactory().get
    replies = [view(ask(f"/hello/{name}"), name) for name in ("ann", "bob", "eve")]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert [reply["X-RateLimit-Remaining"] for reply in replies] == ["1", "0", "0"]
    assert replies[2].content == b"Rate limit exceeded. Try again later."
    assert view(ask("/", REMOTE_ADDR="198.51.100.1"), "ann").status_code == 200

    @django.limit("1/1m")
    async def coroutine(request):
        return HttpResponse("hello")

    assert [asyncio.run(coroutine(ask("/"))).status_code for _ in range(2)] == [200, 429]


def test_django_paths_with_non_ascii_characters_do_not_share_a_count(clock):
    from django.http import HttpResponse  # noqa: PLC0415 - configured by django_site
    from django.test import AsyncRequestFactory, RequestFactory  # noqa: PLC0415 - as above

    limit = django.limit("1/1m", key=lambda request: request.path)

    @limit
    def view(request):
        return HttpResponse("hello")

    @limit
    async def coroutine(request):
        return HttpResponse("hello")

    paths = ["/\u0436", "/\u0448", "/\xe9", "/\xe8", "/%FF", "/%FE"]
    ask, ask_async = RequestFactory().get, AsyncRequestFactory().get
    for path in paths:
        assert [view(ask(path)).status_code for _ in range(2)] == [200, 429]
    for path in paths[:4]:  # the server has replaced the others
        assert [asyncio.run(coroutine(ask_async(path))).status_code for _ in range(2)] == [200, 429]


def test_limits_on_plain_functions(clock):
    limits = functions.Limits(clock=clock)
    limit = limits.limit("2/1m", key=lambda user, size=1: user, cost=lambda user, size=1: size)

    @limit
    def render(user, size=1):
        return f"{user} {size}"

    assert render("ann", size=2) == "ann 2"
    with pytest.raises(Denied) as denied:
        render("ann")
    assert denied.value.decision.retry_after == 60
    assert render("bob") == "bob 1"

    @limit
    async def send(user):
        return user

    async def some():
        assert await send("ann") == "ann"  # a separate count
        assert await send("ann") == "ann"
        with pytest.raises(Denied):
            await send("ann")

    asyncio.run(some())


# ---- endpoints that are not functions --------------------------------------------------------------------------------


class CallableEndpoint:
    async def __call__(self, request):
        return PlainTextResponse("page")


async def partial_endpoint(text, request):
    return PlainTextResponse(text)


@pytest.mark.parametrize("behind", [True, False], ids=["middleware", "alone"])
@pytest.mark.parametrize("endpoint", [CallableEndpoint(), functools.partial(partial_endpoint, "page")])
def test_starlette_endpoints_may_be_objects_or_partial_functions(clock, endpoint, behind):
    app: Any = Starlette(routes=[Route("/", starlette.limit("1/1m")(endpoint))])
    if behind:
        app = asgi.RateLimitMiddleware(app, {"defaults": False, "unmatched": None}, clock=clock)
    assert [Client(app).get("/").status_code for _ in range(2)] == [200, 429]


def test_fastapi_endpoints_may_be_objects_or_partial_functions(clock):
    class Page:
        async def __call__(self, size: int = 1) -> int:
            return size

    async def sized(name: str, size: int = 1) -> str:
        return name * size

    app = FastAPI()
    app.get("/object")(fastapi.limit("1/1m")(Page()))
    app.get("/partial")(fastapi.limit("1/1m")(functools.partial(sized, "a")))
    replies = [Client(app).get(path) for path in ("/object?size=2", "/object", "/partial?size=2", "/partial")]
    assert [reply.status_code for reply in replies] == [200, 429, 200, 429]
    assert [reply.json() for reply in replies if reply.is_success] == [2, "aa"]


# ---- FastAPI's dependency_overrides, which tests use -----------------------------------------------------------------


@pytest.mark.parametrize("behind", [True, False], ids=["middleware", "alone"])
@pytest.mark.parametrize("key", [None, lambda request: "all"], ids=["plain", "function"])
def test_a_test_may_override_one_of_several_limits(clock, behind, key):
    first, second = fastapi.limit("1/1m"), fastapi.limit("2/1h", key=key)
    app = FastAPI()

    @app.get("/", dependencies=[Depends(first), Depends(second)])
    def page():
        return "page"

    if behind:
        app.add_middleware(asgi.RateLimitMiddleware, config={"defaults": False, "unmatched": None}, clock=clock)
    app.dependency_overrides[first] = lambda: None
    assert [Client(app).get("/").status_code for _ in range(3)] == [200, 200, 429]
    clock.advance(3600)
    app.dependency_overrides = {second: fastapi.limit("3/1h", key=key)}  # another limit
    assert [Client(app).get("/").status_code for _ in range(2)] == [200, 429]
    app.dependency_overrides = {first: lambda: None, second: lambda: None}
    assert [Client(app).get("/").status_code for _ in range(5)] == [200] * 5


def test_the_category_is_decided_before_an_endpoint_whose_limits_a_test_overrides(clock):
    limit = fastapi.limit("1/1m")
    ran = []
    app = FastAPI()
    app.get("/", dependencies=[Depends(limit)])(lambda: ran.append("page"))
    config = {"defaults": False, "unmatched": "all", "categories": {"all": {"limit": 2, "window": "1m"}}}
    app.add_middleware(asgi.RateLimitMiddleware, config=config, clock=clock)
    app.dependency_overrides[limit] = lambda: None
    assert [Client(app).get("/").status_code for _ in range(3)] == [200, 200, 429]
    assert ran == ["page"] * 2


def test_decorators_that_would_share_a_count_are_refused_at_once():
    with pytest.raises(ConfigError, match="would share a count: give one of them another name"):

        @fastapi.limit("10/1m")
        @fastapi.limit("5/1m")
        async def page():
            return "page"


# ---- endpoints of Flask and Quart with a dot -------------------------------------------------------------------------


@pytest.mark.parametrize("blueprint", [True, False])
def test_a_dot_in_the_name_of_an_endpoint_is_not_a_blueprint(clock, blueprint):
    app = Flask(__name__)
    app.add_url_rule("/page", "reports.page", lambda: "page")
    if blueprint:
        part = Blueprint("part", __name__)
        part.get("/part", endpoint="part")(lambda: "part")
        app.register_blueprint(flask.limit("1/1m")(part))
    app.wsgi_app = wsgi.RateLimitMiddleware(app.wsgi_app, default_limits="2/1m", clock=clock)  # type: ignore[method-assign]  # as Flask's docs do
    client = app.test_client()
    assert [client.get("/page").status_code for _ in range(3)] == [200, 200, 429]


def test_a_dot_in_the_name_of_an_endpoint_of_quart_is_not_a_blueprint(clock):
    app = Quart(__name__)
    app.add_url_rule("/page", "reports.page", lambda: "page")
    site = asgi.RateLimitMiddleware(app, default_limits="2/1m", clock=clock)
    assert [Client(site).get("/page").status_code for _ in range(3)] == [200, 200, 429]
