"""httpx, httpx2, requests and aiohttp against a real server that counts: all give the same guarantees."""

import asyncio
import json
import threading

import aiohttp
import httpx
import httpx2
import pytest
import requests

from tests.cases import cases
from tests.outbound.clients import HTTPX_LIBRARIES, KINDS, fetch
from tests.outbound.flows import FailingSettlements
from tests.outbound.server import Answer, QuotaServer
from tidegate import ConfigError, Denied, Limiter, StoreUnavailable
from tidegate.outbound import Providers, request_options
from tidegate.outbound.aiohttp import RateLimitMiddleware
from tidegate.outbound.requests import RateLimitAdapter
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

pytestmark = pytest.mark.parametrize("kind", KINDS)


def providers(limit=3, domain="127.0.0.1", **more):
    return Providers.of({"domain": domain, "limit": limit, "period": "1h", **more})


def test_a_quota_is_kept(kind):
    with QuotaServer() as server:
        found = fetch(kind, providers(5), [f"{server.url}/{i}" for i in range(5)], timeout=0)
        assert [each.status for each in found] == [200] * 5
        assert [each.outcome.decision.remaining for each in found] == [4, 3, 2, 1, 0]
        assert found[-1].outcome.provider == "127.0.0.1"
        assert found[-1].outcome.limited
        with pytest.raises(Denied, match=r"provider 127\.0\.0\.1: .* got no permit within 0.0 s"):
            fetch(kind, providers(5), [f"{server.url}/{i}" for i in range(6)], timeout=0)
        assert len(server.requests) == 10


def test_without_a_provider_nothing_is_limited_and_the_outcome_says_so(kind):
    with QuotaServer() as server:
        (found,) = fetch(kind, providers(domain="elsewhere.test"), [server.url])
        assert (found.status, found.outcome.limited, found.outcome.provider) == (200, False, None)
        assert found.metrics["unlimited"] == 1


def test_the_key_is_sent_in_a_header_unless_the_request_has_one(kind):
    known = providers(api_key="hunter2", key={"header": "Authorization", "prefix": "Bearer"})
    with QuotaServer() as server:
        fetch(kind, known, [server.url])
        fetch(kind, known, [server.url], headers={"Authorization": "mine"})
        assert [each.headers["authorization"] for each in server.requests] == ["Bearer hunter2", "mine"]


def test_the_key_is_sent_in_the_query_and_appears_nowhere_else(kind):
    known = providers(api_key="hun ter+2", key={"query": "apikey"})
    with QuotaServer() as server:
        (found,) = fetch(kind, known, [f"{server.url}/x?a=1"])
        assert server.requests[0].path in ("/x?a=1&apikey=hun%20ter%2B2", "/x?a=1&apikey=hun+ter%2B2")
        assert found.url == f"{server.url}/x?a=1"
        fetch(kind, known, [f"{server.url}/x?apikey=mine"])
        assert server.requests[1].path == "/x?apikey=mine"


def test_each_hop_of_a_redirect_counts_and_the_key_stays_with_its_host(kind):
    def respond(request):
        if request.path == "/from":
            return Answer(302, (("Location", f"http://localhost:{server.port}/to"),), (b"",))
        return Answer()

    with QuotaServer(respond=respond) as server:
        known = Providers.of(
            {"domain": "127.0.0.1", "limit": 1, "period": "1h", "api_key": "hunter2", "key": {"header": "X-Key"}},
            {"domain": "localhost", "limit": 1, "period": "1h"},
        )
        store = MemoryStore()
        (found,) = fetch(kind, known, [f"{server.url}/from"], store=store, timeout=0)
        assert (found.status, found.outcome.provider) == (200, "localhost")
        assert [each.headers.get("x-key") for each in server.requests] == ["hunter2", None]
        with pytest.raises(Denied, match="provider localhost"):
            fetch(kind, known, [f"http://localhost:{server.port}/to"], store=store, timeout=0)


def test_endpoints_have_separate_costs(kind):
    known = providers(10, endpoints=[{"path": "/batch/*", "cost": 4, "methods": ["GET"]}, {"path": "/free", "cost": 0}])
    with QuotaServer() as server:
        urls = [f"{server.url}{path}" for path in ("/batch/a?b=c", "/free", "/one", "/batch")]
        found = fetch(kind, known, urls, timeout=0)
        assert [each.outcome.decision.remaining for each in found] == [6, 6, 5, 1]


@cases(("per", "second"), [("host", 0), ("path", 1), ("credential", 1)])
def test_per_selects_separate_quotas(kind, per, second):
    known = providers(1, per=per, endpoints=[{"path": "/a"}, {"path": "/b"}])
    store = MemoryStore()
    with QuotaServer() as server:
        fetch(kind, known, [f"{server.url}/a"], headers={"Authorization": "ann"}, store=store, timeout=0)
        other = {"Authorization": "bob" if per == "credential" else "ann"}
        if second:
            fetch(kind, known, [f"{server.url}/b"], headers=other, store=store, timeout=0)
        with pytest.raises(Denied):
            fetch(kind, known, [f"{server.url}/a"], headers={"Authorization": "ann"}, store=store, timeout=0)


def test_a_refused_request_is_retried(kind):
    answers = iter([503, 200, 429, 429])  # each wait takes a second

    def respond(_request):
        return Answer(next(answers), (("Retry-After", "0"),), (b"x",))

    known = providers(100, retries=1)
    with QuotaServer(respond=respond) as server:
        (found,) = fetch(kind, known, [server.url], jitter=lambda: 0.0)
        assert (found.status, found.outcome.attempts, found.metrics["retried"]) == (200, 2, 1)
        (found,) = fetch(kind, known, [server.url], jitter=lambda: 0.0, method="POST", body=b"data")
        assert (found.status, found.outcome.attempts) == (429, 2)
        assert [each.body for each in server.requests] == [b"", b"", b"data", b"data"]


def test_after_a_503_only_idempotent_methods_are_retried(kind):
    known = providers(100, retries=2)
    with QuotaServer(respond=lambda _request: Answer(503, (("Retry-After", "0"),), (b"x",))) as server:
        (found,) = fetch(kind, known, [server.url], jitter=lambda: 0.0, method="POST", body=b"data")
        assert (found.status, found.outcome.attempts) == (503, 1)


def test_a_request_that_was_never_sent_returns_its_permit(kind):
    with QuotaServer() as server:
        dead = server.url
    store = MemoryStore()
    known = providers(1)
    for _ in range(3):
        with pytest.raises((httpx.ConnectError, httpx2.ConnectError, requests.ConnectionError, OSError)):
            fetch(kind, known, [dead], store=store, timeout=0)
    with QuotaServer() as server:
        assert fetch(kind, known, [server.url], store=store, timeout=0)[0].status == 200


def test_a_request_that_may_have_arrived_is_charged(kind):
    def respond(_request):
        raise ConnectionAbortedError  # the server drops the connection without an answer

    store = MemoryStore()
    with QuotaServer(respond=respond) as server:
        lost = (httpx.RemoteProtocolError, httpx2.RemoteProtocolError)
        with pytest.raises((*lost, requests.ConnectionError, aiohttp.ServerDisconnectedError)):
            fetch(kind, providers(1), [server.url], store=store, timeout=0, method="POST", body=b"x")
        with pytest.raises(Denied):
            fetch(kind, providers(1), [server.url], store=store, timeout=0)


def test_waiting_ends_at_the_deadline_of_the_block(kind):
    clock = ManualClock(1_728_000_000)
    known = providers(1)
    with QuotaServer() as server, request_options(timeout=600):
        with pytest.raises(Denied, match="would allow it in 3000"):
            fetch(kind, known, [server.url, server.url], clock=clock)
        assert clock.now() == 1_728_000_600
        with request_options(timeout=None):
            found = fetch(kind, known, [server.url, server.url], clock=clock)
        assert found[1].outcome.waited == 3600.0


def test_a_streamed_body_holds_its_slot_until_the_end(kind):
    pieces = tuple(b"%d\n" % number * 50_000 for number in range(40))  # more than the network holds at once
    known = Providers.of({"domain": "127.0.0.1", "concurrency": 1})
    store = MemoryStore()
    policy = next(iter(known)).policy
    with QuotaServer(respond=lambda _request: Answer(200, (), pieces)) as server:
        held = []
        text = stream(kind, known, store, server.url, lambda: held.append(used(policy, store)))
        assert text == b"".join(pieces)
        assert held == [1]
        assert used(policy, store) == 0


@cases("streamed", [False, True])
def test_tokens_are_counted_by_the_usage_in_the_response(kind, streamed):
    usage = b'{"usage": {"prompt_tokens": 12, "completion_tokens": 30, "total_tokens": 42}}'
    pieces = (b"data: {}\n\n", b"data: ", usage[:20], usage[20:], b"\n\ndata: [DONE]\n\n") if streamed else (usage,)
    known = Providers.of({"domain": "127.0.0.1", "limits": ["100/1h", "10_000/1h unit=tokens name=tpm"]})
    store = MemoryStore()
    with QuotaServer(respond=lambda _request: Answer(200, (), pieces)) as server:
        (found,) = fetch(kind, known, [server.url], method="POST", body=b'{"max_tokens": 100}', store=store)
        assert found.text.encode() == b"".join(pieces)
    with Limiter(next(iter(known)).policy, store=store) as limiter:
        assert {name: each.used for name, each in limiter.usage("127.0.0.1").items()} == {"1h": 1, "tpm": 42}


def used(policy, store):
    with Limiter(policy, store=store) as limiter:
        return limiter.usage("127.0.0.1")["concurrency"].used


def stream(kind, known, store, url, look):
    """Fetch piece by piece; look after the first one."""
    if kind in HTTPX_LIBRARIES:
        library, adapter = HTTPX_LIBRARIES[kind]
        transport = adapter.RateLimitTransport(known, store)
        with library.Client(transport=transport) as client, client.stream("GET", url) as answer:
            pieces = answer.iter_raw()
            first = next(pieces)
            look()
            return first + b"".join(pieces)
    if kind == "requests":
        with requests.Session() as session:
            session.mount("http://", RateLimitAdapter(known, store))
            with session.get(url, stream=True) as answer:
                pieces = answer.iter_content(1000)
                first = next(pieces)
                look()
                return first + b"".join(pieces)
    return asyncio.run(stream_async(kind, known, store, url, look))


async def stream_async(kind, known, store, url, look):
    if kind != "aiohttp":
        library, adapter = HTTPX_LIBRARIES[kind.removesuffix("-async")]
        transport = adapter.AsyncRateLimitTransport(known, store)
        async with library.AsyncClient(transport=transport) as client, client.stream("GET", url) as answer:
            pieces = answer.aiter_raw()
            first = await anext(pieces)
            look()
            return first + b"".join([piece async for piece in pieces])
    async with (
        RateLimitMiddleware(known, store) as middleware,
        aiohttp.ClientSession(middlewares=[middleware]) as session,
    ):
        async with session.get(url) as answer:
            first = await answer.content.read(2)
            look()
            rest = await answer.content.read()
        return first + rest


def test_threads_and_tasks_wait_in_fifo_order(kind):
    """Larger priority first; the line is the limiter's, whatever the client."""
    if kind not in (*HTTPX_LIBRARIES, "requests"):
        return  # the same line, see test_gate
    clock = ManualClock(1_728_000_000)
    order: list[str] = []
    known = providers(1)
    with QuotaServer() as server:
        library, module = HTTPX_LIBRARIES.get(kind, HTTPX_LIBRARIES["httpx"])
        adapter = RateLimitAdapter(known, clock=clock)
        transport = module.RateLimitTransport(known, clock=clock)
        with library.Client(transport=transport) as client, requests.Session() as session:
            session.mount("http://", adapter)
            gate, get = (adapter.gate, session.get) if kind == "requests" else (transport.gate, client.get)
            get(server.url)

            def work(name, priority):
                with request_options(priority=priority):
                    get(server.url)
                order.append(name)

            threads = []
            for name, priority in (("low", 0), ("high", 10)):
                threads.append(threading.Thread(target=work, args=(name, priority)))
                threads[-1].start()
                while gate.metrics()["waiting"] < len(threads):
                    clock.advance(0)  # a sign of life, else it would move by itself on a busy machine
            for thread in threads:
                clock.advance(7000)  # more than the hour: a permit counts from its answer on, should that be later
                while len(order) < threads.index(thread) + 1:
                    clock.advance(0)
            for thread in threads:
                thread.join()
    assert order == ["high", "low"]


def test_invalid_arguments_are_refused(kind):
    make = {"requests": RateLimitAdapter, "aiohttp": RateLimitMiddleware}.get(kind)
    if make is None:
        _, adapter = HTTPX_LIBRARIES[kind.removesuffix("-async")]
        make = adapter.AsyncRateLimitTransport if kind.endswith("-async") else adapter.RateLimitTransport
    with pytest.raises(ConfigError, match=r"providers: must be Providers, such as Providers\.load"):
        make({"domain": "a.test"})
    if kind == "requests":
        with pytest.raises(ConfigError, match="max_retries: must be an integer"):
            make(providers(), max_retries=requests.packages.urllib3.Retry(3))
    with pytest.raises(ConfigError, match="timeot: unknown option: did you mean 'timeout'"), request_options(timeot=3):
        pass


@pytest.mark.parametrize("error", [StoreUnavailable("lost"), OSError("not guarded")], ids=["lost", "any"])
def test_a_response_is_returned_even_if_it_cannot_be_settled(kind, error, caplog):
    body = b'{"usage": {"prompt_tokens": 5, "completion_tokens": 2}}'
    store = FailingSettlements()
    store.error = error
    known = Providers.of(
        {"domain": "127.0.0.1", "limits": ["10/1h", "1000/1h unit=tokens"], "estimate": {"tokens": 50}}
    )
    with QuotaServer(respond=lambda _request: Answer(pieces=(body,))) as server:
        (found,) = fetch(kind, known, [server.url], store=store)
    assert (found.status, found.text) == (200, body.decode())
    assert f"127.0.0.1: could not settle a call, so what was reserved stays charged: {error}" in caplog.text
    assert found.metrics["unsettled"] == 1 or kind == "aiohttp"  # which settles in a task of its own


def two_members(**limits):
    key = {"header": "Authorization", "prefix": "Bearer"}
    members = [{"name": n, "api_key": f"key-{n}", "limits": each} for n, each in limits.items()]
    known = {"domain": "127.0.0.1", "limits": ["1000/1h"], "profile": "openai", "key": key, "strict": True}
    return Providers.of({**known, "pool": {"members": members}})


@cases("small", [200, 3000])  # of larger quotas, it is watched when the request is written
def test_a_body_that_is_clamped_for_one_member_is_not_sent_by_the_next(kind, small):
    def respond(request):
        refused = request.headers["authorization"] == "Bearer key-small"
        return Answer(429, (("Retry-After", "60"),)) if refused else Answer(pieces=(b"{}",))

    known = two_members(small=[f"{small}/1h unit=tokens"], large=["100_000/1h unit=tokens"])
    body = json.dumps({"model": "m", "max_tokens": 10_000})
    with QuotaServer(respond=respond) as server:
        urls = [f"{server.url}/v1/chat/completions"]
        headers = {"Content-Type": "application/json"}
        (found,) = fetch(kind, known, urls, method="POST", body=body, headers=headers)
        assert (found.status, found.outcome.member) == (200, "large")
        asked_for = [json.loads(each.body)["max_tokens"] for each in server.requests]
        assert asked_for[0] < small
        assert asked_for[1] == 10_000
        assert [int(each.headers["content-length"]) for each in server.requests] == [
            len(each.body) for each in server.requests
        ]


def test_the_account_headers_of_a_caller_are_not_sent_with_the_key_of_a_member(kind):
    headers = {"OpenAI-Organization": "org-x", "openai-project": "x", "X-Goog-User-Project": "x", "X-Other": "stays"}
    with QuotaServer() as server:
        known = two_members(one=["10/1h"])
        fetch(kind, known, [server.url] * 2, headers=headers)
        for each in server.requests:
            assert each.headers["x-other"] == "stays"
            assert not {"openai-organization", "openai-project", "x-goog-user-project"} & set(each.headers)
        fetch(kind, providers(), [server.url], headers=headers)  # no key is added
        assert server.requests[-1].headers["openai-organization"] == "org-x"
