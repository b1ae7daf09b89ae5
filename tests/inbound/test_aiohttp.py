"""Limits for aiohttp.web, with real servers on loopback."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import WSServerHandshakeError, web
from aiohttp.test_utils import TestClient, TestServer

from tidegate import ConfigError, Limiter, Policy
from tidegate.inbound import common_request, current_limits, limited
from tidegate.inbound._client.request import by_api_key, by_header
from tidegate.inbound.aiohttp import RateLimitMiddleware, exempt, limit
from tidegate.testing import ManualClock

TestServer.__test__ = TestClient.__test__ = False  # not tests, in spite of their names

START = 1_728_000_000
TOKEN = "a-token-of-the-admin"  # noqa: S105 - of this test
CONFIG = {
    "defaults": False,
    "unmatched": None,
    "categories": {"api": {"limit": 2, "window": "1m", "endpoints": ["/api/*"]}},
}


@pytest.fixture
def clock():
    return ManualClock(start=START)


@asynccontextmanager
async def serve(*routes, middlewares=()):
    app = web.Application(middlewares=middlewares)
    app.add_routes(routes)
    for middleware in middlewares:
        app.on_cleanup.append(middleware.close)
    async with TestClient(TestServer(app)) as client:
        yield client


async def hello(request):
    return web.Response(text="hello")


async def statuses(client, path, count, method="GET", **options):
    return [(await client.request(method, path, **options)).status for _ in range(count)]


# ---- handlers --------------------------------------------------------------------------------------------------------


async def test_a_handler_is_limited_and_the_denial_says_when_to_retry(clock):
    async with serve(web.get("/items/{number}", limit("2/1m")(hello))) as client:
        replies = [await client.get(f"/items/{number}") for number in (1, 2, 3)]
        assert [reply.status for reply in replies] == [200, 200, 429]
        assert [reply.headers["X-RateLimit-Remaining"] for reply in replies] == ["1", "0", "0"]
        assert [reply.headers.get("Retry-After") for reply in replies] == [None, None, "60"]
        assert await replies[2].text() == "Rate limit exceeded. Try again later."
        clock.advance(60)
        assert await statuses(client, "/items/1", 1) == [200]


async def test_each_handler_has_its_own_count_and_a_scope_shares_one(clock):
    shared = limit("1/1m", scope="both")

    async def one(request):
        return web.Response()

    async def two(request):
        return web.Response()

    own = limit("1/1m")
    routes = [web.get("/a", own(one)), web.get("/b", own(two)), web.get("/c", shared(one)), web.get("/d", shared(two))]
    async with serve(*routes) as client:
        assert [(await client.get(path)).status for path in ("/a", "/b", "/c", "/d")] == [200, 200, 200, 429]


async def test_the_class_of_a_view_is_limited_as_a_whole(clock):
    @limit("2/1m")
    class View(web.View):
        async def get(self):
            return web.Response(text="got")

        async def post(self):
            return web.Response(text="posted")

    async with serve(web.view("/view", View)) as client:
        assert await (await client.get("/view")).text() == "got"
        assert await (await client.post("/view")).text() == "posted"
        assert await statuses(client, "/view", 1) == [429]


async def test_a_method_of_a_view_is_limited(clock):
    class View(web.View):
        @limit("1/1m")
        async def get(self):
            return web.Response()

        async def post(self):
            return web.Response()

    async with serve(web.view("/view", View)) as client:
        assert await statuses(client, "/view", 2) == [200, 429]
        assert await statuses(client, "/view", 2, "POST") == [200, 200]


async def test_a_method_with_a_request_argument_is_limited(clock):
    class Pages:
        @limit("1/1m")
        async def page(self, request):
            return web.Response()

    async with serve(web.get("/page", Pages().page)) as client:
        assert await statuses(client, "/page", 2) == [200, 429]


async def test_a_handler_without_a_request_is_an_error():
    @limit("1/1m")
    async def handler(name):
        return web.Response(text=name)

    with pytest.raises(ConfigError, match="has no request argument"):
        await handler("x")


async def test_a_key_chooses_the_count(clock):
    async with serve(web.get("/", limit("1/1m", key=by_api_key())(hello))) as client:
        assert await statuses(client, "/", 2, headers={"X-API-Key": "a"}) == [200, 429]
        assert await statuses(client, "/", 1, headers={"X-API-Key": "b"}) == [200]


async def test_limits_and_cost_may_depend_on_the_request(clock):
    plans = limit(
        lambda request: "4/1m" if request.headers.get("x-plan") == "pro" else "2/1m",
        key=by_header("x-plan"),
        cost=lambda request: int(request.headers.get("x-cost") or 1),
    )
    async with serve(web.get("/", plans(hello))) as client:
        assert await statuses(client, "/", 3, headers={"X-Plan": "free"}) == [200, 200, 429]
        assert await statuses(client, "/", 3, headers={"X-Plan": "pro", "X-Cost": "2"}) == [200, 200, 429]


async def test_a_custom_denial_is_sent_as_given(clock):
    handler = limit("1/1m", denied=lambda request, decision: {"error": "slow down"})(hello)
    async with serve(web.get("/", handler)) as client:
        await client.get("/")
        reply = await client.get("/")
        assert (reply.status, await reply.json()) == (429, {"error": "slow down"})


async def test_a_raised_response_has_the_headers_too(clock):
    async def missing(request):
        raise web.HTTPNotFound

    async with serve(web.get("/", limit("2/1m")(missing))) as client:
        reply = await client.get("/")
        assert (reply.status, reply.headers["X-RateLimit-Remaining"]) == (404, "1")


async def test_a_stream_passes_unchanged(clock):
    async def stream(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(3):
            await response.write(b"x" * 1000)
        return response

    middleware = RateLimitMiddleware(CONFIG, clock=clock)
    async with serve(web.get("/api/s", limit("5/1m")(stream)), middlewares=[middleware]) as client:
        assert len(await (await client.get("/api/s")).read()) == 3000


async def test_a_web_socket_is_denied_before_it_opens(clock):
    async def socket(request):
        websocket = web.WebSocketResponse()
        await websocket.prepare(request)
        await websocket.close()
        return websocket

    async with serve(web.get("/ws", limit("1/1m")(socket))) as client:
        async with client.ws_connect("/ws"):
            pass
        with pytest.raises(WSServerHandshakeError) as refused:
            await client.ws_connect("/ws")
        assert refused.value.status == 429


# ---- the middleware --------------------------------------------------------------------------------------------------


async def test_categories_limit_an_application(clock):
    middleware = RateLimitMiddleware(CONFIG, clock=clock)
    async with serve(web.get("/api/{name}", hello), web.get("/free", hello), middlewares=[middleware]) as client:
        replies = [await client.get(f"/api/{number}") for number in range(3)]
        assert [reply.status for reply in replies] == [200, 200, 429]
        assert replies[2].headers["Retry-After"] == "60"
        assert "X-RateLimit-Limit" not in (await client.get("/free")).headers
        assert await statuses(client, "/API//x", 1) == [429], "another spelling of the same path"


async def test_a_missing_page_belongs_to_its_category(clock):
    async with serve(middlewares=[RateLimitMiddleware(CONFIG, clock=clock)]) as client:
        reply = await client.get("/api/none")
        assert (reply.status, reply.headers["X-RateLimit-Remaining"]) == (404, "1")
        assert await statuses(client, "/api/none", 2) == [404, 429]


async def test_behind_the_middleware_the_headers_show_the_tightest_limit(clock):
    middleware = RateLimitMiddleware(CONFIG, clock=clock)
    async with serve(web.get("/api/x", limit("1/1h")(hello)), middlewares=[middleware]) as client:
        reply = await client.get("/api/x")
        assert (reply.headers["X-RateLimit-Limit"], reply.headers["X-RateLimit-Remaining"]) == ("1", "0")
        reply = await client.get("/api/x")
        assert (reply.status, reply.headers["Retry-After"]) == (429, "3600")


async def test_the_category_and_the_limits_of_a_handler_are_decided_together(clock):
    class View(web.View):
        @limit("50/1h", name="wide")
        @limit("1/1m", name="tight")
        async def get(self):
            return web.Response()

    config = {"defaults": False, "unmatched": "all", "categories": {"all": {"limit": 3, "window": "1h"}}}
    middleware = RateLimitMiddleware(config, clock=clock)
    handler = limit("50/1h", name="wide")(limit("1/1m", name="tight")(hello))
    async with serve(web.get("/x", handler), web.view("/v", View), middlewares=[middleware]) as client:
        assert await statuses(client, "/x", 4) == [200, 429, 429, 429]
        assert await statuses(client, "/v", 4) == [200, 429, 429, 429]
        assert await statuses(client, "/none", 2) == [404, 429], "denied requests were not charged to the category"
        clock.advance(60)
        assert await statuses(client, "/x", 1) == [429]
        left = middleware_left(middleware, "tests.inbound.test_aiohttp.hello:wide", "50/1h sliding_log name=wide")
        assert left == 49, "a request that the category denies is not charged to the handler"


def middleware_left(middleware, name, limit):
    """Return what is left of a limit of a handler."""
    request_limiter = middleware.request_limiter
    return (
        Limiter(Policy(name, limit), store=request_limiter.store, clock=request_limiter.own_clock)
        .peek("127.0.0.1", 0)
        .remaining
    )


async def test_a_response_before_the_handler_is_charged_to_the_category(clock):
    @web.middleware
    async def login(request, handler):
        raise web.HTTPUnauthorized

    middleware = RateLimitMiddleware(CONFIG, clock=clock)
    app = web.Application(middlewares=[middleware, login])
    app.add_routes([web.get("/api/x", limit("50/1h")(hello))])
    async with TestClient(TestServer(app)) as client:
        assert await statuses(client, "/api/x", 3) == [401, 401, 429]


async def test_denials_of_a_handler_block_the_client(clock):
    config = {"defaults": False, "unmatched": "all", "categories": {"all": {"limit": 90, "window": "1h"}}}
    middleware = RateLimitMiddleware(config, clock=clock, block_after="2/1m", block_for="10m")
    async with serve(web.get("/x", limit("1/1m")(hello)), middlewares=[middleware]) as client:
        replies = [await client.get("/x") for _ in range(4)]
        assert [reply.status for reply in replies] == [200, 429, 429, 429]
        assert [reply.headers.get("Retry-After") for reply in replies] == [None, "60", "600", "600"]


async def test_an_exempt_handler_a_block_and_a_limit_that_only_reports(clock):
    exports = limit("1/1m", scope="exports")

    @exempt
    async def free(request):
        async with exports.check(request):
            return web.Response(text=str([each.name for each in current_limits(request)]))

    @limit("1/1m", mode="shadow")
    async def reported(request):
        return web.Response(text=f"{limited(request)} {common_request(request).address}")

    middleware = RateLimitMiddleware(CONFIG, clock=clock)
    async with serve(web.get("/api/f", free), web.get("/r", reported), middlewares=[middleware]) as client:
        replies = [await client.get("/api/f") for _ in range(3)]
        assert [reply.status for reply in replies] == [200, 429, 429]
        assert await replies[0].text() == "['1m']"
        assert await replies[1].text() == "Rate limit exceeded. Try again later."
        assert [await (await client.get("/r")).text() for _ in range(2)] == ["False 127.0.0.1", "True 127.0.0.1"]


async def test_nested_middlewares_write_the_headers_once(clock):
    middlewares = [RateLimitMiddleware(CONFIG, clock=clock) for _ in range(2)]
    async with serve(web.get("/api/x", hello), middlewares=middlewares) as client:
        for expected in (200, 200, 429):
            reply = await client.get("/api/x")
            assert (reply.status, len(reply.headers.getall("X-RateLimit-Limit"))) == (expected, 1)


async def test_only_failed_logins_count(clock):
    login = {"limit": 2, "window": "1m", "endpoints": ["/login"], "count": [401]}

    async def check(request):
        if request.headers.get("password") != "right":
            raise web.HTTPUnauthorized
        return web.Response()

    config = {"defaults": False, "unmatched": None, "categories": {"login": login}}
    async with serve(web.post("/login", check), middlewares=[RateLimitMiddleware(config, clock=clock)]) as client:
        assert await statuses(client, "/login", 5, "POST", headers={"password": "right"}) == [200] * 5
        assert await statuses(client, "/login", 3, "POST") == [401, 401, 429]


async def test_a_failing_handler_gives_its_slot_back(clock):
    slots = {"limits": ["1/1m concurrency"], "endpoints": ["/api/*"]}

    async def fail(request):
        raise RuntimeError("as intended")

    config = {"defaults": False, "unmatched": None, "categories": {"slots": slots}}
    async with serve(web.get("/api/x", fail), middlewares=[RateLimitMiddleware(config, clock=clock)]) as client:
        assert await statuses(client, "/api/x", 3) == [500, 500, 500]


async def test_concurrent_requests_share_the_slots(clock):
    slots = {"limits": ["1/1m concurrency"], "endpoints": ["/api/*"]}
    started, finish = asyncio.Event(), asyncio.Event()

    async def wait(request):
        started.set()
        await finish.wait()
        return web.Response()

    config = {"defaults": False, "unmatched": None, "categories": {"slots": slots}}
    async with serve(web.get("/api/x", wait), middlewares=[RateLimitMiddleware(config, clock=clock)]) as client:
        first = asyncio.create_task(client.get("/api/x"))
        await started.wait()
        assert await statuses(client, "/api/x", 1) == [429]
        finish.set()
        assert (await first).status == 200
        assert await statuses(client, "/api/x", 1) == [200]


async def test_trusted_proxies_name_the_client(clock):
    middleware = RateLimitMiddleware(CONFIG, clock=clock, trusted_proxies=["127.0.0.1"])
    async with serve(web.get("/api/x", hello), middlewares=[middleware]) as client:
        for address in ("198.51.100.1", "198.51.100.2"):
            assert await statuses(client, "/api/x", 3, headers={"X-Forwarded-For": address}) == [200, 200, 429]


async def test_methods_of_an_override_header_are_limited(clock):
    writes = {"limit": 1, "window": "1m", "endpoints": [{"path": "/api/x", "methods": ["DELETE"]}]}
    config = {"defaults": False, "unmatched": None, "categories": {"writes": writes}}
    middleware = RateLimitMiddleware(config, clock=clock)
    async with serve(web.post("/api/x", hello), middlewares=[middleware]) as client:
        assert await statuses(client, "/api/x", 3, "POST") == [200] * 3
        assert await statuses(client, "/api/x", 2, "POST", headers={"X-HTTP-Method-Override": "DELETE"}) == [200, 429]


async def test_the_admin_endpoint_is_served(clock):
    middleware = RateLimitMiddleware(CONFIG, clock=clock, admin_token=TOKEN)
    async with serve(web.get("/api/x", hello), middlewares=[middleware]) as client:
        await statuses(client, "/api/x", 3)
        stats = await (await client.get("/api/admin/rate-limit-stats")).json()
        assert stats["by_category"] == {"api": 1}
        body = json.dumps({"action": "reset", "key": "127.0.0.1"})
        path = "/api/admin/rate-limit-stats"
        assert (await client.post(path, data=body)).status == 403
        allowed = await client.post(path, data=body, headers={"Authorization": f"Bearer {TOKEN}"})
        assert allowed.status == 200, await allowed.text()
        assert await statuses(client, "/api/x", 1) == [200]


async def test_counts_are_shared_through_a_store(tmp_path, clock):
    store = f"sqlite:///{tmp_path}/limits.db"
    config = {**CONFIG, "on_store_error": "deny"}  # by default, processes keep a reserve for an outage
    sites = [RateLimitMiddleware(config, store, clock=clock) for _ in range(2)]
    async with (
        serve(web.get("/api/x", hello), middlewares=sites[:1]) as first,
        serve(web.get("/api/x", hello), middlewares=sites[1:]) as second,
    ):
        found = await asyncio.gather(*(client.get("/api/x") for client in (first, second) * 4))
    assert sorted(reply.status for reply in found) == [200] * 2 + [429] * 6
