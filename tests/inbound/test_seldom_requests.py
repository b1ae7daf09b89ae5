"""Requests that few applications see are limited like all others: handshakes, HEAD, late responses, replaced routes."""

import gc
import weakref

import flask as flask_module
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute

from tests.cases import cases
from tests.inbound.harness import AsgiHarness, WsgiHarness, run_websocket
from tests.inbound.test_one_decision import FlaskClient, rules, statuses
from tests.inbound.test_routes import Client
from tidegate.inbound import asgi, flask, starlette, wsgi

CLOSED = {"defaults": False, "unmatched": "all", "categories": {"all": {"limit": 0, "window": "1m"}}}


async def page(request):
    return PlainTextResponse("page")


def starlette_site():
    return Starlette(routes=[Route("/limited", starlette.limit("5/1m")(page)), Route("/page", page)])


def flask_site():
    app = flask_module.Flask(__name__)
    app.get("/limited")(flask.limit("5/1m")(lambda: "limited"))
    app.get("/page", endpoint="page")(lambda: "page")
    return app


@pytest.mark.parametrize(("harness", "site"), [(AsgiHarness, starlette_site), (WsgiHarness, flask_site)])
def test_a_denied_client_that_is_forgotten_by_maintenance_is_denied_again(harness, site, clock):
    api = harness(CLOSED, app=site(), clock=clock)
    for seconds in (70, 0.5, 1.5, 3):  # maintenance is due every second; a denial by a limit of 0 expires at once
        denied = api.request("/page", **{"wsgi.url_scheme": "http"})
        assert (denied.status, denied["x-ratelimit-limit"]) == (429, "0")
        clock.advance(seconds)
    api.close()


@pytest.mark.parametrize("limited", [False, True], ids=["no route has limits", "a route has limits"])
@pytest.mark.parametrize("path", ["/ws", "/none"])
async def test_a_handshake_is_denied_whether_or_not_there_is_a_route(clock, path, limited):
    async def chat(websocket):
        await websocket.accept()
        await websocket.close()

    limit = starlette.limit("5/1m") if limited else lambda function: function
    site = Starlette(routes=[Route("/page", limit(page)), WebSocketRoute("/ws", chat)])
    middleware = asgi.RateLimitMiddleware(site, rules(2), clock=clock)
    codes = [(await run_websocket(middleware, [], path=path))[-1]["code"] for _ in range(4)]
    assert codes == [1000, 1000, 1008, 1008]


@cases("limited", [False, True])
def test_the_denial_of_a_head_request_has_no_body(clock, limited):
    limit = starlette.limit("5/1m") if limited else lambda function: function
    site = Starlette(routes=[Route("/page", limit(page))])
    api = AsgiHarness(rules(1), app=site, clock=clock)
    replies = [api.request("/page", method="HEAD") for _ in range(2)]
    api.close()
    assert [reply.status for reply in replies] == [200, 429]
    assert replies[1].body == b""


@cases("method", ["GET", "HEAD"])
@cases("chunks", [[], [b""], [b"page"], [b"pa", b"ge"]])
def test_the_denial_of_a_late_response_has_its_own_length(clock, chunks, method):
    """The application starts its response with the first chunk, and so after its limits were left pending."""

    def late(environ, start_response):
        start_response("200 OK", [("Content-Length", str(sum(map(len, chunks))))])
        yield from chunks

    app = flask_site()
    app.wsgi_app = late  # type: ignore[method-assign]  # not reached through a view: nothing decides before it
    api = WsgiHarness(rules(1), app=app, clock=clock)
    api.request("/page", method=method)
    denied = api.request("/page", method=method)
    assert denied.status == 429
    assert len(denied.body) == (0 if method == "HEAD" else int(denied["content-length"]))
    api.close()


def test_a_route_that_is_replaced_in_place_is_noticed_within_a_second(clock):
    reached = []

    async def other(request):
        reached.append(request.url.path)
        return PlainTextResponse("other")

    site = starlette_site()
    client = Client(asgi.RateLimitMiddleware(site, rules(1), clock=clock))
    assert statuses(client, "/page", 2) == [200, 429]
    site.router.routes[1] = Route("/page", other)
    clock.advance(61)
    assert statuses(client, "/page", 1) == [200]  # maintenance sees the new route
    del reached[:]
    clock.advance(61)
    assert statuses(client, "/page", 1) == [200]
    assert reached == ["/page"]
    assert statuses(client, "/page", 2) == [429, 429]
    assert reached == ["/page"], "denied before the endpoint runs"


def test_a_view_that_is_replaced_in_place_is_noticed_within_a_second(clock):
    app = flask_module.Flask(__name__)
    app.get("/page", endpoint="page")(lambda: "page")
    app.wsgi_app = wsgi.RateLimitMiddleware(app.wsgi_app, rules(1), clock=clock)  # type: ignore[method-assign]  # as Flask's docs do
    client = FlaskClient(app)
    assert statuses(client, "/page", 2) == [200, 429]
    app.view_functions["page"] = flask.exempt(lambda: "open")
    clock.advance(61)
    statuses(client, "/page", 1)  # maintenance sees the new view
    assert statuses(client, "/page", 3) == [200] * 3


LIMITED_PAGE = starlette.limit("5/1m")(page)
LIMITED_VIEW = flask.limit("5/1m")(lambda: "page")


def use_starlette(clock):
    site = Starlette(routes=[Route("/page", LIMITED_PAGE)])
    assert Client(asgi.RateLimitMiddleware(site, rules(100), clock=clock)).get("/page").status_code == 200
    return weakref.ref(site)


def use_flask(clock):
    app = flask_module.Flask(__name__)
    app.get("/page", endpoint="page")(LIMITED_VIEW)
    app.wsgi_app = wsgi.RateLimitMiddleware(app.wsgi_app, rules(100), clock=clock)  # type: ignore[method-assign]  # as Flask's docs do
    assert FlaskClient(app).get("/page").status_code == 200
    return weakref.ref(app)


@pytest.mark.parametrize("use", [use_starlette, use_flask])
def test_applications_that_a_factory_made_are_freed(use, clock):
    applications = [use(clock) for _ in range(20)]
    gc.collect()
    assert sum(application() is not None for application in applications) <= 1
