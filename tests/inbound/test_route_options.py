"""Options of route limits: exempt routes, methods, charges by response, callbacks, dynamic limits, the own request."""

import logging
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import flask as flask_module
import pytest
import quart as quart_module
from fastapi import Depends, FastAPI, Request
from flask import Flask
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tests.cases import cases
from tests.inbound.harness import WsgiHarness
from tests.inbound.recording_store import RecordingStore
from tests.inbound.sites import django_site
from tests.inbound.test_one_decision import APPS, FlaskClient, rules, site, statuses
from tests.inbound.test_routes import Client
from tidegate import ConfigError
from tidegate.inbound import (
    asgi,
    by_address,
    by_header,
    common_request,
    current_limits,
    django,
    fastapi,
    flask,
    limited,
    quart,
    starlette,
    wsgi,
)
from tidegate.inbound.testing import reset_limits

assert django_site.urlpatterns  # configures Django
NO_LIMITS = {"defaults": False, "unmatched": None}


@pytest.fixture(params=["starlette", "fastapi", "fastapi-depends", "flask", "quart"])
def kind(request):
    return APPS[request.param]


@pytest.fixture(params=[True, False], ids=["middleware", "alone"])
def config(request):
    return rules(100) if request.param else None


def test_methods_exempt_when_and_callbacks(kind, clock, config):
    denials = []
    options = {
        "methods": ["get"],
        "exempt_when": lambda request: request.headers.get("x-staff") == "yes",
        "on_denied": lambda request, decision: denials.append((request.headers["x-user"], decision.violated)),
    }
    client, _ = site(kind, clock, ("2/1m", options), ("9/1m", {"methods": ["POST"], "name": "post"}), config)
    staff, guest = {"x-staff": "yes", "x-user": "ann"}, {"x-user": "bob"}
    assert statuses(client, "/limited", 4, headers=staff) == [200] * 4
    assert statuses(client, "/limited", 4, headers=guest) == [200, 200, 429, 429]
    assert denials == [("bob", ("1m",))] * 2


def test_an_invalid_dynamic_limit_is_logged_once_and_the_last_valid_one_applies(kind, clock, config, caplog):
    answers = ["nonsense", "2/1m", "nonsense", "nonsense"]
    dynamic = kind[1](lambda request: answers.pop(0))
    build, _ = kind
    app = build(dynamic, kind[1]("50/1h"))
    client = FlaskClient(app) if isinstance(app, Flask) else Client(app)
    with caplog.at_level(logging.ERROR, "tidegate.inbound"):
        assert statuses(client, "/limited", 4) == [200, 200, 429, 429]
    assert [record.levelname for record in caplog.records if "invalid" in record.message] == ["ERROR"]


def test_an_invalid_dynamic_limit_without_a_default_neither_fails_requests_nor_admits_all(clock, caplog):
    @starlette.limit(lambda request: "nonsense")
    async def page(request):
        return PlainTextResponse("page")

    assert statuses(Client(Starlette(routes=[Route("/", page)])), "/", 62) == [200] * 60 + [429] * 2
    assert len([record for record in caplog.records if "60/1m applies" in record.message]) == 1


def test_options_of_which_one_makes_the_other_useless_are_refused():
    for option in ("denied", "on_denied"):
        with pytest.raises(ConfigError, match=f"{option}: cannot be combined with mode='shadow'"):
            starlette.limit("1/1m", mode="shadow", **{option: lambda request, decision: None})
    with pytest.raises(ConfigError, match="per_method: cannot be combined with `methods` of one method"):
        starlette.limit("1/1m", per_method=True, methods="GET")
    starlette.limit("1/1m", per_method=True, methods=["GET", "POST"])


@cases("invalid", [5, [["5/1m"]], [{}], {}, "", [], b"5/1m", object])
def test_a_dynamic_limit_of_any_wrong_type_is_invalid(clock, own_limits, invalid):
    reset_limits(own_limits)

    @starlette.limit(lambda request: invalid)
    async def page(request):
        return PlainTextResponse("page")

    assert statuses(Client(Starlette(routes=[Route("/", page)])), "/", 61) == [200] * 60 + [429]


@pytest.mark.parametrize("cost", [-1, 1.5, None], ids=repr)
@pytest.mark.parametrize("limits", ["2/1m", lambda request: "2/1m"], ids=["fixed", "dynamic"])
def test_an_invalid_cost_is_logged_once_and_counts_as_one(kind, clock, config, limits, cost, caplog):
    build, limit = kind
    options = {}
    app = build(limit(limits, cost=lambda request: cost, name="size", **options), limit("50/1h", **options))
    if config and isinstance(app, Flask):
        app.wsgi_app = wsgi.RateLimitMiddleware(app.wsgi_app, config, clock=clock)  # type: ignore[method-assign]  # as Flask's docs do
    elif config:
        app = asgi.RateLimitMiddleware(app, config, clock=clock)
    client = FlaskClient(app) if isinstance(app, Flask) else Client(app)
    assert statuses(client, "/limited", 4) == [200, 200, 429, 429]
    assert [record.message.partition(":")[0] for record in caplog.records if "invalid cost" in record.message] == [
        "size"
    ]


def test_a_fixed_cost_that_a_dynamic_limit_cannot_count_counts_as_one(clock):
    @starlette.limit(lambda request: ["3/1m unit=tokens", "9/1h unit=images"], cost=2)
    async def page(request):
        return PlainTextResponse("page")

    assert statuses(Client(Starlette(routes=[Route("/", page)])), "/", 4) == [200, 200, 200, 429]


# ---- options are checked when the limit is created -------------------------------------------------------------------


async def wait_for(request, decision=None):
    return "ann"


class Waiting:
    async def __call__(self, request, decision):
        return "ann"


@cases(
    ("options", "message"),
    [
        ({"key": lambda a, b, c: "all"}, "key: must be a function of request, as in `lambda request: …`"),
        ({"limits": lambda a, b, c: "5/1m"}, "limits: must be a function of request"),
        ({"cost": lambda a, b, c: 2}, "cost: must be a function of request"),
        ({"exempt_when": lambda a, b, c: True}, "exempt_when: must be a function of request"),
        ({"denied": lambda request: "no"}, "denied: must be a function of request and decision"),
        ({"denied": "no"}, "denied: must be a function, not 'no'"),
        ({"on_denied": lambda request: None}, "on_denied: must be a function of request and decision"),
        ({"count": lambda request: True}, "count: must be a function of request and status"),
        ({"count": ["401", "oops"]}, "count: must be statuses such as"),
        ({"count": [True]}, "count: must be statuses such as"),
        ({"count": wait_for}, "count: must be a plain function (`def` instead of `async def`)"),
        ({"denied": wait_for}, "denied: must be a plain function"),
        ({"on_denied": Waiting()}, "on_denied: must be a plain function"),
        ({"scope": lambda request: "x"}, "scope: must be a string such as 'uploads'"),
        ({"name": ""}, "name: must be a string"),
        ({"methods": []}, "methods: must be methods such as"),
        ({"methods": [1]}, "methods: must be methods such as"),
        ({"cost": -1}, "cost: must be an integer"),
        ({"limits": "5/second; 10/minute"}, "write several limits as a list"),
    ],
)
def test_wrong_options_are_refused_at_once(options, message):
    with pytest.raises(ConfigError) as error:
        starlette.limit(**{"limits": "5/1m", **options})
    assert message in str(error.value)


def test_functions_of_the_middleware_are_checked_at_once():
    with pytest.raises(ConfigError, match="exempt_when: must be a function of request"):
        asgi.RateLimitMiddleware(lambda: None, exempt_when=lambda: True)  # type: ignore[arg-type,misc]  # what is tested
    for option in ({"plan": wait_for}, {"denied": wait_for}, {"exempt_when": wait_for}):
        with pytest.raises(ConfigError, match="must be a plain function"):
            asgi.RateLimitMiddleware(lambda: None, **option)  # type: ignore[arg-type]  # as above
    with pytest.raises(ConfigError, match="must be a plain function"):
        wsgi.RateLimitMiddleware(lambda: None, key=wait_for)  # type: ignore[arg-type]  # as above
    with pytest.raises(ConfigError, match="count: must be a mapping from category names to functions of request and"):
        asgi.RateLimitMiddleware(lambda: None, count={"read": lambda request: True})  # type: ignore[arg-type,misc,dict-item]  # as above
    with pytest.raises(ConfigError, match="denied: must be a function of request and decision"):
        asgi.RateLimitMiddleware(lambda: None, denied=lambda request: None)  # type: ignore[arg-type,misc]  # as above


@pytest.mark.parametrize("count", [401, "401", "4xx", [401], ["4xx", 500]])
def test_statuses_that_count_may_be_classes(count, clock):
    limited = starlette.limit("1/1m", count=count)
    assert [limited.final_cost(None, status, 1) for status in (200, 401)] == [0, None]


@cases("methods", ["get", ["GET"], ("get", "post")])
def test_a_method_may_be_a_string_and_head_counts_as_get(kind, clock, config, methods):
    client, _ = site(kind, clock, ("2/1m", {"methods": methods}), ("50/1h", {}), config)
    assert statuses(client, "/limited", 3) == [200, 200, 429]
    limit = starlette.limit("2/1m", methods=methods)
    assert [limit.applies_to(each) for each in ("GET", "HEAD", "PUT")] == [True, True, False]


def test_limits_of_different_methods_have_different_names():
    both = (starlette.limit("1/1m", methods="GET"), starlette.limit("1/1m", methods=["POST"]))
    assert [each.name for each in both] == ["by_address/1m GET+HEAD", "by_address/1m POST"]


@pytest.mark.parametrize("behind", [True, False])
def test_per_method_counts_each_method_separately(clock, behind):
    app = Flask(__name__)
    limited = flask.limit("1/1m", per_method=True)
    app.route("/", methods=["GET", "POST", "PUT"])(limited(lambda: "page"))
    if behind:
        app.wsgi_app = wsgi.RateLimitMiddleware(app.wsgi_app, rules(100), clock=clock)  # type: ignore[method-assign]  # as Flask's docs do
    client = app.test_client()
    methods = ("GET", "POST", "GET", "POST", "HEAD", "PUT")
    replies = [client.open("/", method=each, environ_base={"REMOTE_ADDR": "203.0.113.9"}) for each in methods]
    assert [reply.status_code for reply in replies] == [200, 200, 429, 429, 429, 200]


def test_a_failing_on_denied_is_logged_and_the_client_gets_its_denial(kind, clock, config, caplog):
    def fail(request, decision):
        raise RuntimeError("broken")

    client, _ = site(kind, clock, ("1/1m", {"on_denied": fail}), ("50/1h", {}), config)
    assert statuses(client, "/limited", 2) == [200, 429]
    assert [record.levelname for record in caplog.records if "on_denied failed" in record.message] == ["ERROR"]


@cases("key", [42, UUID(int=7), ("tenant", 42), ["tenant", UUID(int=7)]])
def test_a_key_may_be_the_id_of_a_user(kind, clock, config, key):
    client, _ = site(kind, clock, ("1/1m", {"key": lambda request: key}), ("50/1h", {}), config)
    assert statuses(client, "/limited", 2) == [200, 429]


# ---- the framework's own request -------------------------------------------------------------------------------------


def test_functions_receive_the_frameworks_own_request(kind, clock, config):
    seen = []

    def key(request):
        common = common_request(request)
        assert by_header("x-user")(request) == by_header("x-user")(common)
        seen.append((request, common.address, common.path, common.method, common.header("x-user")))
        return request.headers["x-user"]

    client, _ = site(kind, clock, ("1/1m", {"key": key}), ("50/1h", {}), config)
    assert statuses(client, "/limited", 2, headers={"x-user": "ann"}) == [200, 429]
    assert statuses(client, "/limited", 1, headers={"x-user": "bob"}) == [200]
    own = {flask.limit: flask_module.Request, quart.limit: quart_module.Request}.get(kind[1], Request)
    assert all(isinstance(request[0], own) for request in seen)
    assert seen[0][1:] == ("203.0.113.9", "/limited", "GET", "ann")


def test_current_limits_of_a_request(clock):
    shown = []

    @starlette.limit("5/1m", name="burst")
    @starlette.limit("50/1h", name="hourly")
    async def page(request):
        shown.append({limit.name: limit.remaining for limit in current_limits(request)})
        return PlainTextResponse("page")

    app = Starlette(routes=[Route("/", page)])
    assert statuses(Client(asgi.RateLimitMiddleware(app, rules(9), clock=clock)), "/", 2) == [200, 200]
    assert shown == [{"all": 8, "burst": 4, "hourly": 49}, {"all": 7, "burst": 3, "hourly": 48}]


def block_site(limit: fastapi.limit) -> FastAPI:
    app = FastAPI()

    @app.get("/")
    def page(request: Request) -> str:
        with limit.check(request):
            return "page"

    return app


def test_a_limited_block_gives_back_what_the_request_was_charged_before(clock):
    export = starlette.limit("1/1m", scope="export")
    api_export = fastapi.limit("1/1m", scope="api")
    view_export = flask.limit("1/1m", scope="view")

    @starlette.limit("50/1h")
    async def page(request):
        async with export.check(request):
            return PlainTextResponse("page")

    app = asgi.RateLimitMiddleware(Starlette(routes=[Route("/", page)]), rules(9), RecordingStore(clock), clock=clock)
    assert statuses(Client(app), "/", 3) == [200, 429, 429]
    assert sorted(app.request_limiter.store.usages().values()) == [1, 1, 1]

    app = asgi.RateLimitMiddleware(block_site(api_export), rules(9), RecordingStore(clock), clock=clock)
    assert statuses(Client(app), "/", 3) == [200, 429, 429]
    assert sorted(app.request_limiter.store.usages().values()) == [1, 1]  # the middleware decided before

    site = Flask(__name__)

    @site.get("/")
    def view():
        with view_export.check(flask_module.request):
            return "page"

    outer = wsgi.RateLimitMiddleware(site.wsgi_app, rules(9), RecordingStore(clock), clock=clock)
    site.wsgi_app = outer  # type: ignore[method-assign]  # as Flask's docs do
    assert statuses(FlaskClient(site), "/", 3) == [200, 429, 429]
    assert sorted(outer.request_limiter.store.usages().values()) == [1, 1]
    with pytest.raises(ConfigError, match="needs a scope"):
        flask.limit("1/1m").check(flask_module.request)


# ---- exempt routes, charges by response ------------------------------------------------------------------------------


def test_exempt_routes_are_not_charged_to_categories(clock):
    @starlette.exempt
    async def health(request):
        return PlainTextResponse("well")

    async def page(request):
        return PlainTextResponse("page")

    app = Starlette(routes=[Route("/health", health), Route("/page", page)])
    client = Client(asgi.RateLimitMiddleware(app, rules(2), clock=clock))
    assert statuses(client, "/health", 5) == [200] * 5
    assert statuses(client, "/page", 3) == [200, 200, 429]

    site = Flask(__name__)
    site.get("/health")(flask.exempt(lambda: "well"))
    site.get("/page", endpoint="page")(lambda: "page")
    site.wsgi_app = wsgi.RateLimitMiddleware(site.wsgi_app, rules(2), clock=clock)  # type: ignore[method-assign]  # as Flask's docs do
    assert statuses(FlaskClient(site), "/health", 5) == [200] * 5
    assert statuses(FlaskClient(site), "/page", 3) == [200, 200, 429]

    api = FastAPI()

    @api.get("/health")
    @fastapi.exempt
    def api_health():
        return "well"

    client = Client(asgi.RateLimitMiddleware(api, rules(2), clock=clock))
    assert statuses(client, "/health", 5) == [200] * 5


@pytest.mark.parametrize("behind", [True, False], ids=["middleware", "alone"])
def test_only_responses_that_count_are_charged(clock, behind):
    options = {}

    @starlette.limit("2/1m", count=[401], **options)
    async def login(request):
        return PlainTextResponse("", int(request.headers["x-status"]))

    app = Starlette(routes=[Route("/", login)])
    client = Client(asgi.RateLimitMiddleware(app, rules(100), clock=clock) if behind else app)
    assert statuses(client, "/", 9, headers={"x-status": "200"}) == [200] * 9
    assert statuses(client, "/", 3, headers={"x-status": "401"}) == [401, 401, 429]

    @flask.limit("2/1m", count=lambda request, status: status == 401 and request.method == "GET", **options)
    def view():
        return "", int(flask_module.request.headers["x-status"])

    site = Flask(__name__)
    site.get("/")(view)
    if behind:
        site.wsgi_app = wsgi.RateLimitMiddleware(site.wsgi_app, rules(100), clock=clock)  # type: ignore[method-assign]  # as Flask's docs do
    assert statuses(FlaskClient(site), "/", 9, headers={"x-status": "200"}) == [200] * 9
    assert statuses(FlaskClient(site), "/", 3, headers={"x-status": "401"}) == [401, 401, 429]


# ---- Django ----------------------------------------------------------------------------------------------------------


@cases("config", [{"defaults": False, "unmatched": None}, rules(50)])
def test_responses_that_do_not_count_are_refunded_behind_any_middleware(kind, clock, config):
    client, _ = site(kind, clock, ("2/1m", {"name": "missing", "count": [404]}), ("50/1h", {}), config)
    assert statuses(client, "/limited", 5) == [200] * 5


@cases("config", [{"defaults": False, "unmatched": None}, rules(2)])
def test_a_function_of_the_middleware_exempts_from_all_limits(kind, clock, config):
    def internal(request):
        return request.header("x-internal") == "yes"

    client, _ = site(kind, clock, ("2/1m", {}), ("50/1h", {}), config, exempt_when=internal)
    assert statuses(client, "/limited", 5, headers={"x-internal": "yes"}) == [200] * 5
    assert statuses(client, "/limited", 3, headers={"x-internal": "no"}) == [200, 200, 429]


def django_views(limit, inner):
    from django.http import HttpResponse  # noqa: PLC0415 - configured by django_site
    from django.utils.decorators import method_decorator  # noqa: PLC0415 - as above
    from django.views import View  # noqa: PLC0415 - as above

    @limit
    @inner
    def limited(request):
        return HttpResponse("page")

    class Page(View):
        @method_decorator([limit, inner])
        def get(self, request):
            return HttpResponse("page")

        def post(self, request):
            return HttpResponse("posted")

    return limited, Page.as_view(), lambda request: HttpResponse("plain")


class WsgiClient:
    """The interface of Client for a WSGI application."""

    def __init__(self, app):
        self.site = WsgiHarness.__new__(WsgiHarness)
        self.site.middleware = app

    def get(self, path, method="GET"):
        reply = self.site.request(path, method)
        return SimpleNamespace(status_code=reply.status, headers=reply.headers)


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
@pytest.mark.parametrize("page", ["/limited", "/class"])
def test_django_views_are_decided_with_the_middleware(kind, page, clock, monkeypatch):
    from django.core.asgi import get_asgi_application  # noqa: PLC0415 - configured by django_site
    from django.core.wsgi import get_wsgi_application  # noqa: PLC0415 - as above
    from django.urls import clear_url_caches, path  # noqa: PLC0415 - as above

    limited, classy, plain = django_views(django.limit("2/1m"), django.limit("50/1h"))
    patterns = [path("limited", limited), path("class", classy), path("plain", plain)]
    monkeypatch.setattr(django_site, "urlpatterns", patterns)
    clear_url_caches()
    if kind == "wsgi":
        middleware: Any = wsgi.RateLimitMiddleware(get_wsgi_application(), rules(6), RecordingStore(clock), clock=clock)
        client: Any = WsgiClient(middleware)
    else:
        middleware = asgi.RateLimitMiddleware(get_asgi_application(), rules(6), RecordingStore(clock), clock=clock)
        client = Client(middleware)
    assert statuses(client, page, 5) == [200, 200, 429, 429, 429]
    assert statuses(client, "/plain", 5) == [200] * 4 + [429]
    assert sorted(middleware.request_limiter.store.usages().values()) == [2, 2, 6]
    clock.advance(60)
    assert statuses(client, "/class", 1, method="POST") == [200]
    clear_url_caches()


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
def test_django_views_have_default_limits(kind, clock, monkeypatch):
    from django.core.asgi import get_asgi_application  # noqa: PLC0415 - configured by django_site
    from django.core.wsgi import get_wsgi_application  # noqa: PLC0415 - as above
    from django.urls import clear_url_caches, path  # noqa: PLC0415 - as above

    limited, classy, plain = django_views(django.limit("3/1m"), django.limit("50/1h"))
    patterns = [path("limited", limited), path("class", classy), path("plain", plain)]
    monkeypatch.setattr(django_site, "urlpatterns", patterns)
    clear_url_caches()
    options = {"default_limits": "2/1m", "application_limits": "9/1m", "clock": clock}
    if kind == "wsgi":
        client: Any = WsgiClient(wsgi.RateLimitMiddleware(get_wsgi_application(), **options))
    else:
        client = Client(asgi.RateLimitMiddleware(get_asgi_application(), **options))
    assert statuses(client, "/limited", 4) == [200, 200, 200, 429]
    assert statuses(client, "/plain", 3) == [200, 200, 429]
    assert statuses(client, "/class", 3, method="POST") == [200, 200, 429]
    assert statuses(client, "/missing", 3) == [404, 404, 429]
    clear_url_caches()


def test_django_functions_receive_the_real_request_and_limits_may_report_only(clock):
    from django.http import HttpResponse  # noqa: PLC0415 - configured by django_site
    from django.test import RequestFactory  # noqa: PLC0415 - as above

    @django.limit("1/1m", key=lambda request: request.user, mode="shadow")
    @django.limit("3/1m")
    def view(request):
        return HttpResponse(str(limited(request)))

    def ask(user):
        request = RequestFactory().get("/")
        request.user = user
        return view(request)

    assert [ask(user).content for user in ("ann", "ann", "bob")] == [b"False", b"True", b"False"]
    assert ask("eve").status_code == 429  # the other limit denies


def test_request_limited_is_set_where_the_limit_does_not_apply(clock):
    from django.http import HttpResponse  # noqa: PLC0415 - configured by django_site
    from django.test import RequestFactory  # noqa: PLC0415 - as above

    @django.limit(lambda request: request.GET.get("limit"), name="dynamic", mode="shadow")
    @django.limit("1/1m", methods=["POST"], mode="shadow")
    def view(request):
        return HttpResponse(str(limited(request)))

    requests = RequestFactory()
    assert view(requests.get("/")).content == b"False"
    assert [view(requests.post("/")).content for _ in range(2)] == [b"False", b"True"]
    assert [view(requests.get("/?limit=1/1m")).content for _ in range(2)] == [b"False", b"True"]


@pytest.mark.parametrize("first", [True, False])
def test_a_limit_that_reports_later_does_not_hide_an_earlier_one(clock, first):
    app = FastAPI()
    exceeded = Depends(fastapi.limit("1/1m", key=lambda request: "all", name="exceeded", mode="shadow"))
    other = Depends(fastapi.limit("9/1m", key=lambda request: "all", name="other", mode="shadow"))

    async def page(request: Request):
        return limited(request)

    app.get("/", dependencies=[exceeded, other] if first else [other, exceeded])(page)
    client = Client(asgi.RateLimitMiddleware(app, NO_LIMITS, clock=clock))
    assert [client.get("/").json() for _ in range(2)] == [False, True]


# ---- the key of the middleware ---------------------------------------------------------------------------------------


def keyed_site(kind, clock, *limits, **options):
    build, _ = kind
    app = build(*limits)
    if isinstance(app, Flask):
        app.wsgi_app = wsgi.RateLimitMiddleware(app.wsgi_app, clock=clock, **options)  # type: ignore[method-assign]  # as Flask's docs do
        return FlaskClient(app)
    return Client(asgi.RateLimitMiddleware(app, clock=clock, **options))


@cases("config", [NO_LIMITS, rules(100)])
def test_limits_of_routes_count_by_the_key_of_the_middleware(kind, clock, config):
    limit = kind[1]
    client = keyed_site(kind, clock, limit("2/1m"), limit("50/1h"), config=config, key=by_header("x-user"))
    assert statuses(client, "/limited", 3, headers={"x-user": "ann"}) == [200, 200, 429]
    assert statuses(client, "/limited", 3, headers={"x-user": "bob"}) == [200, 200, 429]
    assert statuses(client, "/limited", 3) == [200, 200, 429]  # without the header, by address


@cases("config", [NO_LIMITS, rules(100)])
def test_a_limit_of_a_route_may_have_another_key_than_the_middleware(kind, clock, config):
    limit = kind[1]
    limits = limit("2/1m", key=by_address), limit("3/1m", key=by_header("x-team"))
    client = keyed_site(kind, clock, *limits, config=config, key=by_header("x-user"))
    assert statuses(client, "/limited", 1, headers={"x-user": "ann"}) == [200]
    assert statuses(client, "/limited", 2, headers={"x-user": "bob"}) == [200, 429]
    assert statuses(client, "/limited", 2, headers={"x-user": "eve", "x-team": "a"}, peer="203.0.113.10") == [200, 200]
    assert statuses(client, "/limited", 2, headers={"x-user": "joe", "x-team": "a"}, peer="203.0.113.11") == [200, 429]
