"""The same routes in each framework, behind the middleware; every handler records that it has run.

The observer records the categories that a request is charged to. CATEGORY has the expected one, by the handler that
has run.
"""

import asyncio
import contextlib
import io
import warnings
from typing import Any

import django.urls
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.http import HttpResponse
from fastapi import APIRouter, FastAPI
from flask import Flask
from quart import Quart
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route, Router, WebSocketRoute
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from tests.inbound.harness import START
from tests.inbound.sites import django_site  # noqa: F401 - it configures Django
from tidegate.inbound import asgi, wsgi
from tidegate.testing import ManualClock

# Name of the route, its template, and its category (None: exempt). The most specific come first, because some routers
# use the first match. There is no endpoint for `item`, which the next wider endpoint matches, nor for `anything`, which
# belongs to the category of unmatched requests.
ROUTES = (
    ("import", "/import/{name}", "strict"),
    ("health", "/health", None),
    ("feeds", "/api/feeds", "lax"),
    ("upper", "/Reports/Daily", "lax"),
    ("slash", "/slash/", "lax"),
    ("number", "/items/{number:int}", "lax"),
    ("item", "/items/{name}", "middle"),
    ("nested", "/pre/lax", "lax"),
    ("files", "/files/{rest:path}", "lax"),
    ("two", "/{one}/{other}", "middle"),
    ("anything", "/{rest:path}", "unmatched"),
)
CATEGORY = {name: category for name, _, category in ROUTES}
QUOTA = 10**9
ran: list[str] = []
charged: list[str] = []


def config(prefix: str = "") -> dict[str, Any]:
    """Write the rules, with endpoints as the application sees them or with a prefix."""
    endpoints: dict[str, list[Any]] = {"strict": [], "lax": [], "middle": []}
    for name, template, category in ROUTES:
        if category in endpoints and name != "item":
            endpoints[category].append(prefix + template)
    categories: dict[str, Any] = {
        name: {"limit": QUOTA, "window": "1s", "endpoints": some} for name, some in endpoints.items()
    }
    categories["unmatched"] = {"limit": QUOTA, "window": "1s", "endpoints": []}
    return {"defaults": False, "categories": categories, "unmatched": "unmatched", "exempt": [f"{prefix}/health"]}


def observe(record: Any) -> None:
    charged.append(record.policy.name)


def build(kind: Any, app: Any, prefix: str = "", **options: Any) -> Any:
    """Put a middleware in front of an application."""
    rules = config(prefix)
    return kind.RateLimitMiddleware(app, rules, clock=ManualClock(start=START), observer=observe, **options)


# ---- the frameworks --------------------------------------------------------------------------------------------------


def with_angle_brackets(template: str) -> str:
    """Write a template as Flask, Quart and Django do."""
    for ours, theirs in (("{number:int}", "<int:number>"), ("{rest:path}", "<path:rest>")):
        template = template.replace(ours, theirs)
    return template.replace("{", "<").replace("}", ">")


def flask_app(kind: Any = Flask) -> Any:
    app = kind("routes", static_folder=None)
    for name, template, _ in ROUTES:

        def view(_name=name, **parts):
            ran.append(_name)
            return "ok"

        app.add_url_rule(with_angle_brackets(template), name, view)
    return app


def quart_app() -> Any:
    return flask_app(Quart)


def django_view(name):
    def view(request, **parts):
        ran.append(name)
        return HttpResponse("ok")

    return view


# Routes of the application, and one that ignores case and a line break, as `re_path` may.
urlpatterns = [
    django.urls.re_path(r"(?i)^import/(?P<name>[^/]+)$", django_view("import")),
    *(django.urls.path(with_angle_brackets(template)[1:], django_view(name)) for name, template, _ in ROUTES),
]


def starlette_endpoint(name: str) -> Any:
    async def endpoint(request: Request) -> PlainTextResponse:
        ran.append(name)
        return PlainTextResponse("ok")

    return endpoint


def starlette_socket(name: str) -> Any:
    async def endpoint(websocket: Any) -> None:
        ran.append(name)
        await websocket.accept()
        await websocket.close()

    return endpoint


def starlette_routes() -> list[Any]:
    return [
        kind(template, make(name))
        for name, template, _ in ROUTES
        for kind, make in ((Route, starlette_endpoint), (WebSocketRoute, starlette_socket))
    ]


def starlette_app() -> Starlette:
    return Starlette(routes=starlette_routes())


def fastapi_app(**options: Any) -> FastAPI:
    """Build an application with a part of its routes in an included router."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FastAPI recommends that the server sets root_path
        app = FastAPI(openapi_url=None, **options)
    router = APIRouter()
    for name, template, _ in ROUTES:
        first, _, rest = template[1:].partition("/")
        if first == "import":
            router.add_api_route(f"/{rest}", starlette_endpoint(name), methods=["GET", "POST"], response_model=None)
            app.include_router(router, prefix="/import")
        else:
            app.add_api_route(template, starlette_endpoint(name), methods=["GET", "POST"], response_model=None)
    return app


# ---- requests --------------------------------------------------------------------------------------------------------


class RoutedSite:
    """An application behind a middleware: `request` returns the route that has run and the charged categories."""

    def __init__(self, site: Any, runner: asyncio.Runner | None, root: str | None = None) -> None:
        self.site = site
        self.runner = runner
        self.root = root  # the only mount point it supports; None: any

    def request(
        self, path: str, root: str = "", method: str = "GET", kind: str = "http"
    ) -> tuple[str | None, set[str]]:
        ran.clear()
        charged.clear()
        if self.runner is None:
            self._wsgi(path, root, method)
        else:
            self.runner.run(self._asgi(path, root, method, kind))
        assert len(ran) <= 1
        return (ran[0] if ran else None), set(charged)

    def _wsgi(self, path: str, root: str, method: str) -> None:
        environ = {
            "REQUEST_METHOD": method, "SCRIPT_NAME": _latin(root), "PATH_INFO": _latin(path), "QUERY_STRING": "",
            "SERVER_NAME": "site", "SERVER_PORT": "80", "SERVER_PROTOCOL": "HTTP/1.1", "wsgi.version": (1, 0),
            "wsgi.url_scheme": "http", "wsgi.input": io.BytesIO(), "wsgi.errors": io.StringIO(), "REMOTE_ADDR": "::1",
            "wsgi.multithread": False, "wsgi.multiprocess": False, "wsgi.run_once": False,
        }  # fmt: skip
        body = self.site(environ, lambda *_: None)
        b"".join(body)
        if hasattr(body, "close"):
            body.close()

    async def _asgi(self, path: str, root: str, method: str, kind: str) -> None:
        scope = {
            "type": kind, "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
            "scheme": "http" if kind == "http" else "ws", "raw_path": b"", "query_string": b"", "root_path": root,
            "headers": [(b"host", b"site")], "client": ("::1", 1), "server": ("site", 80), "subprotocols": [],
        }  # fmt: skip
        messages = [{"type": "http.request", "body": b""} if kind == "http" else {"type": "websocket.connect"}]

        ended = asyncio.Event()

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await ended.wait()  # like a server: on Python 3.13, Quart waits for the end of the connection
            return {"type": f"{kind}.disconnect", "code": 1006}

        async def send(message: Any) -> None:
            if message["type"] == "websocket.close" or (
                message["type"] == "http.response.body" and not message.get("more_body", False)
            ):
                ended.set()

        with contextlib.suppress(ValueError, IndexError):  # Quart raises for some paths
            await self.site(scope, receive, send)


def _latin(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("latin-1")


def wsgi_site(app: Any, root: str | None = None, **options: Any) -> RoutedSite:
    return RoutedSite(build(wsgi, app, **options), None, root)


def asgi_site(app: Any, runner: asyncio.Runner, root: str | None = None, **options: Any) -> RoutedSite:
    return RoutedSite(build(asgi, app, **options), runner, root)


def django_wsgi() -> Any:
    return get_wsgi_application()


def django_asgi() -> Any:
    return get_asgi_application()


def not_found(environ: Any, start: Any) -> list[bytes]:
    """Respond with 404."""
    start("404 Not Found", [])
    return []


def dispatched_site(prefix: str = "") -> RoutedSite:
    """Mount the application and its middleware below a dispatcher."""
    return RoutedSite(DispatcherMiddleware(not_found, {prefix or "/sub": build(wsgi, flask_app(), prefix)}), None)


def mounted_site(runner: asyncio.Runner, app: Any, prefix: str = "") -> RoutedSite:
    """Mount the application and its middleware below another application."""
    return RoutedSite(Starlette(routes=[Mount(prefix or "/sub", build(asgi, app, prefix))]), runner)


def tenant_site(runner: asyncio.Runner) -> RoutedSite:
    """Mount the application and its middleware below a mount point that the client chooses."""
    return RoutedSite(Starlette(routes=[Mount("/{tenant}", build(asgi, starlette_app()))]), runner)


def per_route_site(runner: asyncio.Runner) -> RoutedSite:
    """Put a middleware on each route, so that the framework matches the route first."""
    routes = [Route(template, starlette_endpoint(name)) for name, template, _ in ROUTES]
    for route in routes:
        route.app = build(asgi, route.app)
    return RoutedSite(Router(routes), runner)
