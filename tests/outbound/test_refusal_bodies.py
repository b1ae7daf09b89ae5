"""The body of a refusal is read within bounds, and the client still gets all of it."""

import asyncio
import gzip
import itertools

import aiohttp
import httpx
import pytest

from tests.cases import cases
from tests.outbound.clients import KINDS, fetch
from tests.outbound.server import Answer, QuotaServer
from tidegate.outbound import Providers
from tidegate.outbound._quota.refusal_body import MAX_BODY_BYTES, MAX_READ_TIME
from tidegate.outbound.aiohttp import RateLimitMiddleware
from tidegate.outbound.httpx import AsyncRateLimitTransport, RateLimitTransport
from tidegate.testing import ManualClock

URL = "https://api.test/v1/chat/completions"
LIMITS = ["1000/1m", "10_000/1m unit=tokens"]
PIECE = 1000
WORDS = "word " * (PIECE // 5)


def providers(domain="api.test"):
    return Providers.of({"domain": domain, "limits": LIMITS, "profile": "openai", "retries": 0})


class EndlessBody(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body without an end; counts the pieces that were read."""

    def __init__(self, clock, piece, seconds=0.0):
        self.clock, self.piece, self.seconds = clock, piece, seconds
        self.read = 0
        self.closed = False

    def __iter__(self):
        for self.read in itertools.count(1):
            self.clock.advance(self.seconds)
            yield self.piece

    async def __aiter__(self):
        for piece in self:
            yield piece

    def close(self):
        self.closed = True

    async def aclose(self):
        self.close()


BODIES = [
    pytest.param({}, b"x" * PIECE, 0.0, MAX_BODY_BYTES // PIECE + 1, id="large"),
    pytest.param({}, b"x", 1.0, MAX_READ_TIME // 10**6 + 1, id="slow"),
    pytest.param({"content-encoding": "gzip"}, gzip.compress(bytes(10**7)), 0.0, 1, id="bomb"),
    pytest.param({"content-encoding": "gzip"}, gzip.compress(b""), 0.0, MAX_BODY_BYTES // 20 + 1, id="empty members"),
    pytest.param({"content-encoding": "br"}, b"x" * PIECE, 0.0, 1, id="unknown coding"),
]


@pytest.mark.parametrize(("headers", "piece", "seconds", "most"), BODIES)
def test_an_endless_body_holds_no_response_up(headers, piece, seconds, most):
    clock = ManualClock(1_728_000_000)
    body = EndlessBody(clock, piece, seconds)
    mock = httpx.MockTransport(lambda _request: httpx.Response(429, headers=headers, stream=body))
    transport = RateLimitTransport(providers(), transport=mock, clock=clock)
    with httpx.Client(transport=transport) as client, client.stream("POST", URL, json={}) as response:
        assert response.status_code == 429
        assert body.read <= most
        read = body.read
        pieces = response.iter_raw()
        assert [next(pieces) for _ in range(read + 2)] == [piece] * (read + 2)
        assert body.read == read + 2
    assert body.closed


@pytest.mark.parametrize(("headers", "piece", "seconds", "most"), BODIES)
async def test_an_endless_body_holds_no_response_up_in_a_task(headers, piece, seconds, most):
    clock = ManualClock(1_728_000_000)
    body = EndlessBody(clock, piece, seconds)
    mock = httpx.MockTransport(lambda _request: httpx.Response(429, headers=headers, stream=body))
    transport = AsyncRateLimitTransport(providers(), transport=mock, clock=clock)
    async with httpx.AsyncClient(transport=transport) as client, client.stream("POST", URL, json={}) as response:
        assert response.status_code == 429
        assert body.read <= most
        read = body.read
        pieces = response.aiter_raw()
        assert [await anext(pieces) for _ in range(read + 2)] == [piece] * (read + 2)
    assert body.closed


@cases("kind", KINDS)
@cases("pieces", [2, 300])
def test_the_client_gets_the_whole_body(kind, pieces):
    with QuotaServer(respond=lambda _request: Answer(429, pieces=(WORDS.encode(),) * pieces)) as server:
        known = providers("127.0.0.1")
        (answer,) = fetch(
            kind, known, [f"http://127.0.0.1:{server.port}/v1/chat/completions"], method="POST", body=b"{}"
        )
        assert (answer.status, answer.text) == (429, WORDS * pieces)
        assert answer.metrics["refused"] == 1


def test_a_large_body_can_be_streamed_with_aiohttp():
    async def ask(port):
        middleware = RateLimitMiddleware(providers("127.0.0.1"))
        async with (
            middleware,
            aiohttp.ClientSession(middlewares=[middleware]) as session,
            session.post(f"http://127.0.0.1:{port}/v1/chat/completions", data=b"{}") as response,
        ):
            assert response.status == 429
            return await response.content.readexactly(10 * MAX_BODY_BYTES)

    pieces = (WORDS.encode(),) * (11 * MAX_BODY_BYTES // PIECE)
    with QuotaServer(respond=lambda _request: Answer(429, pieces=pieces)) as server:
        assert asyncio.run(ask(server.port)) == b"".join(pieces)[: 10 * MAX_BODY_BYTES]
