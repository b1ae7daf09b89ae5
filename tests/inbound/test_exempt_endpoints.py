"""Exempt endpoints stay open for a client that is over the limits of the middleware, in each framework."""

import flask as flask_module
import httpx
import pytest
import quart as quart_module
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from tests.inbound.sites import django_site
from tests.inbound.test_one_decision import PEER, FlaskClient, rules, statuses
from tests.inbound.test_routes import Client
from tidegate.inbound import asgi, django, fastapi, flask, quart, starlette, wsgi
from tidegate.testing import ManualClock

assert django_site.urlpatterns  # configures Django


async def page(request):
    return PlainTextResponse("page")


@starlette.exempt
async def health(request):
    return PlainTextResponse("well")


def starlette_site():
    return Starlette(routes=[Route("/page", page), Mount("/", routes=[Route("/health", health)])])


def fastapi_site():
    app = FastAPI()
    app.get("/page")(lambda: "page")
    app.get("/health")(fastapi.exempt(lambda: "well"))
    return app


def quart_site():
    app = quart_module.Quart(__name__)
    app.get("/page", endpoint="page")(lambda: "page")
    app.get("/health")(quart.exempt(lambda: "well"))
    return app


def flask_site():
    app = flask_module.Flask(__name__)
    part = flask_module.Blueprint("part", __name__)
    app.get("/page", endpoint="page")(lambda: "page")
    part.get("/health", endpoint="health")(lambda: "well")
    app.register_blueprint(flask.exempt(part))
    return app


def django_handler(make, monkeypatch):
    from django.http import HttpResponse  # noqa: PLC0415 - configured by django_site
    from django.urls import clear_url_caches, path  # noqa: PLC0415 - as above

    views = [
        path("page", lambda request: HttpResponse("page")),
        path("health", django.exempt(lambda request: HttpResponse("well"))),
    ]
    monkeypatch.setattr(django_site, "urlpatterns", views)
    clear_url_caches()
    return make()


def django_wsgi(monkeypatch):
    from django.core.wsgi import get_wsgi_application  # noqa: PLC0415 - configured by django_site

    return django_handler(get_wsgi_application, monkeypatch)


def django_asgi(monkeypatch):
    from django.core.asgi import get_asgi_application  # noqa: PLC0415 - configured by django_site

    return django_handler(get_asgi_application, monkeypatch)


@pytest.fixture(params=["starlette", "fastapi", "quart", "flask", "django-wsgi", "django-asgi"])
def client(request, monkeypatch):
    makers = {"starlette": starlette_site, "fastapi": fastapi_site, "quart": quart_site}
    options = {"config": rules(1), "clock": ManualClock(start=1_728_000_000)}
    if request.param == "flask":
        app = flask_site()
        app.wsgi_app = wsgi.RateLimitMiddleware(app.wsgi_app, **options)  # type: ignore[method-assign]  # as Flask's docs do
        return FlaskClient(app)
    if request.param == "django-wsgi":
        transport = httpx.WSGITransport(wsgi.RateLimitMiddleware(django_wsgi(monkeypatch), **options), remote_addr=PEER)
        return httpx.Client(transport=transport, base_url="http://site")
    app = makers[request.param]() if request.param in makers else django_asgi(monkeypatch)
    return Client(asgi.RateLimitMiddleware(app, **options))


def test_an_exempt_endpoint_is_open_for_a_client_over_the_limit(client):
    assert statuses(client, "/page", 3) == [200, 429, 429]
    assert statuses(client, "/health", 2) == [200, 200]
    assert statuses(client, "/page", 1) == [429]
    assert statuses(client, "/health", 1) == [200]


def test_a_path_that_is_encoded_twice_does_not_close_an_exempt_endpoint():
    app = flask_module.Flask(__name__)
    app.get("/page", endpoint="page")(lambda: "page")
    app.get("/é/health")(flask.exempt(lambda: "well"))
    app.wsgi_app = wsgi.RateLimitMiddleware(app.wsgi_app, rules(1), clock=ManualClock(start=1_728_000_000))  # type: ignore[method-assign]  # as Flask's docs do
    client = FlaskClient(app)
    misread = "/é/health".encode().decode("latin-1")
    assert statuses(client, "/page", 2) == [200, 429]
    assert statuses(client, misread, 3) == [429] * 3
    assert statuses(client, "/é/health", 3) == [200] * 3


def test_no_denied_request_reaches_an_application_with_exempt_endpoints():
    reached = []

    class Inner:
        def __init__(self, app):
            self.app = app

        async def __call__(self, scope, receive, send):
            reached.append(scope["path"])
            await self.app(scope, receive, send)

    routes = [Route("/page", page), Route("/other", page), Route("/health", health)]
    site = Starlette(routes=routes, middleware=[Middleware(Inner)])
    client = Client(asgi.RateLimitMiddleware(site, rules(1), clock=ManualClock(start=1_728_000_000)))
    assert statuses(client, "/page", 5) == [200] + [429] * 4
    assert statuses(client, "/other", 5) == [429] * 5
    assert statuses(client, "/health", 2) == [200, 200]
    assert reached == ["/page", "/health", "/health"]
