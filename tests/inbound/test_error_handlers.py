"""Handlers of the framework see the exception of a denied request, and replace the response."""

from typing import Any

import flask as flask_module
import pytest
import quart as quart_module
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from werkzeug.exceptions import TooManyRequests

from tests.cases import cases
from tests.inbound.sites import django_site
from tests.inbound.test_one_decision import FlaskClient, rules, statuses
from tests.inbound.test_route_options import WsgiClient
from tests.inbound.test_routes import Client
from tidegate.inbound import asgi, django, flask, quart, starlette, wsgi
from tidegate.inbound.testing import reset_limits

assert django_site.urlpatterns  # configures Django


@pytest.fixture(params=[True, False], ids=["middleware", "alone"])
def behind(request):
    return request.param


@cases("kind", [429, TooManyRequests, "own"])
@cases("library", [flask_module, quart_module])
@cases("place", ["view", "blueprint", "block", "inner"])
def test_error_handlers_of_flask_and_quart(library, kind, place, behind, clock, own_limits):
    reset_limits(own_limits)
    is_flask = library is flask_module
    module: Any = flask if is_flask else quart
    app: Any = library.Flask(__name__) if is_flask else library.Quart(__name__)
    limit = module.limit("1/1m", scope="page")
    part = library.Blueprint("part", __name__)

    def call_check():
        with limit.check(library.request):
            return "page"

    page = {"view": limit(lambda: "page"), "block": call_check, "inner": lambda: "the " + limit(lambda: "page")()}
    (part if place == "blueprint" else app).get("/", endpoint="page")(page.get(place, lambda: "page"))
    app.register_blueprint(limit(part) if place == "blueprint" else part)

    @app.errorhandler(module.RateLimitExceeded if kind == "own" else kind)
    def handle(error):
        return {"reason": error.decision.violated, "text": error.description}, 429

    if behind and is_flask:
        app.wsgi_app = wsgi.RateLimitMiddleware(app.wsgi_app, rules(9), clock=clock)
    elif behind:
        app = asgi.RateLimitMiddleware(app, rules(9), clock=clock)
    client = FlaskClient(app) if is_flask else Client(app)
    assert client.get("/").status_code == 200
    reply = client.get("/")
    body = reply.get_json() if is_flask else reply.json()
    assert (reply.status_code, body["reason"]) == (429, ["1m"])
    assert body["text"].startswith("Rate limit exceeded")
    assert reply.headers["retry-after"] == "60"
    assert reply.headers["x-ratelimit-remaining"] == "0"


@pytest.mark.parametrize("kind", [429, HTTPException, starlette.RateLimitExceeded])
def test_exception_handlers_of_starlette(kind, behind, clock):
    @starlette.limit("1/1m")
    async def page(request):
        return PlainTextResponse("page")

    async def handle(request, error):
        return JSONResponse({"reason": error.decision.violated}, 429, error.headers)

    app: Any = Starlette(routes=[Route("/", page)], exception_handlers={kind: handle})
    client = Client(asgi.RateLimitMiddleware(app, rules(9), clock=clock) if behind else app)
    assert client.get("/").status_code == 200
    reply = client.get("/")
    assert (reply.status_code, reply.json()) == (429, {"reason": ["1m"]})
    assert reply.headers["retry-after"] == "60"


@pytest.mark.parametrize("application", [Starlette, FastAPI])
def test_without_a_handler_a_custom_body_is_sent_as_it_is(application, behind, clock):
    options: Any = {"denied": lambda request, decision: {"error": "slow down"}}
    limit = starlette.limit("1/1m", scope="page", **options)

    async def page(request):
        return PlainTextResponse("page")

    async def block(request):
        async with limit.check(request):
            return PlainTextResponse("block")

    app: Any = application(routes=[Route("/page", limit(page)), Route("/block", block)])
    client = Client(asgi.RateLimitMiddleware(app, rules(9), clock=clock) if behind else app)
    assert client.get("/page").status_code == 200
    for path in ("/page", "/block", "/block", "/page"):
        reply = client.get(path)
        assert (reply.status_code, reply.json()) == (429, {"error": "slow down"})
        assert reply.headers["content-type"] == "application/json"


def test_a_caught_denial_leaves_the_response_alone(clock):
    maybe = flask.limit("1/1m", scope="maybe")
    app = flask_module.Flask(__name__)

    @app.get("/")
    def page():
        try:
            with maybe.check(flask_module.request):
                return "fresh"
        except flask.RateLimitExceeded:
            return "cached"

    replies = [FlaskClient(app).get("/") for _ in range(2)]
    assert [(reply.status_code, reply.text) for reply in replies] == [(200, "fresh"), (200, "cached")]
    assert "retry-after" not in replies[1].headers


def test_a_block_may_only_report(clock):
    maybe = flask.limit("1/1m", scope="maybe", mode="shadow")
    app = flask_module.Flask(__name__)

    @app.get("/")
    def page():
        with maybe.check(flask_module.request) as decision:
            return "fresh" if decision.within_limits else "cached"

    assert [FlaskClient(app).get("/").text for _ in range(3)] == ["fresh", "cached", "cached"]


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
def test_a_denied_block_in_django_is_a_429_behind_the_middleware(kind, clock, monkeypatch):
    from django.core.asgi import get_asgi_application  # noqa: PLC0415 - configured by django_site
    from django.core.wsgi import get_wsgi_application  # noqa: PLC0415 - as above
    from django.http import HttpResponse  # noqa: PLC0415 - as above
    from django.urls import clear_url_caches, path  # noqa: PLC0415 - as above

    export = django.limit("1/1m", scope="export")

    def view(request):
        with export.check(request):
            return HttpResponse("export")

    monkeypatch.setattr(django_site, "urlpatterns", [path("export", view)])
    clear_url_caches()
    if kind == "wsgi":
        client: Any = WsgiClient(wsgi.RateLimitMiddleware(get_wsgi_application(), rules(9), clock=clock))
    else:
        client = Client(asgi.RateLimitMiddleware(get_asgi_application(), rules(9), clock=clock))
    assert statuses(client, "/export", 3) == [200, 429, 429]
    clear_url_caches()
