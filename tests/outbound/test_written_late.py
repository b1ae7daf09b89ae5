"""A request that is written long after its permit was taken: its tokens count from then on."""

import asyncio

import aiohttp
import httpx
import httpx2
import pytest
import requests
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.core.memory_calls import OnlyApply
from tests.outbound.flows import Waiting, settle
from tests.outbound.server import QuotaServer, as_json
from tidegate import Denied
from tidegate.outbound import AsyncGate, Gate, Providers
from tidegate.outbound.aiohttp import RateLimitMiddleware
from tidegate.outbound.httpx import AsyncRateLimitTransport, RateLimitTransport
from tidegate.outbound.httpx2 import RateLimitTransport as RateLimitTransport2
from tidegate.outbound.requests import RateLimitAdapter
from tidegate.stores import MemoryStore
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
        await settle()  # what was started when the request was written
        return self.respond()

    def close(self):
        pass

    async def aclose(self):
        pass


class LateStore(OnlyApply):
    """Decides at once; the response to the next charge takes `delay` seconds."""

    delay = 0.0

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
    store, provider = LateStore(MemoryStore(clock=clock)), Provider(clock, httpx)
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


async def test_an_aiohttp_response_that_ends_first_does_not_cancel_the_charge():
    """aiohttp cancels the task that writes a request when its response has ended."""
    clock = ManualClock(START)
    waiting = Waiting(clock=clock)

    async def complete(request):
        await request.read()
        return web.json_response(USAGE)

    async def wait_for_connection(request, handler):
        clock.advance(5.0)
        waiting.until = asyncio.Event()  # the store responds after the provider
        return await handler(request)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    limit = RateLimitMiddleware(providers("127.0.0.1"), waiting, timeout=0, tokenizer=lambda _text: 6000)
    session = aiohttp.ClientSession(middlewares=[limit, wait_for_connection])
    async with TestServer(app) as server, limit, session:
        task = asyncio.create_task(session.post(server.make_url("/v1/chat/completions"), json=BODY))
        while waiting.until is None:
            await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.05, waiting.until.set)
        async with await task as response:
            await response.read()
        await settle()
        (account,) = limit.gate.accounts
        assert (await account.limiter.usage(account.key))["tpm"].reset_after == pytest.approx(60.3)


@pytest.mark.parametrize(
    "limits", [["3/day calendar_window name=rpd"], ["3/day calendar_window name=rpd", "90000/1m unit=tokens"]]
)
def test_a_late_request_counts_in_the_window_in_which_it_was_written(limits):
    """Two processes: while a request waits for its connection, another one is sent in the new day."""
    clock = ManualClock(START + 86_400 - 0.05)
    store = MemoryStore(clock=clock)
    known = Providers.of({"domain": "llm.test", "profile": "openai", "limits": limits})
    slow, quick = Provider(clock, httpx), Provider(clock, httpx)
    clients = [httpx.Client(transport=RateLimitTransport(known, store, each, timeout=0)) for each in (slow, quick)]
    respond = slow.respond

    def respond_later():
        clients[1].post(URL, json=BODY)
        return respond()

    slow.delay, slow.respond = 1.0, respond_later
    clients[0].post(URL, json=BODY)
    clients[1].post(URL, json=BODY)
    with pytest.raises(Denied):
        clients[1].post(URL, json=BODY)
    for client in clients:
        client.close()
    assert sum(at > 86_400 for at in (*slow.arrived, *quick.arrived)) == 3


@pytest.mark.parametrize("limit", ["1/1m", "1/day calendar_window", "5000/day calendar_window unit=tokens name=t"])
def test_a_permit_that_a_slow_store_has_made_too_old_is_taken_again(limit):
    """Two processes: without that, the second could send within the period, or the first in the next window."""
    clock = ManualClock(START + 86_400 - 0.05)
    store = LateStore(MemoryStore(clock=clock))
    gates = [Gate(Providers.of({"domain": "llm.test", "limits": [limit]}), store, timeout=0) for _ in range(2)]
    cost = {"tokens": 3000} if "tokens" in limit else None
    store.delay = 5.0
    gates[0].acquire(URL, cost)
    clock.advance(55.3)
    assert not gates[1].try_acquire(URL, cost).allowed
    for gate in gates:
        gate.close()


async def test_a_store_that_is_always_slow_is_asked_twice_at_most():
    clock = ManualClock(START)
    store = LateStore(MemoryStore(clock=clock))
    gate = AsyncGate(providers(), store)
    verbs, apply = [], store.apply

    def slow(verb, *rest):
        verbs.append(verb)
        store.delay = 0.25
        return apply(verb, *rest)

    store.apply = slow
    charge = (await gate.acquire(URL, {"tokens": 6000})).charge
    assert verbs.count("acquire") == 2
    assert clock.now() - charge.at / 1e6 == pytest.approx(0.25)  # no older than the response of the store makes it
    await gate.acquire(URL, {"tokens": 1})
    assert verbs.count("acquire") == 3  # another permit would be no younger
    await gate.close()


@pytest.mark.parametrize("text", ["äbc", "abc"])
def test_requests_sends_strings_as_without_tidegate(text):
    with QuotaServer(respond=lambda _request: as_json(USAGE)) as server, requests.Session() as session:
        session.post(server.url, data=text)
        session.mount("http://", RateLimitAdapter(providers("127.0.0.1"), timeout=0))
        session.post(server.url, data=text)
        plain, limited = ((request.body, request.headers["content-length"]) for request in server.requests)
    assert plain == limited


async def test_the_same_if_the_program_sends_the_request_itself():
    clock = ManualClock(START)
    store = LateStore(MemoryStore(clock=clock))
    gate = AsyncGate(providers(), store)
    store.delay = 5.0
    charge = await gate.acquire(URL, {"tokens": 6000})
    await charge.commit()
    clock.advance(65.29 - 5)
    assert not (await gate.try_acquire(URL, {"tokens": 6000})).allowed
    clock.advance(0.02)
    assert (await gate.try_acquire(URL, {"tokens": 6000})).allowed
    await gate.close()
