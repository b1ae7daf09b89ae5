"""A request that is written long after its permit was taken: its tokens count from then on."""

import aiohttp
import httpx
import httpx2
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tidegate import Denied
from tidegate.outbound import Providers
from tidegate.outbound.aiohttp import RateLimitMiddleware
from tidegate.outbound.httpx import AsyncRateLimitTransport, RateLimitTransport
from tidegate.outbound.httpx2 import RateLimitTransport as RateLimitTransport2
from tidegate.testing import ManualClock

START = 1_728_000_000
URL = "https://llm.test/v1/chat/completions"
BODY = {"model": "m", "max_tokens": 1, "messages": []}


class Provider:
    """Counts a request when it has read its body, `delay` seconds after it was sent; its response takes 20 s."""

    def __init__(self, clock, library):
        self.clock, self.library, self.delay = clock, library, 0.0
        self.arrived = []

    def respond(self):
        self.arrived.append(self.clock.now() - START)
        self.clock.advance(20)
        usage = {"prompt_tokens": 4000, "completion_tokens": 2000}
        return self.library.Response(200, json={"usage": usage})

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


def providers():
    return Providers.of({"domain": "llm.test", "limits": ["10000/1m unit=tokens name=tpm"], "profile": "openai"})


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
        return web.json_response({"usage": {"prompt_tokens": 4000, "completion_tokens": 2000}})

    async def wait_for_connection(request, handler):
        clock.advance(next(delays))
        return await handler(request)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    known = Providers.of({"domain": "127.0.0.1", "limits": ["10000/1m unit=tokens name=tpm"], "profile": "openai"})
    limit = RateLimitMiddleware(known, clock=clock, timeout=0, tokenizer=lambda _text: 6000)
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
