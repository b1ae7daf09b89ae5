"""What programs bring along from other limiters: their functions, defaults of blueprints, custom denials."""

import django as django_package
import flask as flask_package
import pytest
import quart as quart_package
from django.conf import settings
from django.test import RequestFactory
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tests.cases import cases
from tests.inbound.test_one_decision import FlaskClient, rules
from tests.inbound.test_routes import Client
from tidegate import ConfigError
from tidegate.inbound import BlockedDecision, asgi, flask, quart, starlette, wsgi
from tidegate.inbound.testing import reset_limits

settings.configured or settings.configure()
django_package.setup()

from django.http import HttpResponse  # noqa: E402 - needs the settings

from tidegate.inbound import django  # noqa: E402 - as above


def statuses(client, path, count, **options):
    return [client.get(path, **options).status_code for _ in range(count)]


# ---- functions -------------------------------------------------------------------------------------------------------


def test_functions_of_flask_limiter_read_the_current_request(clock):
    app = flask_package.Flask(__name__)

    @app.get("/")
    @flask.limit(
        lambda: flask_package.request.headers.get("x-limit", "2/1m"),
        key=lambda: flask_package.request.headers.get("x-user"),
        cost=lambda: int(flask_package.request.headers.get("x-cost", "1")),
        exempt_when=lambda: flask_package.request.headers.get("x-staff") == "yes",
    )
    def page():
        return "page"

    client = FlaskClient(app)
    assert statuses(client, "/", 3, headers={"x-user": "ann"}) == [200, 200, 429]
    assert statuses(client, "/", 2, headers={"x-user": "bob", "x-cost": "2"}) == [200, 429]
    assert statuses(client, "/", 3, headers={"x-user": "bob", "x-staff": "yes"}) == [200] * 3


def test_functions_without_arguments_of_starlette_may_be_coroutines(clock):
    async def everybody():
        return "all"

    @starlette.limit("1/1m", key=everybody)
    async def page(request):
        return PlainTextResponse("page")

    assert statuses(Client(Starlette(routes=[Route("/", page)])), "/", 2) == [200, 429]


def test_key_functions_of_django_ratelimit_get_the_group(clock):
    groups = []

    def key(group, request):
        groups.append(group)
        return request.META["HTTP_X_USER"]

    view = django.limit("1/1m", key=key, scope="api")(lambda request: HttpResponse("page"))
    replies = [view(RequestFactory().get("/", HTTP_X_USER=user)).status_code for user in ("ann", "ann", "bob")]
    assert (replies, groups) == ([200, 429, 200], ["api"] * 3)


def test_a_function_of_three_arguments_is_refused():
    with pytest.raises(ConfigError, match="key: must be a function of request"):
        starlette.limit("1/1m", key=lambda one, two, three: "all")


# ---- blueprints ------------------------------------------------------------------------------------------------------


@cases("behind", [True, False])
@cases("kind", [(flask_package, flask), (quart_package, quart)])
def test_limits_of_a_view_replace_the_defaults_of_its_blueprint(kind, behind, clock, own_limits):
    library, module = kind
    reset_limits(own_limits)
    is_flask = library is flask_package
    app = library.Flask(__name__) if is_flask else library.Quart(__name__)
    part = library.Blueprint("part", __name__)

    @part.get("/own")
    @module.limit("3/1m")
    def own():
        return "own"

    @part.get("/added")
    @module.limit("3/1m", override_defaults=False)
    def added():
        return "added"

    @part.get("/other")
    def other():
        return "other"

    module.limit("1/1m", as_default=True, name="default")(part)
    app.register_blueprint(part)
    if behind and is_flask:
        app.wsgi_app = wsgi.RateLimitMiddleware(app.wsgi_app, rules(100), clock=clock)
    elif behind:
        app = asgi.RateLimitMiddleware(app, rules(100), clock=clock)
    client = FlaskClient(app) if is_flask else Client(app)
    assert statuses(client, "/own", 4) == [200, 200, 200, 429]
    assert statuses(client, "/other", 2) == [200, 429]
    assert statuses(client, "/added", 2) == [200, 429]


def test_only_limits_of_blueprints_can_be_defaults():
    with pytest.raises(ConfigError, match="as_default: only limits of blueprints"):
        starlette.limit("1/1m", as_default=True)
    with pytest.raises(ConfigError, match="as_default: only limits of blueprints"):
        flask.limit("1/1m", as_default=True)(lambda: "page")


# ---- custom denials --------------------------------------------------------------------------------------------------


def fail(request, decision):
    raise RuntimeError("no template")


@cases("denied", [fail, lambda request, decision: {"left": object()}])
def test_a_denied_that_fails_is_logged_and_the_client_gets_a_429(denied, clock, caplog, own_limits):
    reset_limits(own_limits)
    caplog.clear()

    @starlette.limit("1/1m", denied=denied)
    async def page(request):
        return PlainTextResponse("page")

    reply = [Client(Starlette(routes=[Route("/", page)])).get("/") for _ in range(2)][1]
    assert (reply.status_code, reply.text) == (429, "Rate limit exceeded. Try again later.")
    middleware = asgi.RateLimitMiddleware(Starlette(), rules(1), clock=clock, denied=denied)
    assert statuses(Client(middleware), "/", 2) == [404, 429]
    assert caplog.text.count("the function `denied`") == 2


def test_a_denied_knows_a_block_from_a_denial(clock):
    def denied(request, decision):
        return "blocked" if isinstance(decision, BlockedDecision) else "denied"

    middleware = asgi.RateLimitMiddleware(
        Starlette(), rules(1), clock=clock, denied=denied, block_after="2/1m", block_for="1h"
    )
    client = Client(middleware)
    assert [client.get("/").text for _ in range(4)][1:] == ["denied", "blocked", "blocked"]
