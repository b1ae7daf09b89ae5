"""A request that is written long after its permit was taken: its tokens count from then on."""

import aiohttp
import httpx
import httpx2
import pytest
import requests
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.outbound.server import QuotaServer, as_json
from tidegate import Denied
from tidegate.outbound import AsyncGate, Providers
from tidegate.outbound.aiohttp import RateLimitMiddleware
from tidegate.outbound.httpx import AsyncRateLimitTransport, RateLimitTransport
from tidegate.outbound.httpx2 import RateLimitTransport as RateLimitTransport2
from tidegate.outbound.requests import RateLimitAdapter
from tidegate.stores import MemoryStore, Store
from tidegate.testing import ManualClock

START = 1_728_000_000
URL = "https://llm.test/v1/chat/completions"
BODY = {"model": "m", "max_tokens": 1, "messages": []}
LIMITS = ["10000/1m unit=tokens name=tpm"]
USAGE = {"usage": {"prompt_tokens": 4000, "completion_tokens": 2000}}


class Provider:
    """Counts a request when it has read its body, `delay` seconds after it was sent; its response takes 20 s."""

    def __init__(self, clock, library):
        self.clock, self.library, self.delay = clock, library, 0.0
        self.arrived = []

    def respond(self):
        self.arrived.append(self.clock.now() - START)
        self.clock.advance(20)
        return self.library.Response(200, json=USAGE)

    def handle_request(self, request):
        self.clock.advance(self.delay)  # waits for a connection
        assert b"".join(request.stream)
        return self.respond()

    async def handle_async_request(self, request):
        self.clock.advance(self.delay)
        assert b"".join([piece async for piece in request.stream])
        return self.respond()

    def close(self):
        pass

    async def aclose(self):
        pass


class LateStore(MemoryStore):
    """Decides at once; the response to the next charge takes `delay` seconds."""

    instant = False
    delay = 0.0
    fast_path, fast_peek, apply_one = Store.fast_path, Store.fast_peek, Store.apply_one

    def apply(self, verb, asks, *rest):
        decisions = super().apply(verb, asks, *rest)
        if verb in ("acquire", "hold") and self.delay:
            self.clock.advance(self.delay)
            self.delay = 0.0
        return decisions


def providers(domain="llm.test", *, pool=False):
    limits = {"pool": {"members": [{"name": "a", "limits": LIMITS}]}} if pool else {"limits": LIMITS}
    return Providers.of({"domain": domain, "profile": "openai", **limits})


@pytest.mark.parametrize(("library", "transport"), [(httpx, RateLimitTransport), (httpx2, RateLimitTransport2)])
@pytest.mark.parametrize(("delay", "free"), [(0.0, 60.31), (0.09, 60.31), (5.0, 65.31)])
def test_tokens_count_from_when_the_request_was_written(library, transport, delay, free):
    clock = ManualClock(START)
    provider = Provider(clock, library)
    sending = transport(providers(), transport=provider, clock=clock, timeout=0, tokenizer=lambda _text: 6000)
    with library.Client(transport=sending) as client:
        provider.delay = delay
        request = client.build_request("POST", URL, json=BODY)
        own = request.stream
        client.send(request)
        assert request.stream is own
        provider.delay = 0
        clock.advance(free - 0.02 - (clock.now() - START))
        with pytest.raises(Denied):
            client.post(URL, json=BODY)
        clock.advance(0.02)
        client.post(URL, json=BODY)
    assert provider.arrived == pytest.approx([delay, free])


async def test_the_same_with_tasks():
    clock = ManualClock(START)
    provider = Provider(clock, httpx)
    sending = AsyncRateLimitTransport(
        providers(), transport=provider, clock=clock, timeout=0, tokenizer=lambda _text: 6000
    )
    async with httpx.AsyncClient(transport=sending) as client:
        provider.delay = 5.0
        await client.post(URL, json=BODY)
        clock.advance(65.29 - 25)
        with pytest.raises(Denied):
            await client.post(URL, json=BODY)
        clock.advance(0.02)
        await client.post(URL, json=BODY)


async def test_the_same_with_aiohttp():
    """The request waits for the connection of another session: here, for the next middleware."""
    clock = ManualClock(START)
    delays = iter([5.0, 0.0])

    async def complete(request):
        assert await request.json() == BODY
        return web.json_response(USAGE)

    async def wait_for_connection(request, handler):
        clock.advance(next(delays))
        return await handler(request)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    limit = RateLimitMiddleware(providers("127.0.0.1"), clock=clock, timeout=0, tokenizer=lambda _text: 6000)
    session = aiohttp.ClientSession(middlewares=[limit, wait_for_connection])
    async with TestServer(app) as server, limit, session:

        async def post():
            async with session.post(server.make_url("/v1/chat/completions"), json=BODY) as response:
                assert response.request_info.headers["Content-Type"] == "application/json"
                await response.json()

        await post()
        clock.advance(65.29 - 5)
        with pytest.raises(Denied):
            await post()
        clock.advance(0.02)
        await post()


def test_the_same_with_requests():
    """The request waits for a connection."""
    clock = ManualClock(START)
    delays = iter([5.0, 0.0])

    class WaitingAdapter(RateLimitAdapter):
        def get_connection_with_tls_context(self, *args, **options):
            clock.advance(next(delays))
            return super().get_connection_with_tls_context(*args, **options)

    adapter = WaitingAdapter(providers("127.0.0.1"), clock=clock, timeout=0, tokenizer=lambda _text: 6000)
    with QuotaServer(respond=lambda _request: as_json(USAGE)) as server, requests.Session() as session:
        session.mount("http://", adapter)
        response = session.post(f"{server.url}/v1/chat/completions", json=BODY)
        assert response.request.body == server.requests[0].body
        assert "transfer-encoding" not in server.requests[0].headers
        clock.advance(65.29 - 5)
        with pytest.raises(Denied):
            session.post(f"{server.url}/v1/chat/completions", json=BODY)
        clock.advance(0.02)
        session.post(f"{server.url}/v1/chat/completions", json=BODY)


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize(("delay", "free"), [(0.0, 60.31), (0.09, 60.31), (5.0, 65.31)])
async def test_tokens_count_from_when_a_slow_store_has_responded(pool, delay, free):
    """The permit was charged long before the process learned of it; then the request is sent at once."""
    clock = ManualClock(START)
    store, provider = LateStore(clock=clock), Provider(clock, httpx)
    sending = AsyncRateLimitTransport(providers(pool=pool), store, provider, timeout=0, tokenizer=lambda _text: 6000)
    async with httpx.AsyncClient(transport=sending) as client:
        store.delay = delay
        await client.post(URL, json=BODY)
        clock.advance(free - 0.02 - (clock.now() - START))
        with pytest.raises(Denied):
            await client.post(URL, json=BODY)
        clock.advance(0.02)
        await client.post(URL, json=BODY)
    assert provider.arrived == pytest.approx([delay, free])


async def test_the_same_if_the_program_sends_the_request_itself():
    clock = ManualClock(START)
    store = LateStore(clock=clock)
    gate = AsyncGate(providers(), store)
    store.delay = 5.0
    charge = await gate.acquire(URL, {"tokens": 6000})
    await charge.commit()
    clock.advance(65.29 - 5)
    assert not (await gate.try_acquire(URL, {"tokens": 6000})).allowed
    clock.advance(0.02)
    assert (await gate.try_acquire(URL, {"tokens": 6000})).allowed
    await gate.close()
