"""The bodies of denials: sent as given, and chosen by Accept."""

import json

import pytest
from fastapi import Depends, FastAPI, HTTPException
from fastapi.exception_handlers import http_exception_handler
from fastapi.responses import JSONResponse

from tests.cases import cases
from tests.inbound.test_routes import Client
from tidegate.errors import ConfigError
from tidegate.inbound import Response
from tidegate.inbound.fastapi import Limits, RateLimitExceeded
from tidegate.testing import ManualClock

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"
ONE = {"categories": {"all": {"limit": 1, "window": "1m", "endpoints": ["/*"]}}}


def fastapi_client(headers="x", **options):
    app = FastAPI()

    limits = Limits(clock=ManualClock(start=1_728_000_000), headers=headers)

    @app.get("/", dependencies=[Depends(limits.limit("1/1m", **options))])
    async def home():
        return "hello"

    return app, Client(app)


@cases(
    ("made", "kind", "body"),
    [
        ({"error": "slow down"}, "application/json", b'{"error": "slow down"}'),
        ("slow down", "text/plain; charset=utf-8", b"slow down"),
        (b"\x00\xff", "text/plain; charset=utf-8", b"\x00\xff"),
        ('{"error": 1}', "application/json", b'{"error": 1}'),
        ("{not json", "text/plain; charset=utf-8", b"{not json"),
        ("<!doctype html><p>slow", "text/html; charset=utf-8", b"<!doctype html><p>slow"),
        (Response(418, b"<a/>", (("Content-Type", "application/xml"),)), "application/xml", b"<a/>"),
        (Response(429, b"mine", (("Content-Type", "text/plain"),)), "text/plain", b"mine"),
    ],
)
def test_a_custom_body_is_sent_as_given(make_app, made, kind, body):
    api = make_app(ONE, denied=lambda request, decision: made)
    api.request("/")
    denied = api.request("/")
    assert (denied.body, denied["content-type"].split(";")[0]) == (body, kind.split(";")[0])
    _, client = fastapi_client(denied=lambda request, decision: made)
    client.get("/")
    reply = client.get("/")
    assert (reply.content, reply.headers["content-type"]) == (body, kind)
    assert reply.status_code == denied.status
    assert ("retry-after" in reply.headers) == (denied.status == 429)


def test_fastapi_default_denials_look_like_its_other_errors():
    _, client = fastapi_client()
    client.get("/")
    reply = client.get("/")
    assert (reply.status_code, reply.json()) == (429, {"detail": "Rate limit exceeded. Try again later."})
    assert reply.headers["retry-after"] == "60"


def test_fastapi_problem_details_are_not_encoded_twice():
    _, client = fastapi_client()
    client.get("/")
    reply = client.get("/", headers={"Accept": "application/problem+json"})
    assert reply.headers["content-type"] == "application/problem+json"
    assert reply.json()["violated-policies"] == ["1m"]


@pytest.mark.parametrize("handled", [RateLimitExceeded, HTTPException, 429])
def test_exception_handlers_of_the_application_see_our_exception(handled):
    app, client = fastapi_client(denied=lambda request, decision: {"error": "slow down"})
    seen = []

    @app.exception_handler(handled)
    async def handle(request, error):
        seen.append(error)
        return JSONResponse({"mine": error.detail, "quota": error.decision.limits[0].quota}, error.status_code)

    client.get("/")
    reply = client.get("/")
    assert (reply.status_code, reply.json()) == (429, {"mine": {"error": "slow down"}, "quota": 1})
    assert isinstance(seen[0], RateLimitExceeded)


def test_a_handler_that_calls_the_default_one_gets_the_object_not_a_string():
    app, client = fastapi_client(denied=lambda request, decision: {"error": "slow down"})

    @app.exception_handler(HTTPException)
    async def handle(request, error):
        return await http_exception_handler(request, error)

    client.get("/")
    assert client.get("/").json() == {"detail": {"error": "slow down"}}


def test_other_errors_of_the_application_are_unchanged():
    app, client = fastapi_client(denied=lambda request, decision: "no")

    @app.get("/missing")
    async def missing():
        raise HTTPException(404, "not here")

    assert [client.get("/").status_code for _ in range(2)] == [200, 429]
    assert (client.get("/missing").status_code, client.get("/missing").json()) == (404, {"detail": "not here"})


# ---- Accept ----------------------------------------------------------------------------------------------------------


@cases(
    ("accept", "kind"),
    [
        (None, "text/plain"),
        ("*/*", "text/plain"),
        (BROWSER, "text/plain"),
        ("text/html;q=0.5, application/json", "application/problem+json"),
        ("application/json;q=0.2, text/plain;q=0.3", "text/plain"),
        ("application/json;q=0", "text/plain"),
    ],
)
def test_the_format_is_chosen_by_accept(make_app, accept, kind):
    api = make_app(ONE)
    headers = [("Accept", accept)] if accept else []
    api.request("/")
    denied = api.request("/", headers=headers)
    assert (denied.status, denied["content-type"], denied["retry-after"]) == (429, kind, "60")
    if "json" in kind:
        assert json.loads(denied.body)["status"] == 429


def test_a_function_returns_a_page_for_browsers(make_app):
    def page(request, decision):
        if "text/html" in (request.header("accept") or ""):
            return f"<!doctype html><p>Try again in {decision.retry_after:.0f} seconds</p>"
        return None

    api = make_app(ONE, denied=page)
    api.request("/a")
    denied = api.request("/a", headers=[("Accept", BROWSER)])
    assert denied.body == b"<!doctype html><p>Try again in 60 seconds</p>"
    assert (denied["content-type"], denied["retry-after"]) == ("text/html; charset=utf-8", "60")
    assert api.request("/a")["content-type"] == "text/plain"


# ---- header names ----------------------------------------------------------------------------------------------------


def test_header_names_can_be_replaced(make_app):
    names = {"limit": "X-My-Limit", "remaining": "X-My-Left"}
    api = make_app(ONE, headers=names)
    first, denied = api.request("/"), api.request("/")
    assert (first["x-my-limit"], first["x-my-left"], denied["x-my-left"]) == ("1", "0", "0")
    assert "x-ratelimit-reset" in first.headers
    assert not {"x-ratelimit-limit", "x-ratelimit-remaining"} & set(denied.headers)
    assert denied["retry-after"] == "60"


def test_header_names_apply_to_routes_without_a_middleware():
    _, client = fastapi_client(headers={"reset": "X-Ends"})
    assert "x-ends" in client.get("/").headers


@cases(
    ("headers", "message"),
    [
        ({"limt": "X-L"}, r"headers\.limt: unknown header: did you mean 'limit'\?"),
        ({"other": "X-L"}, r"headers\.other: unknown header: expected one of limit, remaining, reset"),
        ({"limit": "X L"}, r"headers\.limit: must be the name of a header such as 'X-My-Limit', not 'X L'"),
        ({"limit": None}, r"headers\.limit: must be the name of a header"),
        ({"limit": "A", "reset": "a"}, r"headers\.reset: 'a' is already the name of limit"),
        ({"limit": "retry-after"}, r"headers\.limit: 'retry-after' is already the name of Retry-After"),
        ({"retry_after": "X-R"}, r"headers\.retry_after: Retry-After cannot be renamed"),
        ("y", "headers: must be one of x, ietf, both, none, not 'y'"),
        (7, "headers: must be one of x, ietf, both, none, not 7"),
    ],
)
def test_bad_header_names_are_config_errors(make_app, headers, message):
    with pytest.raises(ConfigError, match=message):
        make_app(ONE, headers=headers)
    with pytest.raises(ConfigError, match=message):
        Limits(headers=headers)
