"""Streamed outputs of strict calls: reservations grow and shrink while they arrive, and end what may exceed them."""

import asyncio
import json

import aiohttp
import httpx
import pytest
import requests

from tests.cases import cases
from tests.outbound.flows import SlowStore, cancel_until_done
from tests.outbound.server import Answer, QuotaServer
from tidegate import Denied, Limiter
from tidegate.outbound import Providers
from tidegate.outbound._quota.settlement import MIN_HEADROOM
from tidegate.outbound.aiohttp import RateLimitMiddleware
from tidegate.outbound.httpx import AsyncRateLimitTransport, RateLimitTransport
from tidegate.outbound.requests import RateLimitAdapter
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

URL = "https://api.test/v1/messages"
OPENAI_URL = "https://api.test/v1/chat/completions"
BODY = {"model": "m", "max_tokens": 64_000, "stream": True}
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
    mock = httpx.MockTransport(lambda _request: httpx.Response(200, stream=source))
    transport = RateLimitTransport(known, store, mock, timeout=0, tokenizer=lambda _text: tokens)
    client = httpx.Client(transport=transport)
    client.metrics = transport.gate.metrics
    return client


def test_a_reservation_grows_while_the_output_arrives_and_is_settled_exactly(store):
    known, source = providers(), Source(stream(9000))
    with open_client(store, source, known) as client:
        most = 0
        with client.stream("POST", URL, json=BODY) as response:
            for number, _ in enumerate(response.iter_bytes()):
                now = usage(store, known)
                most = max(most, now)
                if number % 500 == 0:
                    assert now >= number
        assert most <= 10_000
        assert usage(store, known) == 9010
        metrics = client.metrics()
        assert metrics["topped_up"] >= 1
        assert (metrics["overrun"], metrics["cut_off"]) == (0, 0)


def test_the_reservation_shrinks_when_the_input_is_known(store):
    known, source = providers(), Source(stream(5))
    with open_client(store, source, known, tokens=3000) as client, client.stream("POST", URL, json=BODY) as response:
        pieces = response.iter_bytes()
        assert usage(store, known) == 3000 + 4096
        next(pieces)
        assert usage(store, known) == 10 + 4096


def test_a_reservation_that_is_made_again_replaces_the_one_before(store):
    """An output that takes longer than half a period is reserved again, before the first reservation expires."""
    known, source, most = providers(), Source(stream(400)), 0
    with open_client(store, source, known) as client:
        with client.stream("POST", URL, json=BODY) as response:
            for _ in response.iter_bytes():
                store.clock.advance(0.1)
                most = max(most, usage(store, known))
        assert most <= 10 + 4096 + 1
        assert usage(store, known) == 410


def test_a_refused_top_up_ends_the_output_and_settles_what_arrived(store):
    known, source = providers(quota=5000), Source(stream(64_000))
    with open_client(store, source, known) as client:
        with client.stream("POST", URL, json=BODY) as response:
            came = []
            with pytest.raises(Denied) as denied:
                came += response.iter_lines()
            assert source.closed
        assert source.read <= 5000
        assert str(denied.value).startswith("provider api.test: the output was cut off after ")
        assert source.read >= 5000 - 10 - MIN_HEADROOM - 20
        assert source.read <= usage(store, known) <= 5000
        metrics = client.metrics()
        assert (metrics["cut_off"], metrics["overrun"]) == (1, 0)


def test_the_bound_of_the_request_needs_no_more_than_itself(store):
    known, source = providers(), Source(stream(100))
    with open_client(store, source, known) as client:
        with client.stream("POST", URL, json={**BODY, "max_tokens": 100}) as response:
            response.read()
        assert usage(store, known) == 110
        assert client.metrics()["topped_up"] == 0


def test_text_that_the_provider_sends_in_large_pieces_is_counted_by_its_length(store):
    pieces = [event({"delta": {"text": "é" * 3000}}) for _ in range(3)]
    known = providers(quota=5000)
    with open_client(store, Source(pieces), known) as client, pytest.raises(Denied):
        client.post(URL, json=BODY)


@pytest.mark.parametrize(
    ("coding", "first"), [("br", b""), ("gzip", b"no gzip data")], ids=["unknown coding", "malformed"]
)
@pytest.mark.parametrize(("bound", "allowed"), [(20_000, True), (64_000, False)])
def test_an_output_that_cannot_be_read_is_reserved_with_its_bound(store, coding, first, bound, allowed):
    known, source = providers(quota=30_000), Source([first, *stream(500)])
    mock = httpx.MockTransport(lambda _: httpx.Response(200, headers={"content-encoding": coding}, stream=source))
    transport = RateLimitTransport(known, store, mock, timeout=0, tokenizer=lambda _text: 10)
    body = {**BODY, "max_tokens": bound}
    with httpx.Client(transport=transport) as client, client.stream("POST", URL, json=body) as arriving:
        if allowed:
            assert sum(map(len, arriving.iter_raw())) == sum(map(len, source.pieces))
            assert usage(store, known) == bound + 10
        else:
            with pytest.raises(Denied):
                list(arriving.iter_raw())
            assert source.read <= 2
            assert usage(store, known) == 10 + 4096


def test_a_stream_that_its_reader_abandons_keeps_its_reservation(store):
    known, source = providers(), Source(stream(5000))
    with open_client(store, source, known) as client:
        with client.stream("POST", URL, json=BODY) as response:
            next(response.iter_bytes())
        assert usage(store, known) == 10 + 4096


@pytest.mark.parametrize(
    ("profile", "pieces", "end"),
    [("anthropic", stream, b"message_stop"), ("openai", openai_stream, b"[DONE]")],
    ids=["anthropic", "openai"],
)
async def test_all_reservations_of_an_output_are_settled_if_its_task_is_cancelled_repeatedly(profile, pieces, end):
    store = SlowStore(clock=ManualClock(1_728_000_000))
    known, source = providers(profile=profile), AsyncSource(pieces(9000))
    mock = httpx.MockTransport(lambda _request: httpx.Response(200, stream=source))
    transport = AsyncRateLimitTransport(known, store, mock, timeout=0, tokenizer=lambda _text: 10)
    async with httpx.AsyncClient(transport=transport) as client:
        request = client.build_request("POST", URL if profile == "anthropic" else OPENAI_URL, json=BODY)
        response = await client.send(request, stream=True)
        arriving = response.aiter_raw()
        while end not in await anext(arriving):
            pass
        await cancel_until_done(response.aclose())
        assert transport.gate.metrics()["topped_up"] >= 1
        assert usage(store, known) == 9010


@cases("kind", KINDS)
@cases("tokens", [3000, 60_000])
def test_all_clients(kind, tokens):
    pieces = list(stream(tokens))
    with QuotaServer(respond=lambda _request: Answer(pieces=(b"".join(pieces[:50]), *pieces[50:]))) as server:
        known = providers(quota=6000, domain="127.0.0.1")
        store = MemoryStore()
        if kind == "httpx":
            found = read_httpx(known, store, server.url)
        elif kind == "requests":
            found = read_requests(known, store, server.url)
        else:
            found = asyncio.run(read_async(kind, known, store, server.url))
        used = usage(store, known, "127.0.0.1")
        if tokens == 3000:
            assert (found, used) == (None, 3010)
        else:
            assert isinstance(found, Denied)
            assert 1000 < used < 12_000  # this server does not pace its tokens: one read may bring thousands


def read_httpx(known, store, url):
    transport = RateLimitTransport(known, store, tokenizer=lambda _text: 10)
    with httpx.Client(transport=transport) as client:
        try:
            client.post(url, json=BODY)
        except Denied as denied:
            return denied


def read_requests(known, store, url):
    with requests.Session() as session:
        session.mount("http://", RateLimitAdapter(known, store, tokenizer=lambda _text: 10))
        try:
            session.post(url, json=BODY)
        except Denied as denied:
            return denied


async def read_async(kind, known, store, url):
    if kind == "httpx-async":
        transport = AsyncRateLimitTransport(known, store, tokenizer=lambda _text: 10)
        async with httpx.AsyncClient(transport=transport) as client:
            try:
                await client.post(url, json=BODY)
            except Denied as denied:
                return denied
            return None
    async with (
        RateLimitMiddleware(known, store, tokenizer=lambda _text: 10) as middleware,
        aiohttp.ClientSession(middlewares=[middleware]) as session,
    ):
        try:
            async with session.post(url, json=BODY) as response:
                async for _ in response.content.iter_any():
                    pass
        except Denied as denied:
            return denied


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


@pytest.mark.parametrize(("tokens", "ended"), [(15_000, False), (40_000, True)])
def test_a_stream_of_gemini_is_topped_up_and_ended(store, tokens, ended):
    known = gemini_provider()
    with open_client(store, Source(list(gemini(tokens))), known) as client:
        found = None
        try:
            client.post(GEMINI + "?alt=sse", json=GEMINI_BODY)
        except Denied as denied:
            found = denied
        assert (found is not None) is ended
        assert client.metrics()["topped_up"] >= 1
        assert client.metrics()["overrun"] == 0
        used = usage(store, known, "generativelanguage.googleapis.com")
        assert 19_000 < used <= 20_000 if ended else used == 15_000


def test_an_answer_of_gemini_that_does_not_come_as_events_is_clamped(store):
    sent = []

    def reply(request):
        sent.append(json.loads(request.content))
        return httpx.Response(200, json=[{"usageMetadata": {"promptTokenCount": 10, "candidatesTokenCount": 7}}])

    transport = RateLimitTransport(gemini_provider(), store, httpx.MockTransport(reply), timeout=0)
    with httpx.Client(transport=transport) as client:
        client.post(GEMINI, json=GEMINI_BODY)
    assert sent[0]["generationConfig"]["maxOutputTokens"] == 20_000
