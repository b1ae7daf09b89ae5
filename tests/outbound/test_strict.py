"""Learned estimates and strict calls: what is reserved, what is sent, and when an output is ended."""

import asyncio
import json

import aiohttp
import httpx
import pytest
import requests

from tests.outbound.server import Answer, QuotaServer
from tidegate import Limiter
from tidegate.outbound import Providers, request_options
from tidegate.outbound._quota.learned_sizes import MIN_SAMPLES, QUANTILE_SAMPLES, LearnedSizes, RecentSizes
from tidegate.outbound.aiohttp import RateLimitMiddleware
from tidegate.outbound.httpx import AsyncRateLimitTransport, RateLimitTransport
from tidegate.outbound.requests import RateLimitAdapter
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

URL = "https://api.test/v1/chat/completions"
LIMITS = ["1000/1m", "10_000/1m unit=tokens name=tpm"]


class Model:
    """A provider whose outputs have `length` tokens, at most what the request allows."""

    def __init__(self, length=100):
        self.length = length
        self.bodies = []

    def __call__(self, request):
        body = json.loads(request.content)
        self.bodies.append(body)
        answer = min(self.length, body.get("max_tokens", 10**6), body.get("max_completion_tokens", 10**6))
        return httpx.Response(200, json={"usage": {"prompt_tokens": 10, "completion_tokens": answer}})


class Client(httpx.Client):
    """A client whose provider notes what is reserved while a request is in flight."""

    def __init__(self, reply, store, tokenizer=lambda _text: 10, **fields):
        self.store, self.in_flight = store, []
        known = Providers.of({"domain": "api.test", "limits": LIMITS, "profile": "openai", **fields})
        self.provider = next(iter(known))

        def handle(request):
            self.in_flight.append(self.used())
            return reply(request)

        self.limited = RateLimitTransport(known, store, httpx.MockTransport(handle), timeout=0, tokenizer=tokenizer)
        self.metrics = self.limited.gate.metrics
        super().__init__(transport=self.limited)

    def used(self):
        with Limiter(self.provider.policy, store=self.store) as limiter:
            return limiter.usage("api.test")["tpm"].used


def reserved(client, **body):
    """What is reserved for a request while it is in flight, and what it has cost in the end."""
    client.post(URL, json={"model": "m", **body})
    return client.in_flight[-1], client.used()


def teach(client, **body):
    for _ in range(QUANTILE_SAMPLES):
        client.post(URL, json={"model": "m", "max_tokens": 300, **body})
        client.store.clock.advance(61)


@pytest.fixture
def store():
    return MemoryStore(clock=ManualClock(1_728_000_000))


# ---- learned estimates -----------------------------------------------------------------------------------------------


def test_the_maximum_is_reserved_until_outputs_are_known_then_what_most_took(store):
    with Client(Model(100), store) as client:
        assert reserved(client, max_tokens=5000) == (5010, 110)
        store.clock.advance(61)
        teach(client)
        assert reserved(client, max_tokens=5000) == (110, 110)


@pytest.mark.parametrize(
    ("fields", "expected"), [({"output_reserve": "maximum"}, 5010), ({"output_reserve": "p50"}, 110)]
)
def test_how_much_is_reserved_can_be_chosen(store, fields, expected):
    with Client(Model(100), store, **fields) as client:
        teach(client)
        assert reserved(client, max_tokens=5000)[0] == expected


def test_outputs_are_learned_per_model_and_tag(store):
    with Client(Model(100), store) as client:
        teach(client)
        with request_options(tag="summaries"):
            assert reserved(client, max_tokens=5000)[0] == 5010
        store.clock.advance(61)
        assert reserved(client, max_tokens=5000, model="other")[0] == 5010


@pytest.mark.parametrize("profile", ["bedrock", "azure"])
def test_where_the_provider_charges_the_bound_the_bound_is_reserved(store, profile):
    sizes = {"bedrock": "inferenceConfig", "azure": None}[profile]
    body = {"inferenceConfig": {"maxTokens": 5000}} if sizes else {"max_tokens": 5000}
    reply = {"usage": {"inputTokens": 10, "outputTokens": 100, "prompt_tokens": 10, "completion_tokens": 100}}
    with Client(lambda _request: httpx.Response(200, json=reply), store, profile=profile) as client:
        for _ in range(QUANTILE_SAMPLES):
            client.post(URL, json={"model": "m"})
            store.clock.advance(61)
        assert reserved(client, **body) == (5010, 110 if profile == "bedrock" else 5010)


@pytest.mark.parametrize(("profile", "cost"), [("openai", 0), ("azure", 110)])
def test_a_failed_call_costs_what_the_provider_charges(store, profile, cost):
    with Client(lambda _request: httpx.Response(500), store, profile=profile) as client:
        assert reserved(client, max_tokens=100) == (110, cost)


def test_an_overrun_is_charged_and_counted(store):
    model = Model(100)
    with Client(model, store) as client:
        teach(client)
        model.length = 1000
        assert reserved(client, max_tokens=5000) == (110, 1010)
        metrics = client.metrics()
        assert (metrics["overrun"], metrics["overrun_tokens"]) == (1, 900)


def test_the_input_is_learned_per_model_without_a_tokenizer(store):
    def reply(request):
        return httpx.Response(200, json={"usage": {"prompt_tokens": len(request.content) // 2, "completion_tokens": 5}})

    with Client(reply, store, None) as client:
        body = {"model": "m", "max_tokens": 1, "messages": ["x" * 1960]}
        length = len(json.dumps({"max_tokens": 1, **body}, separators=(",", ":")))
        first = reserved(client, **body)[0]
        assert first == -(-length // 4) + 1  # four bytes per token are assumed
        for _ in range(QUANTILE_SAMPLES):
            store.clock.advance(61)
            client.post(URL, json=body)
        store.clock.advance(61)
        assert abs(reserved(client, **body)[0] - length // 2) <= 6


@pytest.mark.parametrize("strict", [False, True])
def test_absurd_reports_about_the_input_lock_no_later_call_out(store, strict):
    """A short request may refer to a long file: its tokens say nothing about those of a long text."""

    def reply(request):
        tokens = 10**6 if len(request.content) < 200 else len(request.content) // 4
        return httpx.Response(200, json={"usage": {"prompt_tokens": tokens, "completion_tokens": 5}})

    with Client(reply, store, None, strict=strict) as client:
        for _ in range(QUANTILE_SAMPLES + 1):
            client.post(URL, json={"model": "m", "max_tokens": 1})
            store.clock.advance(10**9)
        for _ in range(3):
            assert client.post(URL, json={"model": "m", "max_tokens": 1, "messages": ["x" * 20_000]}).status_code == 200
            store.clock.advance(10**9)


def test_recent_sizes_forget_old_ones():
    sizes = RecentSizes()
    for size in [*[1000] * 50, *[5] * 200]:
        sizes.add(size)
    assert sizes.quantile(99) == 5
    sizes = RecentSizes()
    for size in range(1, 101):
        sizes.add(size)
    assert (sizes.quantile(95), sizes.quantile(1), sizes.quantile(50)) == (95, 1, 50)


def test_twice_the_largest_of_a_few_sizes_is_assumed():
    sizes = RecentSizes()
    for _ in range(MIN_SAMPLES - 1):
        sizes.add(7)
    assert sizes.quantile(95) is None
    sizes.add(3)
    assert sizes.quantile(95) == 14


def test_the_number_of_learned_models_is_bounded():
    learned = LearnedSizes()
    for number in range(3000):
        learned.record(("a.test", str(number), ""), 5)
    assert learned.expect(("a.test", "0", ""), 95, 0, None) == (None, None)
    assert len(learned) <= 1024


# ---- strict calls ----------------------------------------------------------------------------------------------------


def test_a_strict_call_sends_what_is_reserved_as_its_maximum(store):
    model = Model(100)
    with Client(model, store, strict=True) as client:
        teach(client)
        model.length = 1000
        assert reserved(client, max_tokens=20_000, max_completion_tokens=70) == (110, 80)
        assert model.bodies[-1]["max_tokens"] == 100
        assert model.bodies[-1]["max_completion_tokens"] == 70
        store.clock.advance(61)
        assert reserved(client) == (110, 110)
        assert model.bodies[-1]["max_completion_tokens"] == 100  # the request had set none


def test_what_strict_calls_reserve_grows_when_outputs_are_cut_off(store):
    model = Model(100)
    with Client(model, store, strict=True) as client:
        teach(client)
        model.length = 1000
        for _ in range(100):
            client.post(URL, json={"model": "m", "max_tokens": 20_000})
            store.clock.advance(61)
        assert model.bodies[-1]["max_tokens"] >= 1000
        assert client.metrics()["overrun"] == 0
        assert 0 < client.metrics()["truncated"] < 100


def test_a_call_says_where_its_output_is_truncated(store):
    model = Model(100)
    with Client(model, store, strict=True) as client:
        teach(client)
        assert client.metrics()["truncated"] == 0
        for body, expected in (({"max_tokens": 20_000}, 100), ({"max_tokens": 50}, None), ({}, 100)):
            response = client.post(URL, json={"model": "m", **body})
            assert response.extensions["tidegate"].truncates_at == expected
            store.clock.advance(61)


def test_an_output_that_exceeds_the_quota_is_clamped_to_it(store):
    model = Model(10**6)
    with Client(model, store, strict=True) as client:
        assert reserved(client, max_tokens=64_000) == (10_000, 10_000)
        assert model.bodies[-1]["max_tokens"] == 9990


def test_the_outputs_of_a_request_share_what_is_reserved(store):
    model = Model(100)
    with Client(model, store, strict=True) as client:
        teach(client)
        assert reserved(client, max_tokens=20_000, n=4)[0] == 410
        assert model.bodies[-1]["max_tokens"] == 100


@pytest.mark.parametrize("kind", ["requests", "httpx-async", "aiohttp"])
def test_other_clients_send_what_is_reserved(kind):
    with QuotaServer(respond=lambda _request: Answer(pieces=(b'{"usage": {"total_tokens": 5}}',))) as server:
        known = Providers.of({"domain": "127.0.0.1", "limits": LIMITS, "profile": "openai", "strict": True})
        body = {"model": "m", "max_tokens": 64_000, "messages": "é"}
        if kind == "requests":
            with requests.Session() as session:
                session.mount("http://", RateLimitAdapter(known))
                session.post(server.url, json=body)
        else:
            asyncio.run(post_async(kind, known, server.url, body))
        (received,) = server.requests
        sent = json.loads(received.body)
        assert sent["messages"] == "é"
        assert 9900 < sent["max_tokens"] < 10_000
        assert int(received.headers["content-length"]) == len(received.body)


async def post_async(kind, known, url, body):
    if kind == "aiohttp":
        async with RateLimitMiddleware(known) as middleware, aiohttp.ClientSession(middlewares=[middleware]) as session:
            await (await session.post(url, json=body)).read()
    else:
        async with httpx.AsyncClient(transport=AsyncRateLimitTransport(known)) as client:
            await client.post(url, json=body)
