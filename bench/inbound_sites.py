"""The applications that bench.inbound compares: the same page, bare or behind one limiter each.

Limits are so high that nobody is denied, or (`…-denied`) one, so that everybody is.
"""

from __future__ import annotations

import logging
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

HIGH: Final = 1_000_000_000
PATH: Final = "/api/feeds"
ASGI: Final = (
    "starlette", "minimal", "tidegate", "tidegate-bucket", "tidegate-sqlite-leased", "tidegate-redis-leased", "slowapi",
    "fastapi", "tidegate-fastapi", "tidegate-depends", "fastapi-limiter",
)  # fmt: skip
DENIED: Final = ("tidegate-denied", "slowapi-denied")
WSGI: Final = ("flask", "tidegate-flask", "flask-limiter")
BARE: Final = {"fastapi": ("tidegate-fastapi", "tidegate-depends", "fastapi-limiter"), "flask": WSGI[1:]}


def starlette_site() -> Any:  # noqa: ANN401 - an application
    """A bare page in Starlette."""
    from starlette.applications import Starlette  # noqa: PLC0415 - each site needs its own framework
    from starlette.responses import PlainTextResponse  # noqa: PLC0415 - as above
    from starlette.routing import Route  # noqa: PLC0415 - as above

    async def page(request: Any) -> PlainTextResponse:  # noqa: ANN401, ARG001 - a request
        return PlainTextResponse("hello")

    return Starlette(routes=[Route(PATH, page)])


def fastapi_site(*dependencies: Any) -> Any:  # noqa: ANN401 - an application
    """A bare page in FastAPI, or one with dependencies."""
    from fastapi import FastAPI  # noqa: PLC0415 - as above
    from starlette.responses import PlainTextResponse  # noqa: PLC0415 - as above

    app = FastAPI()

    @app.get(PATH, dependencies=list(dependencies))
    async def page() -> PlainTextResponse:
        return PlainTextResponse("hello")

    return app


def flask_site(limit: Any = None) -> Any:  # noqa: ANN401 - an application
    """A bare page in Flask, or one with a decorator."""
    from flask import Flask  # noqa: PLC0415 - as above

    app = Flask(__name__)
    page = (limit(app) if limit else lambda view: view)(lambda: "hello")
    app.add_url_rule(PATH, "page", page)
    return app


def tidegate(app: Any, limit: int = HIGH, **more: Any) -> Any:  # noqa: ANN401 - an application
    """Ours, with a category look-up and headers."""
    from tidegate.inbound.asgi import RateLimitMiddleware  # noqa: PLC0415 - as above

    algorithm, store, lease = more.get("algorithm", "sliding_log"), more.get("store", "memory://"), more.get("lease")
    rules = {"categories": {"read": {"limit": limit, "algorithm": algorithm, "on_store_error": "deny"}}}
    return RateLimitMiddleware(app, rules, store=store, lease=lease)


def minimal() -> Any:  # noqa: ANN401 - an application
    """The least that counts calls by address and writes three fields: what no limiter can go below."""
    app, counts = starlette_site(), dict[str, int]()

    async def middleware(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - as ASGI has it
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        host = scope["client"][0]
        counts[host] = count = counts.get(host, 0) + 1

        async def sending(message: Any) -> None:  # noqa: ANN401 - as ASGI has it
            if message["type"] == "http.response.start":
                fields = [
                    (b"x-ratelimit-limit", b"%d" % HIGH),
                    (b"x-ratelimit-remaining", b"%d" % (HIGH - count)),
                    (b"x-ratelimit-reset", b"1728000000"),
                ]
                message = {**message, "headers": [*message["headers"], *fields]}
            await send(message)

        await app(scope, receive, sending)

    return middleware


def slowapi(limit: int) -> Any:  # noqa: ANN401 - an application
    """Starlette behind slowapi, as its documentation shows it, with headers."""
    peer: Any = import_module("slowapi")
    app = starlette_site()
    address = import_module("slowapi.util").get_remote_address
    app.state.limiter = peer.Limiter(key_func=address, default_limits=[f"{limit}/minute"], headers_enabled=True)
    app.add_exception_handler(
        import_module("slowapi.errors").RateLimitExceeded,
        peer._rate_limit_exceeded_handler,  # noqa: SLF001 - as its documentation does
    )
    app.add_middleware(import_module("slowapi.middleware").SlowAPIASGIMiddleware)
    return app


def fastapi_limiter() -> Any:  # noqa: ANN401 - an application
    """FastAPI with fastapi-limiter, which writes no headers."""
    from fastapi import Depends  # noqa: PLC0415 - as above

    peer: Any = import_module("pyrate_limiter")
    limiter = peer.Limiter(peer.Rate(10_000_000, peer.Duration.SECOND))
    return fastapi_site(Depends(import_module("fastapi_limiter.depends").RateLimiter(limiter=limiter)))


def tidegate_depends() -> Any:  # noqa: ANN401 - an application
    """FastAPI with our dependency."""
    from fastapi import Depends  # noqa: PLC0415 - as above

    from tidegate.inbound.fastapi import limit  # noqa: PLC0415 - as above

    return fastapi_site(Depends(limit(f"{HIGH}/1m")))


def tidegate_flask() -> Any:  # noqa: ANN401 - an application
    """Flask behind ours."""
    from tidegate.inbound.wsgi import RateLimitMiddleware  # noqa: PLC0415 - as above

    app = flask_site()
    return RateLimitMiddleware(app, {"categories": {"read": {"limit": HIGH}}})


def flask_limiter() -> Any:  # noqa: ANN401 - an application
    """Flask with Flask-Limiter, with headers, in memory."""
    peer: Any = import_module("flask_limiter")
    address = import_module("flask_limiter.util").get_remote_address

    def limit(app: Any) -> Any:  # noqa: ANN401 - a decorator
        limiter = peer.Limiter(address, app=app, storage_uri="memory://", headers_enabled=True)
        return limiter.limit(f"{HIGH}/minute")

    return flask_site(limit)


SITES: Final[dict[str, Callable[[], Any]]] = {
    "starlette": starlette_site,
    "minimal": minimal,
    "tidegate": lambda: tidegate(starlette_site()),
    "tidegate-bucket": lambda: tidegate(starlette_site(), algorithm="token_bucket", limit=1_000_000),
    "tidegate-sqlite-leased": lambda: tidegate(starlette_site(), store=os.environ["BENCH_SQLITE"], lease=True),
    "tidegate-redis-leased": lambda: tidegate(starlette_site(), store=os.environ["BENCH_REDIS"], lease=True),
    "slowapi": lambda: slowapi(HIGH),
    "fastapi": fastapi_site,
    "tidegate-fastapi": lambda: tidegate(fastapi_site()),
    "tidegate-depends": tidegate_depends,
    "fastapi-limiter": fastapi_limiter,
    "tidegate-denied": lambda: tidegate(starlette_site(), limit=1),
    "slowapi-denied": lambda: slowapi(1),
    "flask": flask_site,
    "tidegate-flask": tidegate_flask,
    "flask-limiter": flask_limiter,
}


def app() -> Any:  # noqa: ANN401 - an application
    """Build the site that BENCH_SITE names; what a server starts."""
    logging.getLogger("tidegate").setLevel(logging.ERROR)  # lines on a terminal are not what is measured
    logging.getLogger("slowapi").setLevel(logging.ERROR)
    return SITES[os.environ["BENCH_SITE"]]()
