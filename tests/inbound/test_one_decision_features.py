"""Blocks, plans, custom denials and disabled limits, together with limits on routes: one decision per request."""

import json

import pytest
from flask import Flask, abort, request
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tests.inbound.recording_store import RecordingStore
from tests.inbound.test_one_decision import (
    APPS,
    PEER,
    START,
    FlaskClient,
    flask_app,
    rules,
    site,
    starlette_app,
    statuses,
)
from tests.inbound.test_routes import Client
from tidegate.inbound import asgi, flask, starlette, wsgi
from tidegate.testing import ManualClock

BLOCK = {"block_after": "3/1m", "block_for": "10m"}


@pytest.fixture
def clock():
    return ManualClock(start=START)


@pytest.fixture(params=APPS)
def kind(request):
    return APPS[request.param]


def pair(limits="1/1m"):
    """Return the arguments of a tight limit and of a wide one."""
    return (limits, {"name": "tight"}), ("50/1h", {"name": "wide"})


def test_denials_of_routes_count_once_each_and_block_the_client(kind, clock):
    client, _ = site(kind, clock, *pair(), config={**rules(100), **BLOCK})
    assert statuses(client, "/limited", 3) == [200, 429, 429]
    assert statuses(client, "/plain", 1) == [200], "two denials do not block"
    last = client.get("/limited")  # the third denial
    assert (last.status_code, last.headers["retry-after"]) == (429, "600")
    assert "Rate limit exceeded too often" in last.text
    assert statuses(client, "/plain", 1) == [429]
    assert client.get("/plain", peer="203.0.113.10").status_code == 200
    clock.advance(600)
    assert statuses(client, "/plain", 1) == [200]


def test_denials_of_a_category_before_routes_count_once_each(kind, clock):
    client, _ = site(kind, clock, *pair("50/1m"), config={**rules(1), **BLOCK})
    assert statuses(client, "/limited", 3) == [200, 429, 429]
    assert client.get("/limited").headers["retry-after"] == "600"
    details = json.loads(client.get("/plain", headers={"accept": "application/json"}).text)
    assert details["type"].endswith("#abnormal-usage-detected")


def test_a_blocked_client_is_denied_at_routes_without_a_category(kind, clock):
    config = {**rules(1), **BLOCK, "unmatched": None}
    config["categories"]["all"]["endpoints"] = ["/plain"]
    store = RecordingStore(clock)
    client, _ = site(kind, clock, *pair("50/1m"), config=config, store=store)
    assert statuses(client, "/plain", 4) == [200, 429, 429, 429]
    before = store.usages()
    assert statuses(client, "/limited", 2) == [429, 429]
    assert store.usages() == before, "a blocked request is charged to no limit"


def test_a_plan_is_decided_together_with_the_limits_of_the_route(kind, clock):
    config = rules(1)
    config["categories"]["all"]["plans"] = {"pro": "4/1m"}
    plan = {"plan": lambda request: request.header("x-plan")}
    store = RecordingStore(clock)
    client, _ = site(kind, clock, *pair("3/1m"), config=config, store=store, **plan)
    assert statuses(client, "/limited", 4, headers={"x-plan": "pro"}) == [200, 200, 200, 429]
    assert store.usages()["all", PEER] == 3
    assert statuses(client, "/plain", 2, headers={"x-plan": "pro"}) == [200, 429]


def test_disabled_rules_disable_the_limits_of_routes(kind, clock):
    client, _ = site(kind, clock, *pair(), config={**rules(), "enabled": False})
    assert statuses(client, "/limited", 3) == [200, 200, 200]


@pytest.mark.parametrize(
    ("middleware", "make_app", "limit", "make_client"),
    [
        (asgi.RateLimitMiddleware, starlette_app, starlette.limit, Client),
        (wsgi.RateLimitMiddleware, flask_app, flask.limit, FlaskClient),
    ],
    ids=["asgi", "wsgi"],
)
@pytest.mark.parametrize("limited", [True, False], ids=["limits on routes", "no limits on routes"])
def test_what_an_inner_middleware_denies_is_not_charged_to_the_outer(
    clock, middleware, make_app, limit, make_client, limited
):
    stores = [RecordingStore(clock) for _ in range(2)]
    keep = [limit(*each[:1], **each[1]) for each in pair("50/1m")] if limited else [lambda view: view] * 2
    app = make_app(*keep)
    inner = middleware(getattr(app, "wsgi_app", app), rules(1), stores[0])
    outer = app.wsgi_app = middleware(inner, rules(10), stores[1])
    client = make_client(app if make_client is FlaskClient else outer)
    assert statuses(client, "/plain", 4) == [200, 429, 429, 429]
    assert stores[1].usages() == {("all", PEER): 1}


def test_errors_that_are_responses_have_their_status_without_a_middleware(clock):
    @starlette.limit("2/1m", count=[401])
    async def login(request):
        if request.headers.get("password") != "right":
            raise HTTPException(401)
        return PlainTextResponse("welcome")

    client = Client(Starlette(routes=[Route("/", login)]))
    assert statuses(client, "/", 3, headers={"password": "right"}) == [200] * 3
    replies = [client.get("/") for _ in range(3)]
    assert [reply.status_code for reply in replies] == [401, 401, 429]
    assert [reply.headers["x-ratelimit-remaining"] for reply in replies] == ["1", "0", "0"]


def test_aborted_views_of_flask_have_their_status_without_a_middleware(clock):
    app = Flask(__name__)

    @app.get("/")
    @flask.limit("2/1m", count=[401])
    def login():
        if request.headers.get("password") != "right":
            abort(401)
        return "welcome"

    client = FlaskClient(app)
    assert statuses(client, "/", 3, headers={"password": "right"}) == [200] * 3
    assert statuses(client, "/", 3) == [401, 401, 429]
