"""For any spelling of a path: the category of the route that it reaches is charged.

The routers are those of Flask, Django, Starlette, FastAPI and Quart, mounted and not. The handler that has run
determines the expected category.
"""

import asyncio

import pytest
from django.test import override_settings
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.routing import Mount, Router
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from tests.inbound import routers
from tests.inbound.routers import CATEGORY

ROOTS = ["", "/v1", "/v1/", "/a/b", "/"]
PIECES = [
    "/", "/", "/", "//", "///", "import", "Import", "IMPORT", "\u0131mport", "\u0130mport", "health", "Health",
    "api", "feeds", "Reports", "reports", "Daily", "slash", "items", "7", "\u0663", "x", "files", "a", "b", "pre",
    "lax", "v1", ".", "..", "%2e%2e", "%2f", "%252f", ";x=1", "?q", "#f", "\\", " ", "\n", "\r\n", "\x00", "\t",
    "\x85", "\u2028", "\u017f", "\u212a", "http://site", "http:", "//site", "*", "{}", "<x>", "\xe9", "\ufffd",
]  # fmt: skip
PLAIN = ["/import/a", "/health", "/api/feeds", "/Reports/Daily", "/slash/", "/items/7", "/items/x", "/pre/lax",
         "/files/a/b", "/a/b", "/a/b/c", "/", ""]  # fmt: skip


@st.composite
def paths(draw):
    """A path of a route with random insertions and deletions, or a random sequence of pieces."""
    if draw(st.integers(0, 3)) == 0:
        return "".join(draw(st.lists(st.sampled_from(PIECES), max_size=8)))
    path = draw(st.sampled_from(["", "", "/v1", "/pre", "/sub", "/v1/sub", "v1"])) + draw(st.sampled_from(PLAIN))
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(path)))
        gone = draw(st.integers(0, 1))
        path = path[:place] + draw(st.sampled_from([*PIECES, ""])) + path[place + gone :]
    return draw(st.sampled_from([path, path, path, path.upper(), path.lower(), path.title()]))


WSGI = {
    "flask": lambda: routers.wsgi_site(routers.flask_app()),
    "flask, written with the prefix": lambda: routers.wsgi_site(routers.flask_app(), prefix="/v1", root="/v1"),
    "django": lambda: routers.wsgi_site(routers.django_wsgi()),
    "django, written with the prefix": lambda: routers.wsgi_site(routers.django_wsgi(), prefix="/v1", root="/v1"),
    "a dispatcher behind": lambda: routers.wsgi_site(
        DispatcherMiddleware(routers.not_found, {"/pre": routers.flask_app()}), prefix="/pre"
    ),
    "a dispatcher of nothing but a default": lambda: routers.wsgi_site(DispatcherMiddleware(routers.flask_app(), {})),
    "a dispatcher in front": routers.dispatched_site,
    "a dispatcher in front, written with the prefix": lambda: routers.dispatched_site("/pre"),
}
ASGI = {
    "starlette": lambda run: routers.asgi_site(routers.starlette_app(), run),
    "starlette, written with the prefix": lambda run: routers.asgi_site(
        routers.starlette_app(), run, prefix="/v1", root="/v1"
    ),
    "starlette mounted behind": lambda run: routers.asgi_site(
        Router([Mount("/pre", routers.starlette_app())]), run, prefix="/pre"
    ),
    "starlette mounted in front": lambda run: routers.mounted_site(run, routers.starlette_app()),
    "starlette mounted in front, written with the prefix": lambda run: routers.mounted_site(
        run, routers.starlette_app(), "/pre"
    ),
    "starlette mounted where the client chooses": routers.tenant_site,
    "starlette on routes": routers.per_route_site,
    "fastapi": lambda run: routers.asgi_site(routers.fastapi_app(), run),
    "fastapi, written with the prefix": lambda run: routers.asgi_site(
        routers.fastapi_app(), run, prefix="/v1", root="/v1"
    ),
    "fastapi mounted in front": lambda run: routers.mounted_site(run, routers.fastapi_app()),
    "fastapi with its own root": lambda run: routers.asgi_site(routers.fastapi_app(root_path="/v1"), run),
    "fastapi with its own root, written with it": lambda run: routers.asgi_site(
        routers.fastapi_app(root_path="/v1"), run, prefix="/v1"
    ),
    "quart": lambda run: routers.asgi_site(routers.quart_app(), run),
    "quart, written with the prefix": lambda run: routers.asgi_site(routers.quart_app(), run, prefix="/v1", root="/v1"),
    "quart mounted in front": lambda run: routers.mounted_site(run, routers.quart_app()),
    "django": lambda run: routers.asgi_site(routers.django_asgi(), run),
    "django, written with the prefix": lambda run: routers.asgi_site(
        routers.django_asgi(), run, prefix="/v1", root="/v1"
    ),
    "django with its own root": lambda run: routers.asgi_site(routers.django_asgi(), run, root_path="/v1"),
}


@pytest.fixture(scope="module", params=[*WSGI, *(f"asgi: {name}" for name in ASGI)])
def site(request):
    """Build a site once for all examples."""
    django_settings = {"FORCE_SCRIPT_NAME": "/v1"} if "django with its own root" in request.param else {}
    with asyncio.Runner() as runner, override_settings(ROOT_URLCONF="tests.inbound.routers", **django_settings):
        if request.param in WSGI:
            yield WSGI[request.param]()
        else:
            yield ASGI[request.param.removeprefix("asgi: ")](runner)


def check(site, path, root, method="GET", kind="http"):
    """Send a request, check that the category of its route was charged, and return the route."""
    route, charged = site.request(path, root, method, kind)
    if route is not None:
        category = CATEGORY[route]
        assert category is None or category in charged, f"{route} has run, charged was {charged}"
    return route


@given(path=paths(), root=st.sampled_from(ROOTS), method=st.sampled_from(["GET", "GET", "HEAD", "POST"]))
@example(path="import/a", root="/v1", method="GET")  # PATH_INFO of GET /v1import/a under SCRIPT_NAME=/v1
@example(path="/v1import/a", root="/v1", method="GET")  # the same, in ASGI
@example(path="/HEALTH", root="", method="GET")
@example(path="/health/", root="", method="GET")
@example(path="//health", root="", method="GET")
@example(path="/items/x", root="", method="GET")
@example(path="/files", root="", method="GET")
@example(path="/files/a\nb", root="", method="GET")
@example(path="/\u0131mport/a", root="", method="GET")
@example(path="/import/a\n", root="", method="GET")
@example(path="http://site/import/a;x", root="", method="GET")
@example(path="x/import/a", root="", method="GET")
@example(path="/v1/v1/import/a", root="/v1", method="GET")
@example(path="/x/v1/import/a", root="/v1", method="GET")
@example(path="/files/a/b/c", root="", method="GET")  # files is a tenant, and a prefix of endpoints
@example(path="/health/", root="", method="GET")
@example(path="V//import/a", root="", method="GET")
def test_the_category_of_the_route_that_runs_is_charged(site, request, path, root, method):
    root = root if site.root is None else site.root
    if "starlette mounted behind" in request.node.name:
        path = root + path  # as ASGI requires: Starlette's mounts read other paths twice
    check(site, path, root, method)


@given(path=paths(), root=st.sampled_from(ROOTS))
def test_the_category_of_a_websocket_route_is_charged(path, root):
    with asyncio.Runner() as runner:
        check(routers.asgi_site(routers.starlette_app(), runner), path, root, kind="websocket")


PATHS_OF = {
    "import": "/import/a", "health": "/health", "feeds": "/api/feeds", "number": "/items/7", "files": "/files/a/b",
    "two": "/a/b", "anything": "/a/b/c",
}  # fmt: skip


def test_every_route_can_be_reached_and_is_charged_to_nothing_else(site, request):
    """Shows that the checks above can fail: every route runs, and a plain path is charged to one category only."""
    name = request.node.callspec.params["site"]
    prefix = "/sub" if "in front" in name or "chooses" in name else "/pre" if "behind" in name else ""
    prefix = "/pre" if "in front, written" in name else prefix
    if site.root and site.runner is not None:
        prefix = site.root
    for route, path in PATHS_OF.items():
        category = CATEGORY[route]
        assert site.request(prefix + path, site.root or "") == (route, set() if category is None else {category})
