"""`block_after` of a single limit: clients that it denies too often are blocked where it applies, and only there."""

import asyncio

import flask
import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tidegate import ConfigError
from tidegate.inbound import BlockedDecision, by_header
from tidegate.inbound import flask as flask_limits
from tidegate.inbound import starlette as starlette_limits
from tidegate.inbound.asgi import RateLimitMiddleware as AsgiMiddleware
from tidegate.inbound.wsgi import RateLimitMiddleware as WsgiMiddleware
from tidegate.testing import ManualClock

START = 1_728_000_000
NOTHING = {"defaults": False, "unmatched": None}


@pytest.fixture
def clock():
    return ManualClock(start=START)


def flask_site(limit, clock, *, middleware):
    """Return a function that requests a path of a Flask application; the same limit is at /login and /again."""
    app = flask.Flask("site")
    app.add_url_rule("/login", "login", limit(lambda: "login"))
    app.add_url_rule("/again", "again", limit(lambda: "again"))
    app.add_url_rule("/other", "other", lambda: "other")
    if middleware:
        app.wsgi_app = WsgiMiddleware(app.wsgi_app, NOTHING, clock=clock)
    client = app.test_client()
    return lambda path, **headers: client.get(path, headers={name.replace("_", "-"): headers[name] for name in headers})


def starlette_site(limit, clock, *, middleware):
    async def page(request):
        return PlainTextResponse("page")

    async def other(request):
        return PlainTextResponse("other")

    limited = limit(page)
    app = Starlette(routes=[Route("/login", limited), Route("/again", limited), Route("/other", other)])
    if middleware:
        app = AsgiMiddleware(app, NOTHING, clock=clock)

    async def get(path, headers):
        transport = httpx.ASGITransport(app, client=("203.0.113.9", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://site") as client:
            return await client.get(path, headers=headers)

    return lambda path, **headers: asyncio.run(get(path, {name.replace("_", "-"): headers[name] for name in headers}))


SITES = {"flask": (flask_limits, flask_site), "starlette": (starlette_limits, starlette_site)}


@pytest.fixture(params=[(name, middleware) for name in SITES for middleware in (True, False)], ids=str)
def make(request, clock):
    """Return a function that makes a site, with or without a middleware, with one limit."""
    name, middleware = request.param
    module, site = SITES[name]

    def make_site(*args, **options):
        limit = module.Limits(clock=clock).limit if not middleware else module.limit
        return site(limit(*args, **options), clock, middleware=middleware)

    return make_site


def test_a_client_that_a_limit_denies_too_often_is_blocked_there(make, clock):
    ask = make("1/10s", scope="login", block_after="2/1m", block_for="5m")
    assert [ask("/login").status_code for _ in range(3)] == [200, 429, 429]
    assert ask("/login").headers["retry-after"] == "300"
    clock.advance(10)  # the limit itself would allow a request
    replies = [ask("/login"), ask("/again"), ask("/other")]
    assert [reply.status_code for reply in replies] == [429, 429, 200]
    assert replies[0].headers["retry-after"] == "290"
    assert "Blocked until" in replies[0].text
    clock.advance(290)
    assert ask("/login").status_code == 200


def test_the_denial_that_blocks_says_so(make):
    ask = make("1/10s", scope="login", block_after={"1/1m": "5m"})
    ask("/login")
    reply = ask("/login")
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "300")


def test_a_function_of_the_limit_knows_a_block_from_a_denial(make):
    seen = []

    def denied(request, decision):
        seen.append(isinstance(decision, BlockedDecision))
        return "tea" if seen[-1] else "slow down"

    ask = make("1/10s", scope="login", block_after="2/1m", block_for="5m", denied=denied)
    assert [ask("/login").text for _ in range(4)][1:] == ["slow down", "tea", "tea"]
    assert seen == [False, True, True]


def test_blocks_are_for_the_key_of_the_limit(make):
    ask = make("1/10s", scope="login", key=by_header("x-user"), block_after="1/1m", block_for="5m")
    assert [ask("/login", x_user="ann").status_code for _ in range(2)] == [200, 429]
    assert ask("/login", x_user="bob").status_code == 200
    assert ask("/login", x_user="ann").headers["retry-after"] == "300"


def test_without_a_scope_each_route_blocks_for_itself(make, clock):
    ask = make("1/10s", block_after="1/1m", block_for="5m")
    assert [ask("/login").status_code for _ in range(2)] == [200, 429]
    clock.advance(10)
    assert ask("/login").status_code == 429


def test_a_blocked_request_is_charged_to_no_other_limit(clock):
    app = flask.Flask("site")
    strict = flask_limits.limit("1/10s", scope="strict", block_after="1/1m", block_for="5m")
    app.add_url_rule("/login", "login", flask_limits.limit("5/1h", scope="hourly")(strict(lambda: "login")))
    app.add_url_rule("/other", "other", flask_limits.limit("5/1h", scope="hourly")(lambda: "other"))
    app.wsgi_app = WsgiMiddleware(app.wsgi_app, NOTHING, clock=clock)
    client = app.test_client()
    assert [client.get("/login").status_code for _ in range(4)] == [200, 429, 429, 429]
    assert client.get("/other").headers["x-ratelimit-remaining"] == "3"


def test_blocks_of_a_limit_can_be_read(clock):
    limits = flask_limits.Limits(clock=clock)
    attempts = limits.limit("1/10s", scope="attempts", block_after="1/1m", block_for="5m")
    app = flask.Flask("site")
    app.add_url_rule("/login", "login", attempts(lambda: "login"))
    app.add_url_rule("/form", "form", lambda: str(attempts.peek(flask.request).retry_after))
    client = app.test_client()
    assert [client.get("/login").status_code for _ in range(2)] == [200, 429]
    assert client.get("/form").text == "300.0"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_after": "3/1m"}, "block_after: requires block_for"),
        ({"block_for": "3m"}, "block_for: requires block_after"),
        ({"block_after": {"3/1m": "5m"}, "mode": "shadow"}, "block_after: cannot be combined with mode='shadow'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        flask_limits.limit("1/1m", **options)


def test_a_limit_of_the_middleware_has_no_blocks_of_its_own():
    limit = flask_limits.limit("1/1m", block_after="3/1m", block_for="5m")
    with pytest.raises(ConfigError, match=r"default_limits: a limit of the middleware .* 'block_after'"):
        WsgiMiddleware(lambda environ, start: [], NOTHING, default_limits=limit)
