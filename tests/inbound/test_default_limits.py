"""`default_limits` for each route without limits of its own, `application_limits` for all routes together."""

import asyncio

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from fastapi import APIRouter, Depends, FastAPI
from flask import Blueprint, Flask
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from tests.inbound.test_routes import Client
from tidegate import ConfigError
from tidegate.inbound import aiohttp, asgi, fastapi, flask, starlette, wsgi
from tidegate.inbound._rules.config import load_rules
from tidegate.testing import ManualClock

EXTRA = {"default_limits": "2/1m", "application_limits": "9/1h"}


def starlette_site(**options):
    async def page(_request):
        return PlainTextResponse("page")

    limited = starlette.limit("3/1m", name="own")(page)
    added = starlette.limit("3/1m", name="added", override_defaults=False)(page)
    mounted = Mount("/mounted", routes=[Route("/a", page)])
    free = starlette.exempt(lambda _request: PlainTextResponse("free"))
    routes = [Route("/a", page), Route("/b/{name}", page), Route("/own", limited), Route("/added", added), mounted]
    routes.append(Route("/posted", starlette.limit("3/1m", methods="POST")(page)))
    return asgi.RateLimitMiddleware(Starlette(routes=[*routes, Route("/free", free)]), **options)


def fastapi_site(**options):
    app, router = FastAPI(), APIRouter(prefix="/mounted")

    def page():
        return "page"

    app.get("/a")(page)
    app.get("/b/{name}")(page)
    app.get("/own")(fastapi.limit("3/1m", name="own")(page))
    app.get("/posted")(fastapi.limit("3/1m", methods=["POST"])(page))
    app.get("/added", dependencies=[Depends(fastapi.limit("3/1m", name="added", override_defaults=False))])(page)
    app.get("/free")(fastapi.exempt(lambda: "free"))
    router.get("/a")(page)
    app.include_router(router)
    return asgi.RateLimitMiddleware(app, **options)


def flask_site(**options):
    app, blueprint = Flask("site"), Blueprint("mounted", "site", url_prefix="/mounted")

    def page(name=""):
        return f"page {name}"

    app.add_url_rule("/a", "a", page)
    app.add_url_rule("/b/<name>", "b", view_b)
    app.add_url_rule("/posted", "posted", flask.limit("3/1m", methods=["POST"])(lambda: "posted"))
    app.add_url_rule("/own", "own", flask.limit("3/1m", name="own")(lambda: "own"))
    app.add_url_rule("/added", "added", flask.limit("3/1m", name="added", override_defaults=False)(lambda: "added"))
    app.add_url_rule("/free", "free", flask.exempt(lambda: "free"))
    blueprint.add_url_rule("/a", "other", view_mounted)
    app.register_blueprint(blueprint)
    return wsgi.RateLimitMiddleware(app.wsgi_app, **options)


def view_b(name):
    return name


def view_mounted():
    return "mounted"


class WsgiClient:
    def __init__(self, app):
        self._client = httpx.Client(transport=httpx.WSGITransport(app, remote_addr="203.0.113.9"), base_url="http://s")

    def get(self, path):
        return self._client.get(path)


@pytest.fixture(params=["starlette", "fastapi", "flask"])
def make(request):
    build = {"starlette": starlette_site, "fastapi": fastapi_site, "flask": flask_site}[request.param]

    def make(**options):
        app = build(clock=ManualClock(start=1_728_000_000), **options)
        return WsgiClient(app) if request.param == "flask" else Client(app)

    return make


def statuses(client, path, times):
    return [client.get(path).status_code for _ in range(times)]


def test_each_route_has_its_own_count(make):
    client = make(default_limits="2/1m")
    assert statuses(client, "/a", 3) == [200, 200, 429]
    assert [client.get(f"/b/{name}").status_code for name in "xyz"] == [200, 200, 429]  # a route, not a URL
    assert statuses(client, "/mounted/a", 3) == [200, 200, 429]
    assert client.get("/b/x").headers["x-ratelimit-limit"] == "2"


def test_the_limits_of_a_route_replace_the_defaults(make):
    client = make(default_limits="2/1m")
    assert statuses(client, "/own", 4) == [200, 200, 200, 429]
    assert statuses(client, "/added", 4) == [200, 200, 429, 429]


def test_default_limits_apply_to_methods_that_the_limits_of_a_route_do_not_limit(make):
    client = make(default_limits="2/1m")
    assert statuses(client, "/posted", 3) == [200, 200, 429]


@pytest.mark.parametrize("name", ["default_limits", "application_limits"])
def test_the_response_decides_whether_they_count(make, name):
    client = make(**{name: "1/1m"}, count={name: lambda request, status: status == 404})
    assert statuses(client, "/a", 3) == [200, 200, 200]
    assert statuses(client, "/missing", 2) == [404, 429]


def test_requests_without_a_route_share_one_count(make):
    client = make(default_limits="2/1m")
    assert [client.get(f"/missing/{name}").status_code for name in "xyz"] == [404, 404, 429]
    assert client.get("/a").status_code == 200


def test_application_limits_count_all_routes_together(make):
    client = make(application_limits="4/1m")
    assert [client.get(path).status_code for path in ("/a", "/b/x", "/own", "/missing", "/a", "/own")] == [
        *(200, 200, 200, 404),
        *(429, 429),
    ]
    assert client.get("/own").headers["x-ratelimit-limit"] == "4"  # the tightest


def test_a_request_that_one_of_them_denies_is_charged_to_none(make):
    client = make(default_limits="2/1m", application_limits="4/1m")
    assert statuses(client, "/a", 9) == [200, 200, *[429] * 7]
    assert statuses(client, "/b/x", 3) == [200, 200, 429]
    assert statuses(client, "/own", 1) == [429]


def test_exempt_routes_and_paths_are_not_charged(make):
    client = make(default_limits="1/1m", application_limits="1/1m", config={"exempt": ["/b/*"], "defaults": False})
    assert statuses(client, "/free", 3) == [200, 200, 200]
    assert statuses(client, "/b/x", 3) == [200, 200, 200]
    assert statuses(client, "/a", 2) == [200, 429]


def test_the_response_names_each_limit_that_said_no(make):
    client = make(default_limits="1/1m", application_limits="1/1h", headers="ietf")
    client.get("/a")
    reply = client.get("/a")
    assert reply.status_code == 429
    assert '"application-1h"' in reply.headers["ratelimit"]
    assert '"default-1m"' in reply.headers["ratelimit"]


def test_categories_apply_as_well(make):
    category = {"limit": 1, "window": "1m", "endpoints": ["/b/{name}"]}
    client = make(config={"categories": {"few": category}}, default_limits="2/1m")
    assert statuses(client, "/b/x", 2) == [200, 429]
    assert statuses(client, "/a", 3) == [200, 200, 429]


def test_the_documents_defaults_do_not_apply_beside_them(make):
    client = make(default_limits="2/1m")
    assert client.get("/a").headers["x-ratelimit-limit"] == "2"
    assert "60" not in {client.get(path).headers["x-ratelimit-limit"] for path in ("/b/x", "/missing")}


def test_an_application_without_known_routes_has_one_count():
    async def app(scope, _receive, send):
        calls.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    calls = []
    client = Client(asgi.RateLimitMiddleware(app, default_limits="2/1m", clock=ManualClock(start=1_728_000_000)))
    assert [client.get(path).status_code for path in ("/a", "/b", "/c")] == [200, 200, 429]
    assert calls == ["/a", "/b"]  # decided before the application runs


def test_both_can_be_set_in_the_file():
    rules = load_rules({"application_limits": "100/1h", "default_limits": ["5/1m", {"limit": 9, "window": "1d"}]})
    assert rules.categories == ()
    assert [str(limit) for limit in rules.application_limits.policy.limits] == [
        str(load_rules({"application_limits": ["100/1h"]}).application_limits.policy.limits[0])
    ]
    assert [limit.name for limit in rules.default_limits.policy.limits] == ["default-1m", "default-1d"]


def test_a_file_that_is_changed_adds_and_removes_them(tmp_path):
    path, clock = tmp_path / "config.yaml", ManualClock(start=1_728_000_000)
    path.write_text("rate_limiting: {defaults: false}")
    app = starlette_site(config=path, clock=clock)
    client = Client(app)
    assert statuses(client, "/a", 3) == [200, 200, 200]
    path.write_text("rate_limiting: {default_limits: 1/1m}")
    assert app.request_limiter.reload() is None
    assert statuses(client, "/a", 2) == [200, 429]
    path.write_text("rate_limiting: {default_limits: 2/1m}")
    assert app.request_limiter.reload() is None
    assert statuses(client, "/a", 2) == [200, 429]  # a changed quota refills nothing


@pytest.mark.parametrize("name", ["application_limits", "default_limits"])
def test_mistakes_say_where_they_are(name):
    with pytest.raises(ConfigError, match=rf"^{name}: .*'many'"):
        starlette_site(**{name: "many"})
    with pytest.raises(ConfigError, match=rf"^{name}: .*'many'"):
        load_rules({name: "many"})
    with pytest.raises(ConfigError, match=rf"categories: the name '{name}' is reserved"):
        starlette_site(config={"categories": {name: {"limit": 1, "endpoints": ["/"]}}}, default_limits="1/1m")


def test_resetting_a_client_resets_its_default_limits(make):
    site = starlette_site(default_limits="1/1m", clock=ManualClock(start=1_728_000_000), store="memory://")
    client = Client(site)
    assert statuses(client, "/a", 2) == [200, 429]
    site.request_limiter.reset_all()
    assert statuses(client, "/a", 2) == [200, 429]


def test_handlers_of_aiohttp_have_them():
    async def page(_request):
        return web.Response(text="page")

    async def other(_request):
        return web.Response(text="other")

    async def run():
        middleware = aiohttp.RateLimitMiddleware(**EXTRA, clock=ManualClock(start=1_728_000_000))
        app = web.Application(middlewares=[middleware])
        app.router.add_get("/a/{name}", page)
        app.router.add_get("/b", other)
        app.router.add_get("/own", aiohttp.limit("3/1m")(page))
        async with TestClient(TestServer(app)) as client:
            paths = ("/a/x", "/a/y", "/a/z", "/b", "/missing", "/missing/2", "/own", "/own", "/own", "/own", "/b", "/b")
            return [(await client.get(path)).status for path in paths]

    assert asyncio.run(run()) == [200, 200, 429, 200, 404, 404, 200, 200, 200, 429, 200, 429]
