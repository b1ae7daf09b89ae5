"""`default_limits` and `application_limits` as `limit(…)`: with the options that a limit on a route takes."""

import flask as flask_module
import httpx
import pytest
import quart as quart_module
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from fastapi import FastAPI
from fastapi import Request as FastapiRequest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tests.cases import cases
from tests.inbound.test_routes import Client
from tidegate import ConfigError
from tidegate.inbound import (
    Request,
    RouteLimit,
    aiohttp,
    asgi,
    by_address,
    by_header,
    fastapi,
    flask,
    quart,
    starlette,
    wsgi,
)
from tidegate.inbound.testing import reset_limits
from tidegate.testing import ManualClock

START = 1_728_000_000
METHODS = ["GET", "POST"]


def starlette_app():
    async def page(request):
        return PlainTextResponse("page", int(request.headers.get("x-status", 200)))

    own = starlette.limit("50/1m", name="own")(page)
    return Starlette(routes=[Route(path, page, methods=METHODS) for path in ("/a", "/b")] + [Route("/own", own)])


def fastapi_app():
    app = FastAPI()
    for path in ("/a", "/b"):
        app.api_route(path, methods=METHODS)(page_of(path))
    app.get("/own")(fastapi.limit("50/1m", name="own")(page_of("/own")))
    return app


def page_of(path):
    async def page(request: FastapiRequest):
        return PlainTextResponse(path, int(request.headers.get("x-status", 200)))

    page.__qualname__ = page.__name__ = f"page_{path[1:]}"
    return page


def add_views(app, limit, request):
    def view_of(path):
        def view():
            return path, int(request.headers.get("x-status", 200))

        view.__qualname__ = view.__name__ = f"view_{path[1:]}"
        return view

    for path in ("/a", "/b"):
        app.add_url_rule(path, path[1:], view_of(path), methods=METHODS)
    app.add_url_rule("/own", "own", limit("50/1m", name="own")(view_of("/own")))
    return app


class WsgiClient:
    def __init__(self, app):
        self.app = app
        self._client = httpx.Client(transport=httpx.WSGITransport(app, remote_addr="203.0.113.9"), base_url="http://s")

    def get(self, path, method="GET", **options):
        return self._client.request(method, path, **options)


BUILDERS = {
    "starlette": (starlette_app, starlette.limit),
    "fastapi": (fastapi_app, fastapi.limit),
    "quart": (lambda: add_views(quart_module.Quart("site"), quart.limit, quart_module.request), quart.limit),
    "flask": (lambda: add_views(flask_module.Flask("site"), flask.limit, flask_module.request), flask.limit),
}


@pytest.fixture(params=BUILDERS)
def kind(request):
    return request.param


@pytest.fixture(params=["default_limits", "application_limits"])
def option(request):
    return request.param


def site(kind, option, *args, more=None, **options):
    """Return a client of a site whose middleware has this limit."""
    build, limit = BUILDERS[kind]
    app, given = build(), {option: limit(*args, **options), "clock": ManualClock(start=START), **(more or {})}
    if kind == "flask":
        return WsgiClient(wsgi.RateLimitMiddleware(app.wsgi_app, **given))
    return Client(asgi.RateLimitMiddleware(app, **given))


def statuses(client, path, times, method="GET", **headers):
    headers = {name.replace("_", "-"): str(value) for name, value in headers.items()}
    return [client.get(path, method, headers=headers).status_code for _ in range(times)]


def test_a_limit_without_options_is_the_same_as_its_string(kind, option):
    client = site(kind, option, "2/1m")
    reply = client.get("/a")
    assert reply.headers["x-ratelimit-limit"] == "2"
    assert statuses(client, "/a", 2) == [200, 429]
    assert statuses(client, "/b", 1) == [200 if option == "default_limits" else 429]
    assert statuses(client, "/own", 1) == [200 if option == "default_limits" else 429]


def test_each_method_may_have_its_own_count(kind, option):
    client = site(kind, option, "1/1m", per_method=True)
    assert statuses(client, "/a", 2) == [200, 429]
    assert statuses(client, "/a", 2, "POST") == [200, 429]
    expected = 200 if option == "default_limits" else 429
    assert [statuses(client, "/b", 1, method) for method in METHODS] == [[expected]] * 2


def test_only_some_methods_may_be_limited(kind, option):
    client = site(kind, option, "1/1m", methods=["POST"])
    assert statuses(client, "/a", 3) == [200] * 3
    assert statuses(client, "/a", 2, "POST") == [200, 429]


@cases("function", [False, True])
def test_a_cost(kind, option, function):
    cost = (lambda request: int(request.header("x-cost"))) if function else 3
    client = site(kind, option, "7/1m", cost=cost)
    replies = [client.get("/a", headers={"x-cost": "3"}) for _ in range(3)]
    assert [reply.headers["x-ratelimit-remaining"] for reply in replies] == ["4", "1", "1"]
    assert [reply.status_code for reply in replies] == [200, 200, 429]


def test_an_invalid_cost_counts_as_one(kind, option, caplog):
    client = site(kind, option, "2/1m", cost=lambda _: -1)
    assert statuses(client, "/a", 3) == [200, 200, 429]
    assert f"{option}: a request has an invalid cost, a cost of 1 applies" in caplog.text


def test_exempt_when_is_for_this_limit_only(kind, option):
    others = {"default_limits": "application_limits", "application_limits": "default_limits"}
    client = site(
        kind,
        option,
        "1/1m",
        exempt_when=lambda request: request.header("x-staff") == "1",
        more={others[option]: "3/1m"},
    )
    assert statuses(client, "/a", 4, x_staff=1) == [200, 200, 200, 429]


def test_the_response_decides_whether_it_counts(kind, option):
    client = site(kind, option, "2/1m", count=["4xx"])
    assert statuses(client, "/a", 4) == [200] * 4
    assert client.get("/a").headers["x-ratelimit-remaining"] == "2"
    assert statuses(client, "/a", 3, x_status=401) == [401, 401, 429]
    assert statuses(client, "/a", 1) == [429]


def test_functions_receive_the_request_of_the_middleware(kind, option):
    seen = []

    def note(request, *more):
        seen.append((type(request), request.method, request.path, request.address, *more))
        return True

    client = site(kind, option, "9/1m", count=note, cost=note, exempt_when=lambda request: not note(request))
    assert client.get("/a").status_code == 200
    expected = (Request, "GET", "/a", "203.0.113.9")
    assert seen == [expected, expected, (*expected, 200)]


def test_a_key_of_its_own(kind, option):
    user = {"more": {"key": by_header("x-user")}}
    client = site(kind, option, "1/1m", key=by_header("x-team"), **user)
    assert statuses(client, "/a", 2, x_team="red", x_user="ann") == [200, 429]
    assert statuses(client, "/a", 1, x_team="blue", x_user="ann") == [200]
    assert statuses(client, "/a", 2, x_user="bob") == [200, 429]  # the key of the middleware
    assert statuses(site(kind, option, "1/1m", key=by_address, **user), "/a", 1, x_user="ann") == [200]
    client = site(kind, option, "1/1m", key=by_address, **user)
    assert [statuses(client, "/a", 1, x_user=name) for name in ("ann", "bob")] == [[200], [429]]


def test_a_function_chooses_the_limits(kind, option, caplog):
    client = site(kind, option, lambda request: request.header("x-limit"))
    assert statuses(client, "/a", 3) == [200] * 3  # no limit
    assert statuses(client, "/a", 3, x_limit="2/1m") == [200, 200, 429]
    assert statuses(client, "/a", 2, x_limit="3/1m") == [200, 429]  # clients keep their usage
    assert statuses(client, "/a", 1, x_limit="wrong") == [429]  # the last valid limit applies
    assert f"{option}: the limit function returned an invalid limit" in caplog.text


def test_a_function_may_choose_another_unit(kind, option):
    records = []
    client = site(
        kind,
        option,
        lambda _: "5 tokens/1m",
        cost=lambda _: {"tokens": 3},
        more={"observer": records.append},
    )
    assert statuses(client, "/a", 2) == [200, 429]
    assert [record.decision.allowed for record in records] == [True, False]


def test_shadow_mode_denies_nothing(kind, option):
    assert statuses(site(kind, option, "1/1m", mode="shadow"), "/a", 3) == [200] * 3


def test_denials_count_for_the_client_and_not_for_its_key(kind, option):
    block = {"block_after": "2/1m", "block_for": "1h"}
    client = site(kind, option, "1/1m", key=by_header("x-team"), more=block)
    assert statuses(client, "/a", 3, x_team="red") == [200, 429, 429]
    assert client.get("/a", headers={"x-team": "blue"}).headers["retry-after"] == "3600"


def test_limits_are_reset(kind, option):
    build, limit = BUILDERS[kind]
    given = {option: limit("1/1m", per_method=True), "clock": ManualClock(start=START)}
    app = build()
    middleware = (
        wsgi.RateLimitMiddleware(app.wsgi_app, **given) if kind == "flask" else asgi.RateLimitMiddleware(app, **given)
    )
    client = WsgiClient(middleware) if kind == "flask" else Client(middleware)
    assert statuses(client, "/a", 2) == [200, 429]
    reset_limits(middleware)
    assert statuses(client, "/a", 2) == [200, 429]


def test_the_administrator_resets_a_client_in_a_shared_store(option, tmp_path):
    token = "a-long-admin-token"  # noqa: S105 - of this test
    more = {"store": f"sqlite:///{tmp_path}/limits.db", "admin_token": token}
    client = site("flask", option, "1/1m", per_method=True, more=more)
    assert statuses(client, "/a", 2) == [200, 429]
    action = {"json": {"action": "reset", "key": "203.0.113.9"}, "headers": {"Authorization": f"Bearer {token}"}}
    assert client.get("/api/admin/rate-limit-stats", "POST", **action).json()["done"] == "reset"
    assert statuses(client, "/a", 2) == [200, 429]
    client.app.close()


def test_a_limit_may_also_be_on_a_route(option):
    both = starlette.limit("2/1m", per_method=True)

    async def page(_request):
        return PlainTextResponse("page")

    app = Starlette(routes=[Route("/own", both(page)), Route("/a", page)])
    client = Client(asgi.RateLimitMiddleware(app, **{option: both}, clock=ManualClock(start=START)))
    assert statuses(client, "/own", 3) == [200, 200, 429]
    assert client.get("/a").status_code == (200 if option == "default_limits" else 429)


def test_an_application_without_a_framework_uses_the_base_class(make_app, option):
    api = make_app(**{option: RouteLimit("3/1m", per_method=True, cost=2)})
    assert api.statuses(2, "/") == [200, 429]
    assert api.request("/", "POST").status == 200


@cases(
    ("given", "name"),
    [
        ({"scope": "x"}, "scope"),
        ({"denied": lambda request, decision: "no"}, "denied"),
        ({"on_denied": lambda request, decision: None}, "on_denied"),
    ],
)
def test_options_that_the_middleware_has_are_rejected(option, given, name):
    with pytest.raises(ConfigError, match=f"{option}: a limit of the middleware cannot have the option '{name}'"):
        asgi.RateLimitMiddleware(Starlette(), **{option: starlette.limit("1/1m", **given)})


def test_a_limit_with_a_store_of_its_own_is_rejected(option):
    with pytest.raises(ConfigError, match=f"{option}: a limit of the middleware cannot have the option 'store'"):
        asgi.RateLimitMiddleware(Starlette(), **{option: starlette.Limits().limit("1/1m")})


def test_two_functions_for_the_response_are_rejected(option):
    given = {option: starlette.limit("1/1m", count=[200]), "count": {option: lambda request, status: True}}
    with pytest.raises(ConfigError, match=f"count: {option} has a `count` of its own"):
        asgi.RateLimitMiddleware(Starlette(), **given)


async def test_aiohttp(option):
    async def page(_request):
        return web.Response(text="page")

    limit = aiohttp.limit("2/1m", per_method=True, cost=2, exempt_when=lambda request: request.header("x-staff") == "1")
    middleware = aiohttp.RateLimitMiddleware(clock=ManualClock(start=START), **{option: limit})
    app = web.Application(middlewares=[middleware])
    app.add_routes([web.get("/a", page), web.post("/a", page)])
    async with TestClient(TestServer(app)) as client:
        staff = {"headers": {"x-staff": "1"}}
        told = [
            (await client.get("/a", **staff)).status,
            (await client.get("/a")).status,
            (await client.get("/a")).status,
        ]
        assert told == [200, 200, 429]
        assert [(await client.post("/a")).status for _ in range(2)] == [200, 429]
