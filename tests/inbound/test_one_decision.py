"""All limits that apply to a request are decided together: what one of them denies is charged to none."""

import functools
import json

import pytest
from fastapi import APIRouter, Depends, FastAPI
from fastapi.requests import HTTPConnection
from flask import Blueprint, Flask
from flask.views import MethodView
from quart import Blueprint as QuartBlueprint
from quart import Quart
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from tests.cases import cases
from tests.inbound.recording_store import RecordingStore
from tests.inbound.test_routes import Client
from tidegate import ConfigError
from tidegate.inbound import asgi, by_api_key, by_header, fastapi, flask, quart, starlette, wsgi
from tidegate.inbound.testing import reset_limits
from tidegate.testing import ManualClock

START = 1_728_000_000
PEER = "203.0.113.9"


@pytest.fixture
def clock():
    return ManualClock(start=START)


def rules(limit=10):
    return {"defaults": False, "unmatched": "all", "categories": {"all": {"limit": limit, "window": "1m"}}}


# ---- applications in each framework: one page "limited" with two limits, one page "plain" with none ------------------


def starlette_app(outer, inner):
    @outer
    @inner
    async def limited(request):
        return PlainTextResponse("page")

    async def plain(request):
        return PlainTextResponse("plain")

    return Starlette(routes=[Route("/limited", limited), Route("/plain", plain)])


def threaded_app(outer, inner):
    @outer
    @inner
    def limited(request):
        return PlainTextResponse("page")

    def plain(request):
        return PlainTextResponse("plain")

    return Starlette(routes=[Mount("/", routes=[Route("/limited", limited), Route("/plain", plain)])])


def class_app(outer, inner):
    class Page(HTTPEndpoint):
        @outer
        @inner
        async def get(self, request):
            return PlainTextResponse("page")

    class Plain(HTTPEndpoint):
        async def get(self, request):
            return PlainTextResponse("plain")

    return Starlette(routes=[Route("/limited", Page), Route("/plain", Plain)])


def between(function):
    @functools.wraps(function)
    async def wrapper(request):
        return await function(request)

    return wrapper


def between_app(outer, inner):
    @outer
    @between
    @inner
    async def limited(request):
        return PlainTextResponse("page")

    async def plain(request):
        return PlainTextResponse("plain")

    return Starlette(routes=[Route("/limited", limited), Route("/plain", plain)])


def fastapi_decorators(outer: fastapi.limit, inner: fastapi.limit) -> FastAPI:
    app = FastAPI()

    @app.get("/limited")
    @outer
    @inner
    async def limited(size: int = 1):
        return size

    @app.get("/plain")
    def plain():
        return 1

    return app


def fastapi_sync_decorators(outer: fastapi.limit, inner: fastapi.limit) -> FastAPI:
    app = FastAPI()
    router = APIRouter()

    @router.get("/limited")
    @outer
    @inner
    def limited(size: int = 1):
        return size

    @router.get("/plain")
    async def plain():
        return 1

    app.include_router(router)
    return app


def fastapi_dependencies(outer, inner):
    app = FastAPI()
    router = APIRouter(dependencies=[Depends(outer)])

    @router.get("/limited", dependencies=[Depends(inner)])
    async def limited():
        return 1

    @app.get("/plain")
    async def plain():
        return 1

    app.include_router(router)
    return app


def flask_app(outer, inner):
    app = Flask(__name__)

    @app.get("/limited")
    @outer
    @inner
    def limited():
        return "page"

    @app.get("/plain")
    def plain():
        return "plain"

    return app


def flask_blueprint(outer, inner):
    app = Flask(__name__)
    blueprint = Blueprint("part", __name__)

    @blueprint.get("/limited")
    @inner
    def limited():
        return "page"

    @app.get("/plain")
    def plain():
        return "plain"

    app.register_blueprint(outer(blueprint))
    return app


def flask_class(outer, inner):
    app = Flask(__name__)

    class Page(MethodView):
        decorators = (inner, outer)

        def get(self):
            return "page"

    class Plain(MethodView):
        def get(self):
            return "plain"

    app.add_url_rule("/limited", view_func=Page.as_view("limited"))
    app.add_url_rule("/plain", view_func=Plain.as_view("plain"))
    return app


def quart_app(outer, inner):
    app = Quart(__name__)

    @app.get("/limited")
    @outer
    @inner
    async def limited():
        return "page"

    @app.get("/plain")
    async def plain():
        return "plain"

    return app


def quart_blueprint(outer, inner):
    app = Quart(__name__)
    blueprint = QuartBlueprint("part", __name__)

    @blueprint.get("/limited")
    @inner
    async def limited():
        return "page"

    @app.get("/plain")
    async def plain():
        return "plain"

    app.register_blueprint(outer(blueprint))
    return app


def quart_threaded(outer, inner):
    app = Quart(__name__)

    @app.get("/limited")
    @outer
    @inner
    def limited():
        return "page"

    @app.get("/plain")
    def plain():
        return "plain"

    return app


class FlaskClient:
    """The interface of Client for Flask."""

    def __init__(self, app):
        self.client = app.test_client()

    def get(self, path, peer=PEER, **options):
        return self.client.get(path, environ_base={"REMOTE_ADDR": peer}, buffered=True, **options)  # closes the body


APPS = {
    "starlette": (starlette_app, starlette.limit),
    "starlette-thread": (threaded_app, starlette.limit),
    "starlette-class": (class_app, starlette.limit),
    "starlette-between": (between_app, starlette.limit),
    "fastapi": (fastapi_decorators, fastapi.limit),
    "fastapi-sync": (fastapi_sync_decorators, fastapi.limit),
    "fastapi-depends": (fastapi_dependencies, fastapi.limit),
    "quart": (quart_app, quart.limit),
    "quart-blueprint": (quart_blueprint, quart.limit),
    "quart-thread": (quart_threaded, quart.limit),
    "flask": (flask_app, flask.limit),
    "flask-blueprint": (flask_blueprint, flask.limit),
    "flask-class": (flask_class, flask.limit),
}


@pytest.fixture(params=APPS)
def kind(request):
    return APPS[request.param]


def site(kind, clock, outer, inner, config=None, store=None, **more):
    """Build an application with two limits on a page; with a middleware in front if there is a config."""
    build, limit = kind
    reset_limits(limit("1/1m"))  # what an earlier case has left in the limits that all bare ones share
    app = build(limit(*outer[:1], **outer[1]), limit(*inner[:1], **inner[1]))
    if isinstance(app, Flask):
        if config is not None:
            app.wsgi_app = wsgi.RateLimitMiddleware(app.wsgi_app, config, store or "memory://", clock=clock, **more)
            return FlaskClient(app), app.wsgi_app
        return FlaskClient(app), None
    if config is not None:
        app = asgi.RateLimitMiddleware(app, config, store or "memory://", clock=clock, **more)
        return Client(app), app
    return Client(app), None


def statuses(client, path, count, **options):
    return [client.get(path, **options).status_code for _ in range(count)]


# ---- denied requests are charged to nobody ---------------------------------------------------------------------------


@cases("swapped", [False, True])
def test_a_request_that_one_stacked_limit_denies_is_charged_to_neither(kind, clock, swapped):
    pair = [("10/1h", {"scope": "all"}), ("2/1m", {"key": by_header("x-user")})]
    outer, inner = reversed(pair) if swapped else pair
    client, _ = site(kind, clock, outer, inner)
    ann, bob = {"headers": {"x-user": "ann"}}, {"headers": {"x-user": "bob"}}
    assert statuses(client, "/limited", 12, **ann) == [200, 200, *[429] * 10]
    assert statuses(client, "/limited", 3, **bob) == [200, 200, 429]  # the shared limit was charged four times
    clock.advance(60)
    assert statuses(client, "/limited", 3, **ann) == [200, 200, 429]


def test_a_category_is_not_charged_for_what_a_route_denies(kind, clock):
    store = RecordingStore(clock)
    client, _ = site(kind, clock, ("2/1m", {}), ("50/1h", {}), rules(6), store)
    assert statuses(client, "/limited", 8) == [200, 200, *[429] * 6]
    assert statuses(client, "/plain", 5) == [200] * 4 + [429]
    assert store.usages()["all", PEER] == 6
    assert statuses(client, "/missing", 1) == [429]
    clock.advance(60)
    assert statuses(client, "/missing", 7) == [404] * 6 + [429]
    assert statuses(client, "/limited", 1) == [429]


def test_a_route_is_not_charged_for_what_a_category_denies(kind, clock):
    store = RecordingStore(clock)
    client, _ = site(kind, clock, ("5/1h", {}), ("50/1d", {}), rules(2), store)
    assert statuses(client, "/limited", 6) == [200, 200, 429, 429, 429, 429]
    clock.advance(60)
    assert statuses(client, "/limited", 6) == [200, 200, 429, 429, 429, 429]
    assert sorted(store.usages().values()) == [2, 4, 4]  # the category, the route's limits


def test_one_call_of_the_store_for_each_request(kind, clock):
    store = RecordingStore(clock)
    client, _ = site(kind, clock, ("3/1m", {}), ("50/1h", {}), rules(100), store)
    for path, count in (("/limited", 3), ("/plain", 3)):
        before = store.calls
        statuses(client, path, count)
        assert store.calls - before == count
    before = store.calls
    assert statuses(client, "/limited", 3) == [429, 429, 429]
    assert store.calls - before <= 6  # issue 34: in memory, the flow asks again for what a denial says


def test_headers_show_the_tightest_and_the_denial_names_each_limit_that_denied(kind, clock):
    client, _ = site(kind, clock, ("3/1h", {"name": "hourly"}), ("3/1m", {"name": "burst"}), rules(3))
    assert [client.get("/limited").headers["x-ratelimit-remaining"] for _ in range(3)] == ["2", "1", "0"]
    clock.advance(59)
    reply = client.get("/limited", headers={"Accept": "application/problem+json"})
    assert reply.status_code == 429
    assert int(reply.headers["x-ratelimit-limit"]) == 3
    assert len(dict(reply.headers.items())) == len(list(reply.headers.items()))  # none is repeated
    assert sorted(json.loads(reply.text)["violated-policies"]) == ["all", "burst", "hourly"]
    clock.advance(1)
    reply = client.get("/limited", headers={"Accept": "application/problem+json"})
    assert json.loads(reply.text)["violated-policies"] == ["hourly"], "only the limits that denied it"


# ---- identity --------------------------------------------------------------------------------------------------------


def test_limits_with_different_keys_on_one_route_never_share_a_count(kind, clock):
    client, _ = site(kind, clock, ("10/1m", {}), ("100/1m", {"key": by_api_key()}))
    assert statuses(client, "/limited", 11) == [200] * 10 + [429]  # without an API key, both count by address


@pytest.mark.parametrize("name", ["starlette", "fastapi", "flask"])
def test_limits_that_would_share_a_count_ask_for_a_name(name, clock):
    with pytest.raises(ConfigError, match="name="):
        site(APPS[name], clock, ("10/1m", {}), ("20/1m", {}))[0].get("/limited")
    client, _ = site(APPS[name], clock, ("3/1m", {"name": "few"}), ("2/1m", {}))
    assert statuses(client, "/limited", 3) == [200, 200, 429]


def test_reordering_decorators_or_changing_a_quota_refills_nothing(kind, clock):
    store = RecordingStore(clock)
    first, second = ("4/1m", {}), ("50/1h", {"key": by_api_key()})
    client, _ = site(kind, clock, first, second, rules(100), store)
    assert statuses(client, "/limited", 3) == [200] * 3
    before = store.usages()
    client, _ = site(kind, clock, second, ("5/1m", {}), rules(100), store)
    assert store.usages() == before
    assert statuses(client, "/limited", 3) == [200, 200, 429]
    assert len(store.usages()) == len(before)


# ---- give back -------------------------------------------------------------------------------------------------------


def test_limits_in_different_stores_give_back(clock):
    outer_store, inner_store = RecordingStore(clock), RecordingStore(clock)

    @starlette.Limits(store=outer_store).limit("10/1h token_bucket")
    @starlette.Limits(store=inner_store).limit("1/1m")
    async def page(request):
        return PlainTextResponse("page")

    client = Client(Starlette(routes=[Route("/", page)]))
    assert statuses(client, "/", 5) == [200, 429, 429, 429, 429]
    assert list(outer_store.usages().values()) == [1]


def test_a_dependency_that_needs_another_gives_back_what_was_charged_before(clock):
    app = FastAPI()

    async def login(connection: HTTPConnection):
        connection.state.user = connection.headers["x-user"]

    user_limit = fastapi.limit("1/1m", key=lambda request: request.state.user)

    @app.get("/", dependencies=[Depends(fastapi.limit("50/1h")), Depends(login), Depends(user_limit)])
    async def page():
        return 1

    store = RecordingStore(clock)
    client = Client(asgi.RateLimitMiddleware(app, rules(3), store, clock=clock))
    users = ["ann", "ann", "ann", "bob", "eve", "zoe"]
    replies = [client.get("/", headers={"x-user": user}).status_code for user in users]
    assert replies == [200, 429, 429, 200, 200, 429]
    assert sorted(store.usages().values()) == [1, 1, 1, 3, 3]


class SlottedStore(RecordingStore):
    """Cannot decide several keys together, as a Redis Cluster whose keys are in different slots."""

    instant = False

    def key_slots(self, asks):
        return [hash(policy.name) for policy, _, _ in asks]

    def apply(self, verb, asks, now=None, at=None):
        assert len(asks) == 1, "the keys of one call are in different slots of the cluster"
        return super().apply(verb, asks, now, at)


def test_a_store_that_cannot_decide_keys_together_gives_back(clock):
    store = SlottedStore(clock)
    client, _ = site(APPS["starlette"], clock, ("2/1m", {}), ("50/1h token_bucket", {}), rules(5), store)
    assert statuses(client, "/limited", 6) == [200, 200, 429, 429, 429, 429]
    assert sorted(store.usages().values()) == [2, 2, 2]
    assert statuses(client, "/plain", 4) == [200, 200, 200, 429]
