"""Measure one category and one route limit, decided together, in process: microseconds of processor time per request.

    python -m bench.inbound_one_decision [--rounds 40]

Each framework serves the same page bare, behind a middleware that does nothing, behind one that adds three constant
header fields (in FastAPI with a dependency that does nothing: what any limiter costs at least), and with tidegate: only
a category, only a route limit (decorator, and in FastAPI the dependency form), and both together; the same with 200
other routes (over the same site without limits), in an included router, with an observer, a `count`, a plan, a key
function. The sites are timed in turns, in slices of many calls; the best and the median of the slices are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path
from statistics import median
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from bench.inbound import plain_slice, task_slice  # noqa: E402 - after the path to it is known
from bench.inbound_sites import PATH  # noqa: E402 - as above
from tidegate.inbound import asgi, wsgi  # noqa: E402 - as above

LIMIT: Final = "1000000/1s"
CONFIG: Final = {
    "defaults": False, "unmatched": "all", "categories": {"all": {"limit": 1_000_000, "window": "1s"}},
}  # fmt: skip

PLANS: Final = {
    "defaults": False,
    "categories": {
        "all": {"limit": 1_000_000, "window": "1s", "endpoints": ["/*"], "plans": {"pro": "1000000/1s"}},
    },
}

FIELDS: Final = (
    ("X-RateLimit-Limit", "1000000"), ("X-RateLimit-Remaining", "999999"), ("X-RateLimit-Reset", "1900000000"),
)  # fmt: skip
RAW_FIELDS: Final = [(name.lower().encode(), value.encode()) for name, value in FIELDS]


def ignore(_record: object) -> None:
    """Observe a decision."""


class NothingAsgi:
    """A middleware that does nothing."""

    def __init__(self, app: Any) -> None:  # noqa: ANN401 - an application
        """Wrap an application."""
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - as ASGI has it
        """Pass the request on."""
        await self.app(scope, receive, send)


class ConstantAsgi(NothingAsgi):
    """A middleware that adds three constant header fields: what every limiter with headers costs at least."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - as ASGI has it
        """Pass the request on, and add the fields to its response."""

        def send_with_fields(message: Any) -> Any:  # noqa: ANN401 - as ASGI has it
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *RAW_FIELDS]}
            return send(message)

        await self.app(scope, receive, send_with_fields)


class NothingWsgi(NothingAsgi):
    """A middleware that does nothing."""

    def __call__(self, environ: Any, start_response: Any) -> Any:  # type: ignore[override]  # noqa: ANN401 - as WSGI has it
        """Pass the request on."""
        return self.app(environ, start_response)


class ConstantWsgi(NothingAsgi):
    """A middleware that adds three constant header fields."""

    def __call__(self, environ: Any, start_response: Any) -> Any:  # type: ignore[override]  # noqa: ANN401 - as WSGI has it
        """Pass the request on, and add the fields to its response."""

        def start_with_fields(status: str, headers: Any, exc_info: Any = None) -> Any:  # noqa: ANN401 - as above
            return start_response(status, [*headers, *FIELDS], exc_info)

        return self.app(environ, start_with_fields)


def starlette_site(*, limited: bool, others: int = 0, **options: Any) -> Any:  # noqa: ANN401 - an application
    """Build a page in Starlette, after other routes; the options are those of its limit."""
    from starlette.applications import Starlette  # noqa: PLC0415 - measured only if it is installed
    from starlette.responses import PlainTextResponse  # noqa: PLC0415 - as above
    from starlette.routing import Route  # noqa: PLC0415 - as above

    from tidegate.inbound.starlette import limit  # noqa: PLC0415 - as above

    async def page(_request: Any) -> Any:  # noqa: ANN401 - a request
        return PlainTextResponse("hello")

    routes = [Route(f"/other{number}/{{name}}", page) for number in range(others)]
    return Starlette(routes=[*routes, Route(PATH, limit(LIMIT, **options)(page) if limited else page)])


def fastapi_site(kind: str, *, included: bool = False, **options: Any) -> Any:  # noqa: ANN401 - an application
    """Build a page in FastAPI, limited by a decorator or by a dependency, or with one that does nothing."""
    from fastapi import APIRouter, Depends, FastAPI, Response  # noqa: PLC0415 - as above
    from fastapi.requests import HTTPConnection  # noqa: PLC0415 - as above

    from tidegate.inbound.fastapi import limit  # noqa: PLC0415 - as above

    async def page() -> str:
        return "hello"

    async def empty(connection: Any, response: Any) -> None:  # noqa: ANN401 - see below
        """Do nothing, with the parameters of our dependency."""

    empty.__annotations__ = {"connection": HTTPConnection, "response": Response}  # FastAPI reads the types themselves
    app, router = FastAPI(), APIRouter()
    dependencies = {"depends": [Depends(limit(LIMIT, **options))], "empty": [Depends(empty)]}.get(kind, [])
    view: Any = limit(LIMIT, **options)(page) if kind == "decorator" else page  # type: ignore[arg-type]  # a decorator
    (router if included else app).get(PATH, dependencies=dependencies)(view)
    if included:
        app.include_router(router)
    return app


def flask_site(*, limited: bool) -> Any:  # noqa: ANN401 - an application
    """Build a page in Flask."""
    from flask import Flask  # noqa: PLC0415 - as above

    from tidegate.inbound.flask import limit  # noqa: PLC0415 - as above

    def page() -> str:
        return "hello"

    app = Flask("bench")
    app.get(PATH)(limit(LIMIT)(page) if limited else page)
    return app


def behind(app: Any) -> Any:  # noqa: ANN401 - an application
    """Put the middleware in front of a Flask application."""
    return wsgi.RateLimitMiddleware(app.wsgi_app, CONFIG)


def sites() -> dict[str, Any]:
    """Build all sites."""
    return {
        "starlette bare": starlette_site(limited=False),
        "starlette nothing": NothingAsgi(starlette_site(limited=False)),
        "starlette constant": ConstantAsgi(starlette_site(limited=False)),
        "starlette category": asgi.RateLimitMiddleware(starlette_site(limited=False), CONFIG),
        "starlette route": starlette_site(limited=True),
        "starlette both": asgi.RateLimitMiddleware(starlette_site(limited=True), CONFIG),
        "starlette200 nothing": NothingAsgi(starlette_site(limited=False, others=200)),
        "starlette200 both": asgi.RateLimitMiddleware(starlette_site(limited=True, others=200), CONFIG),
        "starlette observer": asgi.RateLimitMiddleware(starlette_site(limited=True), CONFIG, observer=ignore),
        "starlette count": asgi.RateLimitMiddleware(starlette_site(limited=True, count=["2xx"]), CONFIG),
        "starlette plan": asgi.RateLimitMiddleware(starlette_site(limited=True), PLANS, plan=lambda _request: "pro"),
        "starlette key": asgi.RateLimitMiddleware(starlette_site(limited=True, key=lambda _request: "a"), CONFIG),
        "fastapi nothing": NothingAsgi(fastapi_site("none")),
        "fastapi constant": ConstantAsgi(fastapi_site("empty")),
        "fastapi decorator": asgi.RateLimitMiddleware(fastapi_site("decorator"), CONFIG),
        "fastapi depends": asgi.RateLimitMiddleware(fastapi_site("depends"), CONFIG),
        "fastapi alone": fastapi_site("depends"),
        "fastapi included": asgi.RateLimitMiddleware(fastapi_site("depends", included=True), CONFIG),
        "fastapi count": asgi.RateLimitMiddleware(fastapi_site("depends", count=["2xx"]), CONFIG),
        "fastapi key": asgi.RateLimitMiddleware(fastapi_site("depends", key=lambda _request: "a"), CONFIG),
        "flask bare": flask_site(limited=False).wsgi_app,
        "flask nothing": NothingWsgi(flask_site(limited=False).wsgi_app),
        "flask constant": ConstantWsgi(flask_site(limited=False).wsgi_app),
        "flask category": behind(flask_site(limited=False)),
        "flask both": behind(flask_site(limited=True)),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure one category and one route limit, decided together.")
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    logging.disable(logging.WARNING)
    loop = asyncio.new_event_loop()
    apps = sites()
    times: dict[str, list[float]] = {name: [] for name in apps}
    for turn in range(rounds + 1):
        for name, app in apps.items():
            taken = plain_slice(app) if name.startswith("flask") else loop.run_until_complete(task_slice(app))
            if turn:  # the first warms up
                times[name].append(taken)
    loop.close()
    for name, some in times.items():
        floor = times[f"{name.split()[0]} nothing"]
        added = min(some) - min(floor)
        print(f"{name:20} best {min(some):7.1f} µs  median {median(some):7.1f} µs  over nothing {added:+6.1f} µs")


if __name__ == "__main__":
    main()
