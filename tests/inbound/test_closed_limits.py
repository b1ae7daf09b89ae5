"""A limit of 0 denies every request; it is legal for routes and in the inbound configuration only."""

import json

import pytest
from flask import Flask
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tests.inbound.test_routes import Client
from tidegate import ConfigError, Denied, Limit, Limiter
from tidegate._policy import Policy
from tidegate.inbound import fastapi, flask, functions, starlette
from tidegate.inbound._rules.config import load_rules

STATS = "/api/admin/rate-limit-stats"
CLOSED = {"categories": {"shut": {"limits": ["0/1m"], "endpoints": ["/shut"]}}}


@pytest.mark.parametrize(
    "shut",
    [
        {"limits": ["0/1m"]},
        {"limit": 0},
        {"limits": ["0 per day", "5/1m"]},
        {"limits": ["0/month"]},
        {"limits": [{"limit": 0, "window": "1m"}]},
        {"limit": 0, "algorithm": "token_bucket"},
        {"limit": 0, "cost": 3},
        {"limit": 0, "count": [401]},
    ],
)
@pytest.mark.parametrize("store", ["memory://", "sqlite"])
def test_a_closed_category_denies_every_request(make_app, tmp_path, shut, store):
    url = f"sqlite:///{tmp_path}/limits.db" if store == "sqlite" else store
    api = make_app({"categories": {"shut": {**shut, "endpoints": ["/shut"]}}}, store=url)
    for _ in range(2):
        denied = api.request("/shut")
        assert (denied.status, denied["x-ratelimit-limit"], denied.remaining) == (429, "0", 0)
        assert "retry-after" not in denied.headers
        assert denied.body == b"Rate limit exceeded. The limit is 0: no request is allowed."
    assert api.request("/open").status == 200
    assert api.reached == ["/open"]
    details = api.request("/shut", headers=[("Accept", "application/json")])
    assert json.loads(details.body)["detail"] == "Rate limit exceeded. The limit is 0: no request is allowed."


def test_statistics_and_styles_of_a_closed_category(make_app):
    api = make_app(CLOSED, headers="both", log_every=1)
    denied = api.request("/shut")
    assert denied["ratelimit"].startswith('"shut-1m";r=0')
    stats = json.loads(api.request(f"{STATS}?top=5", peer="127.0.0.1").body)
    assert stats["decisions"]["shut"] == {"allowed": 0, "denied": 1}


def test_a_closed_limit_charges_no_other_limit(make_app):
    config = {"categories": {"shut": {"limits": ["0/1m", "2/1h"], "endpoints": ["/shut"]}}}
    api = make_app(config)
    api.statuses(5, "/shut")
    api.limiter.update_rules(load_rules({"categories": {"shut": {"limits": ["2/1h"], "endpoints": ["/shut"]}}}))
    assert api.statuses(3, "/shut") == [200, 200, 429]


def test_a_closed_category_stays_closed_while_the_store_is_unavailable():
    for setting in ("allow", "local"):
        config = {"categories": {"shut": {"limit": 0, "on_store_error": setting, "endpoints": ["/"]}}}
        assert load_rules(config).categories[0].policy.on_store_error == "deny"


def test_route_limits_of_0():
    app = Flask(__name__)

    @app.get("/")
    @flask.limit("0/1m")
    def home():
        return "hello"

    denied = app.test_client().get("/")
    assert (denied.status_code, denied.headers["X-RateLimit-Limit"]) == (429, "0")
    assert "Retry-After" not in denied.headers

    @functions.limit(["0/1m", "5/1h"])
    def work():
        raise AssertionError

    with pytest.raises(Denied) as caught:
        work()
    assert caught.value.decision.retry_after is None


def test_a_dynamic_route_limit_may_close_and_open():
    @starlette.limit(lambda request: "5/1m" if request.headers.get("x-open") else "0/1m")
    async def home(request):
        return PlainTextResponse("hello")

    client = Client(Starlette(routes=[Route("/", home)]))
    found = [client.get("/", headers=headers).status_code for headers in ({}, {"x-open": "1"}, {})]
    assert found == [429, 200, 429]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Limit.parse("0/1m"),
        lambda: Limit(0, "1m"),
        lambda: Limiter("0/1m"),
        lambda: Policy("p", "0/1m"),
        lambda: load_rules({"block_after": "0/1m", "block_for": "1m"}),
    ],
)
def test_everywhere_else_a_limit_of_0_is_a_config_error(make):
    with pytest.raises(ConfigError, match="must be an integer from 1"):
        make()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0/1x", "unknown unit of time 'x'"),
        ("0/1m burst=5", "burst: cannot be combined with a limit of 0"),
        ("-1/1m", "expected a limit such as '60/1m'"),
    ],
)
def test_mistakes_in_a_limit_of_0(text, message):
    with pytest.raises(ConfigError, match=message):
        fastapi.limit(text)
    with pytest.raises(ConfigError, match=message):
        load_rules({"categories": {"a": {"limits": [text], "endpoints": ["/"]}}})
