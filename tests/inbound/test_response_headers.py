"""Headers and bodies of responses: styles, denials, custom responses, and the same on any store."""

import json

import pytest
from fastapi import FastAPI
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from tests.cases import cases
from tests.inbound.harness import PEER, START, AsgiHarness, WsgiHarness
from tests.inbound.recording_store import RecordingStore
from tests.inbound.test_one_decision import APPS, rules, site
from tidegate import ConfigError, Decision
from tidegate.headers import write
from tidegate.inbound import asgi
from tidegate.inbound._client.request import Request
from tidegate.inbound._responses.accept import prefers_json
from tidegate.inbound._responses.response import Response, ResponseWriter
from tidegate.stores._memory.store import MemoryStore
from tidegate.testing import ManualClock

ONE = {"categories": {"read": {"limit": 1}}}


@cases("style", ["x", "ietf", "both", "none"])
def test_header_styles_write_their_headers(make_app, style):
    api = make_app({"categories": {"read": {"limits": ["2/1m", "100/1h"]}}}, headers=style)
    reply = api.request()
    names = {name.lower() for name, _ in reply.fields} - {"x-app"}
    x, ietf = {"x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"}, {"ratelimit", "ratelimit-policy"}
    assert names == {"x": x, "ietf": ietf, "both": x | ietf, "none": set()}[style]
    api.request()
    denied = api.request()
    assert denied.status == 429
    assert denied["retry-after"] == "60"
    if style in ("x", "both"):
        assert denied["x-ratelimit-limit"] == "2"  # the tightest
    if style in ("ietf", "both"):
        assert denied["ratelimit"] == '"read-1m";r=0;t=60, "read-1h";r=98;t=3600'


def test_an_unknown_header_style_is_rejected(make_app):
    with pytest.raises(ConfigError, match="headers: must be one of x, ietf, both, none"):
        make_app(headers="y")


def test_headers_show_the_tightest_of_several_limits(make_app):
    api = make_app({"categories": {"read": {"limits": ["3/1m", "5/1h"]}}})
    assert [(api.request()["x-ratelimit-limit"], api.clock.advance(30))[0] for _ in range(5)] == [
        "3",
        "3",
        "3",
        "5",
        "5",
    ]
    denied = api.request()
    assert (denied.status, denied["x-ratelimit-limit"], denied["retry-after"]) == (429, "5", str(3600 - 150))


def test_a_denial_by_one_limit_does_not_charge_another(make_app):
    api = make_app({"categories": {"read": {"limits": ["1/1m", "5/1h"]}}}, headers="ietf")
    api.statuses(10)
    assert api.request()["ratelimit"] == '"read-1m";r=0;t=60, "read-1h";r=4;t=3600'


@cases("wait", [0.000001, 0.3, 0.999999, 1.0, 59.0])
def test_retry_after_is_in_whole_seconds_rounded_up(make_app, wait):
    api = make_app({"categories": {"read": {"limit": 1, "window": "1m"}}})
    api.request()
    api.clock.advance(60 - wait)
    retry = api.request()["retry-after"]
    assert retry.isdecimal()
    assert int(retry) >= 1
    assert 0 <= int(retry) - wait < 1 or int(retry) == 1
    api.clock.advance(int(retry))
    assert api.request().status == 200


def test_a_cost_above_the_limit_has_no_retry_after(make_app):
    api = make_app({"categories": {"read": {"limit": 5, "cost": 5}}})
    category_limiter = api.limiter.category_limiters["read"]
    decision = category_limiter.limiter.peek("x", 6)
    answer = api.limiter.response_writer.write_denial(fake_request(), decision, category_limiter.category.policy)
    assert answer.status == 429
    assert "retry-after" not in dict(api.limiter.response_writer.raw_fields(decision))


def fake_request(accept=None):
    return Request("GET", "/", PEER, {}, lambda name: accept if name == "accept" else None)


@cases(
    ("accept", "json_wanted"),
    [
        (None, False),
        ("", False),
        ("*/*", False),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", False),
        ("application/json", True),
        ("application/problem+json", True),
        ("APPLICATION/JSON ; Q=1", True),
        ("application/json, text/plain, */*", True),
        ("text/plain, application/json", False),
        ("text/plain;q=0.5, application/json", True),
        ("application/json;q=0.4, text/plain;q=0.5", False),
        ("application/json;q=0", False),
        ("application/json;q=", False),
        ("application/json;q=nan", False),
        ("application/json;q=7", False),
        ("json" * 20_000, False),
        ("," * 60_000 + "application/json", False),
        ("application/json;;;q", False),
        ("application/json;;v=1", True),
    ],
)
def test_the_accept_header_selects_the_body(accept, json_wanted):
    assert prefers_json(accept) is json_wanted


def test_denials_in_json_are_problem_details(make_app):
    api = make_app(ONE)
    api.request()
    reply = api.request(headers=[("Accept", "application/json")])
    assert reply["content-type"] == "application/problem+json"
    assert json.loads(reply.body) == {
        "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
        "title": "Request cannot be satisfied as assigned quota has been exceeded",
        "status": 429,
        "detail": "Rate limit exceeded. Try again in 60 seconds.",
        "violated-policies": ["read"],
    }


@cases(
    ("made", "status", "kind", "body"),
    [
        ("slow down", 429, "text/plain; charset=utf-8", b"slow down"),
        ({"error": "slow"}, 429, "application/json", b'{"error": "slow"}'),
        (Response(418, b"teapot", (("Content-Type", "x/y"),)), 418, "x/y", b"teapot"),
        (None, 429, "text/plain", b"Rate limit exceeded. Try again later."),
    ],
)
def test_custom_denial_responses(make_app, made, status, kind, body):
    calls = []
    api = make_app(ONE, denied=lambda request, decision: calls.append((request, decision)) or made)
    api.request()
    reply = api.request()
    assert (reply.status, reply["content-type"], reply.body) == (status, kind, body)
    assert reply["cache-control"] == "no-store"
    assert reply.headers.get("retry-after") == ("60" if status == 429 else None)
    ((request, decision),) = calls
    assert (request.method, request.path, request.address) == ("GET", "/api/feeds", PEER)
    assert isinstance(decision, Decision)


def test_a_denied_head_request_has_no_body(make_app):
    api = make_app(ONE)
    api.request()
    reply = api.request(method="HEAD")
    assert (reply.status, reply.body, reply["content-length"]) == (429, b"", "37")


def test_raw_fields_equal_the_general_header_writer(make_app):
    """For every algorithm, allowed and denied, one limit and several."""
    for algorithm in ("sliding_log", "token_bucket", "fixed_window", "sliding_window", "calendar_window"):
        window = {"window": "minute"} if algorithm == "calendar_window" else {"window": "90s"}
        for extra in ([], [{"limit": 4, "window": "1h"}]):
            limits = [{"limit": 3, "algorithm": algorithm, "name": "one", **window}, *extra]
            api = make_app({"categories": {"read": {"limits": limits}}})
            limiter = api.limiter.category_limiters["read"].limiter
            for _ in range(6):
                decision = limiter.try_acquire("x", 1)
                expected = [(name.lower().encode(), value.encode()) for name, value in write(decision, "x")]
                assert ResponseWriter().raw_fields(decision) == expected
                api.clock.advance(7)


@given(
    moves=st.lists(st.integers(0, 40_000_000), max_size=25),
    algorithm=st.sampled_from(["sliding_log", "token_bucket", "fixed_window"]),
)
@example(moves=[0, 0, 61_000_000, 0], algorithm="sliding_log")
def test_headers_are_the_same_on_any_store(moves, algorithm):
    """The fields of a category with one limit, including clocks that step back."""
    config = {"categories": {"read": {"limit": 4, "window": "1m", "algorithm": algorithm}}}
    clock = ManualClock(START)
    apis = [WsgiHarness(config), WsgiHarness(config, clock=clock, store=RecordingStore(clock))]
    for microseconds in moves:
        first, second = [(reply.status, reply.fields) for reply in [api.request() for api in apis]]
        assert first == second
        for api in apis:
            api.clock.advance((microseconds - 5_000_000) / 1_000_000)


LIMITS = ("5/1m sliding_log", "5/1h sliding_log", "4/10s token_bucket", "3/10s burst=9", "2000/1d sliding_log")


@pytest.mark.parametrize("style", ["x", "ietf", "both"])
@given(
    limits=st.lists(st.sampled_from(LIMITS), min_size=2, max_size=2, unique=True),
    steps=st.lists(st.integers(0, 9_000_000), max_size=12),
)
def test_limits_that_are_charged_together_show_the_same_on_any_store(style, limits, steps):
    """The category of a request, and two limits of its route."""
    clocks = ManualClock(START), ManualClock(START)
    stores = MemoryStore(clock=clocks[0]), RecordingStore(clocks[1])
    pair = [(limit, {"name": name}) for limit, name in zip(limits, ("outer", "inner"), strict=True)]
    clients = [
        site(APPS["starlette"], clock, *pair, rules(6), store, headers=style)[0]
        for clock, store in zip(clocks, stores, strict=True)
    ]
    for microseconds in steps:
        first, second = [client.get("/limited") for client in clients]
        assert (first.status_code, first.headers) == (second.status_code, second.headers)
        for clock in clocks:
            clock.advance(microseconds / 1_000_000)


def test_the_reset_header_is_an_absolute_time_rounded_up(make_app):
    api = make_app()
    assert int(api.request()["x-ratelimit-reset"]) == START + 60
    api.clock.advance(0.5)
    assert int(api.request()["x-ratelimit-reset"]) == START + 61  # rounded up


def test_a_denial_that_the_application_turns_into_another_status_has_no_retry_after(make_app):
    """The inner limiter denies, and the application in between responds with 200: nobody is told to retry."""

    def hide(build):
        inner = build(ONE)

        async def asgi(scope, receive, send):
            async def send_as_200(message):
                await send({**message, "status": 200} if message["type"] == "http.response.start" else message)

            await inner.middleware(scope, receive, send_as_200)

        def wsgi(environ, start):
            return inner.middleware(environ, lambda _status, headers, *rest: start("200 OK", headers, *rest))

        return asgi if isinstance(inner, AsgiHarness) else wsgi

    api = make_app({"categories": {"read": {"limit": 50}}}, app=hide(make_app))
    replies = [api.request() for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 200, 200]
    assert [reply["x-ratelimit-remaining"] for reply in replies] == ["0", "0", "0"]
    assert [reply.headers.get("retry-after") for reply in replies] == [None, None, None]


@cases("style", ["x", "ietf", "both", "none"])
@cases("status", [200, 401, 403, 404, 500])
def test_a_response_that_was_let_through_never_has_retry_after(make_app, style, status):
    """Although its penalty exceeds the limit."""
    rules = {"categories": {"read": {"limit": 2, "penalty": {str(status): 5}}}}
    api = make_app(rules, headers=style)
    reply = api.request(headers=[("x-status", str(status))])
    assert (reply.status, "retry-after" in reply.headers) == (status, False)


@pytest.mark.parametrize("framework", [Starlette, FastAPI])
def test_the_500_of_an_unhandled_exception_has_the_headers_if_the_middleware_wraps_the_application(framework):
    async def fail(request):
        raise ValueError("as intended")

    app = framework()
    app.router.routes.append(Route("/fail", fail))
    client = TestClient(asgi.RateLimitMiddleware(app), raise_server_exceptions=False)
    reply = client.get("/fail")
    assert (reply.status_code, reply.headers["x-ratelimit-remaining"]) == (500, "59")
