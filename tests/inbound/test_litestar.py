"""The ASGI middleware in Litestar, as docs/howto/frameworks.md shows it."""

import asyncio

import httpx
import litestar
import pytest
from litestar.middleware import DefineMiddleware

from tidegate import ConfigError
from tidegate.inbound.asgi import RateLimitMiddleware
from tidegate.testing import ManualClock

CONFIG = {"categories": {"read": {"limit": 2, "window": "1m"}}}


@litestar.get("/items")  # type: ignore[untyped-decorator]  # its types are not complete
async def items() -> list[int]:
    return [1, 2]


@litestar.get("/others")  # type: ignore[untyped-decorator]  # as above
async def others() -> list[int]:
    return [3]


def test_all_routes_of_litestar_share_the_limits_of_the_middleware():
    # Its default logging replaces the handlers of the root logger, for all tests.
    site = litestar.Litestar([items, others], logging_config=None)
    app = RateLimitMiddleware(site, CONFIG, clock=ManualClock(start=1_728_000_000))

    async def ask():
        transport = httpx.ASGITransport(app, client=("203.0.113.9", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://site") as client:
            return [await client.get(path) for path in ("/items", "/others", "/items")]

    replies = asyncio.run(ask())
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert [reply.headers["x-ratelimit-remaining"] for reply in replies] == ["1", "0", "0"]


def test_default_limits_are_one_count_for_all_routes_of_litestar():
    ran = []

    @litestar.get("/page")  # type: ignore[untyped-decorator]  # its types are not complete
    async def page() -> str:
        ran.append("page")
        return "page"

    site = litestar.Litestar([page, others], logging_config=None)
    app = RateLimitMiddleware(site, default_limits="2/1m", clock=ManualClock(start=1_728_000_000))

    async def ask():
        transport = httpx.ASGITransport(app, client=("203.0.113.9", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://site") as client:
            return [(await client.get(path)).status_code for path in ("/page", "/others", "/page")]

    assert asyncio.run(ask()) == [200, 200, 429]
    assert ran == ["page"]  # a denied request does not reach the application


def test_a_middleware_for_each_route_would_have_its_own_counts():
    middleware = [DefineMiddleware(RateLimitMiddleware, config=CONFIG)]
    with pytest.raises(ConfigError, match="wrap the application instead"):
        litestar.Litestar([items], middleware=middleware, logging_config=None)
