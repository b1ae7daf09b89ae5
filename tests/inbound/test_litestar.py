"""The ASGI middleware in Litestar, as docs/frameworks.md shows it."""

import asyncio

import httpx
import litestar
from litestar.middleware import DefineMiddleware

from tidegate.inbound.asgi import RateLimitMiddleware
from tidegate.testing import ManualClock


def test_litestar_is_limited_by_the_middleware():
    @litestar.get("/items")  # type: ignore[untyped-decorator]  # its types are not complete
    async def items() -> list[int]:
        return [1, 2]

    config = {"categories": {"read": {"limit": 2, "window": "1m"}}}
    clock = ManualClock(start=1_728_000_000)
    middleware = [DefineMiddleware(RateLimitMiddleware, config=config, clock=clock)]
    # Its default logging replaces the handlers of the root logger, for all tests.
    app = litestar.Litestar([items], middleware=middleware, logging_config=None)

    async def ask():
        transport = httpx.ASGITransport(app, client=("203.0.113.9", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://site") as client:
            return [await client.get("/items") for _ in range(3)]

    replies = asyncio.run(ask())
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert [reply.headers["x-ratelimit-remaining"] for reply in replies] == ["1", "0", "0"]
