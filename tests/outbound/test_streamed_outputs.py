"""Streamed outputs of strict calls: their bound is what was reserved for them, and they are settled exactly."""

import asyncio
import json

import aiohttp
import httpx
import pytest
import requests

from tests.cases import cases
from tests.outbound.flows import SlowStore, cancel_until_done
from tests.outbound.server import Answer, QuotaServer
from tidegate import Limiter
from tidegate.outbound import Providers
from tidegate.outbound.aiohttp import RateLimitMiddleware
from tidegate.outbound.httpx import AsyncRateLimitTransport, RateLimitTransport
from tidegate.outbound.requests import RateLimitAdapter
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

URL = "https://api.test/v1/messages"
OPENAI_URL = "https://api.test/v1/chat/completions"
BODY = {"model": "m", "max_tokens": 64_000, "stream": True}
URL_OF = {"anthropic": URL, "openai": OPENAI_URL}
KINDS = ["httpx", "httpx-async", "requests", "aiohttp"]


def event(payload):
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def stream(tokens, *, input_tokens=10, reports=True):
    """A stream of Anthropic, one token in an event."""
    yield event({"type": "message_start", "message": {"usage": {"input_tokens": input_tokens, "output_tokens": 1}}})
    for _ in range(tokens):
        yield event({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "abc"}})
    if reports:
        yield event({"type": "message_delta", "usage": {"output_tokens": tokens}})
        yield b"event: message_stop\ndata: {}\n\n"


def openai_stream(tokens):
    """The same answer of OpenAI."""
    for _ in range(tokens):
        yield event({"choices": [{"delta": {"content": "abc"}}]})
    yield event({"usage": {"prompt_tokens": 10, "completion_tokens": tokens, "total_tokens": tokens + 10}})
    yield b"data: [DONE]\n\n"


class Source(httpx.SyncByteStream):
    """The body of a response that tells how much of it was read, and whether it was closed."""

    def __init__(self, pieces):
        self.pieces = pieces
        self.read = 0
        self.closed = False

    def __iter__(self):
        for piece in self.pieces:
            self.read += 1
            yield piece

    def close(self):
        self.closed = True


class AsyncSource(httpx.AsyncByteStream):
    """The body of a response, for tasks."""

    def __init__(self, pieces):
        self.pieces = pieces

    async def __aiter__(self):
        for piece in self.pieces:
            yield piece


def providers(quota=10_000, domain="api.test", profile="anthropic"):
    limits = ["1000/1m", f"{quota}/1m unit=tokens name=tpm"]
    return Providers.of({"domain": domain, "limits": limits, "profile": profile, "strict": True})


def usage(store, known, key="api.test"):
    with Limiter(next(iter(known)).policy, store=store) as limiter:
        return limiter.usage(key)["tpm"].used


@pytest.fixture
def store():
    return MemoryStore(clock=ManualClock(1_728_000_000))


def open_client(store, source, known, tokens=10):
    def reply(request):
        client.sent = json.loads(request.content)
        return httpx.Response(200, stream=source)

    transport = RateLimitTransport(known, store, httpx.MockTransport(reply), timeout=0, tokenizer=lambda _text: tokens)
    client = httpx.Client(transport=transport)
    client.metrics = transport.gate.metrics
    return client


@pytest.mark.parametrize(("profile", "pieces"), [("anthropic", stream), ("openai", openai_stream)])
def test_the_bound_is_reserved_in_full_and_settled_exactly(store, profile, pieces):
    known, source = providers(profile=profile), Source(pieces(300))
    with open_client(store, source, known) as client:
        with client.stream("POST", URL_OF[profile], json={**BODY, "max_tokens": 5000}) as response:
            assert client.sent["max_tokens"] == 5000
            for _ in response.iter_bytes():
                assert usage(store, known) == 5010
        assert usage(store, known) == 310
        assert response.extensions["tidegate"].truncates_at is None
        assert (client.metrics()["overrun"], client.metrics()["truncated"]) == (0, 0)


@pytest.mark.parametrize("profile", ["anthropic", "openai"])
def test_a_bound_above_the_quota_is_lowered_before_the_request_is_sent(store, profile):
    known = providers(profile=profile)
    source = Source(stream(9990) if profile == "anthropic" else openai_stream(9990))
    with open_client(store, source, known) as client:
        response = client.post(URL_OF[profile], json=BODY)
        assert client.sent["max_tokens"] == response.extensions["tidegate"].truncates_at == 9990
        assert usage(store, known) == 10_000
        assert (client.metrics()["overrun"], client.metrics()["truncated"]) == (0, 1)


@pytest.mark.parametrize("profile", ["anthropic", "openai"])
def test_without_room_for_the_bound_what_most_outputs_took_is_its_bound(store, profile):
    known = providers(profile=profile)
    pieces = list(stream(300) if profile == "anthropic" else openai_stream(300))
    with open_client(store, Source(pieces), known) as client:
        for _ in range(20):
            client.post(URL_OF[profile], json={**BODY, "max_tokens": 5000})
            store.clock.advance(61)
        with client.stream("POST", URL_OF[profile], json={**BODY, "max_tokens": 7000}):
            assert client.sent["max_tokens"] == 7000
            response = client.post(URL_OF[profile], json={**BODY, "max_tokens": 7000})
            assert client.sent["max_tokens"] == response.extensions["tidegate"].truncates_at == 300
        assert client.metrics()["truncated"] == 1


def test_what_has_arrived_of_an_output_is_charged_and_the_rest_reserved_again(store):
    """An output that counts when it is produced, and takes longer than half a period."""
    known, source, most = providers(), Source(stream(400)), 0
    with open_client(store, source, known) as client:
        with client.stream("POST", URL, json={**BODY, "max_tokens": 5000}) as response:
            for _ in response.iter_bytes():
                store.clock.advance(0.1)
                most = max(most, usage(store, known))
        assert most <= 10 + 5000 + 1
        assert usage(store, known) == 410


@pytest.mark.parametrize("coding", ["br", "gzip"], ids=["unknown coding", "malformed"])
def test_an_output_that_cannot_be_read_keeps_its_reservation(store, coding):
    known, source = providers(quota=30_000), Source([b"no gzip data", *stream(500)])
    mock = httpx.MockTransport(lambda _: httpx.Response(200, headers={"content-encoding": coding}, stream=source))
    transport = RateLimitTransport(known, store, mock, timeout=0, tokenizer=lambda _text: 10)
    body = {**BODY, "max_tokens": 20_000}
    with httpx.Client(transport=transport) as client, client.stream("POST", URL, json=body) as arriving:
        assert sum(map(len, arriving.iter_raw())) == sum(map(len, source.pieces))
    assert usage(store, known) == 20_010


def test_a_stream_that_its_reader_abandons_keeps_its_reservation(store):
    known, source = providers(), Source(stream(5000))
    with open_client(store, source, known) as client:
        with client.stream("POST", URL, json=BODY) as response:
            next(response.iter_bytes())
        assert usage(store, known) == 10_000


@pytest.mark.parametrize(
    ("profile", "pieces", "end"),
    [("anthropic", stream, b"message_stop"), ("openai", openai_stream, b"[DONE]")],
    ids=["anthropic", "openai"],
)
async def test_all_reservations_of_an_output_are_settled_if_its_task_is_cancelled_repeatedly(profile, pieces, end):
    store = SlowStore(clock=ManualClock(1_728_000_000))
    known, source = providers(profile=profile), AsyncSource(pieces(400))
    mock = httpx.MockTransport(lambda _request: httpx.Response(200, stream=source))
    transport = AsyncRateLimitTransport(known, store, mock, timeout=0, tokenizer=lambda _text: 10)
    async with httpx.AsyncClient(transport=transport) as client:
        request = client.build_request("POST", URL_OF[profile], json=BODY)
        response = await client.send(request, stream=True)
        arriving = response.aiter_raw()
        while end not in await anext(arriving):
            store.clock.advance(0.1)
        await cancel_until_done(response.aclose())
        assert usage(store, known) == 410


@cases("kind", KINDS)
def test_all_clients(kind):
    pieces = list(stream(3000))
    with QuotaServer(respond=lambda _request: Answer(pieces=(b"".join(pieces[:50]), *pieces[50:]))) as server:
        known = providers(quota=6000, domain="127.0.0.1")
        store = MemoryStore()
        if kind == "httpx":
            read_httpx(known, store, server.url)
        elif kind == "requests":
            read_requests(known, store, server.url)
        else:
            asyncio.run(read_async(kind, known, store, server.url))
        assert usage(store, known, "127.0.0.1") == 3010
        assert json.loads(server.requests[0].body)["max_tokens"] == 5990


def read_httpx(known, store, url):
    transport = RateLimitTransport(known, store, tokenizer=lambda _text: 10)
    with httpx.Client(transport=transport) as client:
        client.post(url, json=BODY)


def read_requests(known, store, url):
    with requests.Session() as session:
        session.mount("http://", RateLimitAdapter(known, store, tokenizer=lambda _text: 10))
        session.post(url, json=BODY)


async def read_async(kind, known, store, url):
    if kind == "httpx-async":
        transport = AsyncRateLimitTransport(known, store, tokenizer=lambda _text: 10)
        async with httpx.AsyncClient(transport=transport) as client:
            await client.post(url, json=BODY)
        return
    async with (
        RateLimitMiddleware(known, store, tokenizer=lambda _text: 10) as middleware,
        aiohttp.ClientSession(middlewares=[middleware]) as session,
        session.post(url, json=BODY) as response,
    ):
        async for _ in response.content.iter_any():
            pass


# ---- Gemini ----------------------------------------------------------------------------------------------------------

GEMINI = "https://generativelanguage.googleapis.com/v1beta/models/gemini-2.5-flash:streamGenerateContent"
GEMINI_BODY = {"contents": [], "generationConfig": {"maxOutputTokens": 60_000}}


def gemini(tokens, step=100):
    """A stream of Gemini: each event says how much the answer has taken so far."""
    for produced in range(step, tokens + 1, step):
        used = {"promptTokenCount": 10, "candidatesTokenCount": produced}
        part = {"candidates": [{"content": {"parts": [{"text": "abc" * step}]}}], "usageMetadata": used}
        yield b"data: %s\r\n\r\n" % json.dumps(part).encode()


def gemini_provider():
    limits = ["1000/1m", "20_000/1m unit=output-tokens name=tpm"]
    domain = "generativelanguage.googleapis.com"
    return Providers.of({"domain": domain, "limits": limits, "profile": "google", "strict": True})


def test_a_stream_of_gemini_is_clamped_to_the_quota(store):
    known = gemini_provider()
    with open_client(store, Source(list(gemini(15_000))), known) as client:
        client.post(GEMINI + "?alt=sse", json=GEMINI_BODY)
        assert client.sent["generationConfig"]["maxOutputTokens"] == 20_000
        assert client.metrics()["overrun"] == 0
        assert usage(store, known, "generativelanguage.googleapis.com") == 15_000


def test_an_answer_of_gemini_that_does_not_come_as_events_is_clamped(store):
    sent = []

    def reply(request):
        sent.append(json.loads(request.content))
        return httpx.Response(200, json=[{"usageMetadata": {"promptTokenCount": 10, "candidatesTokenCount": 7}}])

    transport = RateLimitTransport(gemini_provider(), store, httpx.MockTransport(reply), timeout=0)
    with httpx.Client(transport=transport) as client:
        client.post(GEMINI, json=GEMINI_BODY)
    assert sent[0]["generationConfig"]["maxOutputTokens"] == 20_000
