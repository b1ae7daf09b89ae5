"""The flow of a request in virtual time: waiting, learning, refusals, retries, tokens."""

import asyncio
from collections import deque
from itertools import pairwise

import httpx
import pytest

from tests.outbound.server import as_json
from tidegate import Denied, Limiter
from tidegate.bus import open_bus
from tidegate.clock import TaskSignal
from tidegate.outbound import AsyncGate, Gate, OutboundRequest, Providers, request_options
from tidegate.outbound.httpx import RateLimitTransport
from tidegate.outbound.quota.exchange import ProviderResponse
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

START = 1_728_000_000
URL = "https://x.example/"


def providers(limit=10, period="1m", **more):
    return Providers.of({"domain": "x.example", "limit": limit, "period": period, **more})


def call(method="GET", body=None, url=URL):
    return OutboundRequest(
        method, url, {}.get, lambda: body, True, lambda error: isinstance(error, ConnectionRefusedError)
    )


class Server:
    """A provider in virtual time, that lets `limit` requests through in any period, or per aligned window."""

    def __init__(self, clock, limit, period=60.0, *, aligned=False, latency=0.01, headers=None):
        self.clock, self.limit, self.period, self.aligned, self.latency = clock, limit, period, aligned, latency
        self.headers = headers or (lambda _server, _now, _ok: {})
        self.recent: deque[float] = deque()
        self.log: list[tuple[float, bool]] = []

    def left(self, now):
        if self.aligned:
            while self.recent and self.recent[0] // self.period != now // self.period:
                self.recent.popleft()
        while self.recent and now - self.recent[0] >= self.period:
            self.recent.popleft()
        return self.limit - len(self.recent)

    def __call__(self, _request):
        self.clock.advance(self.latency / 2)
        now = self.clock.now()
        ok = self.left(now) > 0
        if ok:
            self.recent.append(now)
        self.log.append((now, ok))
        headers = self.headers(self, now, ok)
        self.clock.advance(self.latency / 2)
        return httpx.Response(200 if ok else 429, headers=headers)

    def windows(self, count):
        """Tell for each window since the start how many requests were let through, and how many refused."""
        inside = [[ok for at, ok in self.log if i * 60 <= at - START < (i + 1) * 60] for i in range(count)]
        return [(sum(each), len(each) - sum(each)) for each in inside]


def saturate(server, known, seconds):
    """Send one request after another, as fast as the gate lets, for so many virtual seconds."""
    transport = RateLimitTransport(known, transport=httpx.MockTransport(server), clock=server.clock)
    with httpx.Client(transport=transport) as client:
        while server.clock.now() - START < seconds:
            client.get(URL)
    return transport.gate


# ---- never too much --------------------------------------------------------------------------------------------------


def test_network_delays_never_exceed_the_limit_of_a_window():
    """A request that took long to arrive is followed a period later by one that is quick: still within the limit."""
    clock = ManualClock(START)
    server = Server(clock, 5, latency=0.0)
    delays = iter([30.0, 0.0, 20.0, 0.0, 1.0] * 8)

    def slow(request):
        clock.advance(next(delays))  # on its way
        return server(request)

    transport = RateLimitTransport(providers(5), transport=httpx.MockTransport(slow), clock=clock)
    with httpx.Client(transport=transport) as client:
        for _ in range(40):
            assert client.get(URL).status_code == 200


async def test_a_slow_provider_is_still_used_fully():
    """Answers take a third of a period: certainty about when requests arrive would cost a quarter of the quota."""
    clock = ManualClock(START)
    gate = AsyncGate(providers(6), clock=clock)
    arrived = []

    async def send(_provider):
        arrived.append(clock.now())
        await clock.wait_async(TaskSignal(), clock.steady() + 20_000_000)
        return ProviderResponse(200, (), lambda: None, None)

    async def work():
        while clock.now() < START + 60 * 60:
            await gate.run(gate.send_flow(call(), send))

    tasks = [asyncio.create_task(work()) for _ in range(12)]
    while clock.now() < START + 62 * 60:
        for _ in range(8):
            await asyncio.sleep(0)
        clock.advance(0.5)
    await asyncio.gather(*tasks)
    await gate.close()
    late = [at for at in arrived if START + 20 * 60 <= at < START + 60 * 60]
    assert len(late) >= 0.95 * 6 * 40
    assert all(after - before >= 60 for before, after in zip(arrived, arrived[6:], strict=False))


async def test_a_request_in_flight_for_more_than_a_period_keeps_its_permit():
    """It may arrive at any moment: until it is answered, one fewer is sent."""
    clock = ManualClock(START)
    gate = AsyncGate(providers(2), clock=clock)
    delays, arrived = iter([90.0, *[0.0] * 7]), []

    async def send(_provider):
        await clock.wait_async(TaskSignal(), clock.steady() + round(next(delays) * 1_000_000))
        arrived.append(clock.now() - START)
        return ProviderResponse(200, (), lambda: None, None)

    tasks = [asyncio.create_task(gate.run(gate.send_flow(call(), send))) for _ in range(8)]
    while not all(task.done() for task in tasks):
        for _ in range(8):
            await asyncio.sleep(0)
        clock.advance(0.5)
    await gate.close()
    assert arrived[:4] == [0.0, 60.0, 90.0, 120.0]
    assert all(after - before >= 60 for before, after in zip(arrived, arrived[2:], strict=False))


class Ticking(ManualClock):
    """A clock that goes on by itself: a microsecond each time it is read."""

    def steady(self):
        self.advance(0.000001)
        return super().steady()


@pytest.mark.parametrize(("took", "ends"), [(0.2, 60.3), (1.0, 61.3), (10.0, 70.3)])
def test_with_a_real_clock_a_margin_covers_quick_responses(took, ends):
    """A permit counts a two-hundredth longer: from its charge, or from an answer that took longer than that."""
    clock = Ticking(START)
    gate = Gate(providers(1), clock=clock, timeout=0)

    def send(_provider):
        clock.advance(took)
        return ProviderResponse(200, (), lambda: None, None)

    gate.run(gate.send_flow(call(), send))
    with pytest.raises(Denied) as denied:
        gate.run(gate.send_flow(call(), send))
    assert clock.now() - START + denied.value.decision.retry_after == pytest.approx(ends, abs=0.01)
    gate.close()


@pytest.mark.parametrize(("limit", "seconds"), [(2000, 60.0), (2001, 60.3)])
def test_permits_of_large_limits_count_a_little_longer_instead(limit, seconds):
    gate, send = answers(ManualClock(START), (200, {}), known=providers(limit))
    send()
    (account,) = gate._accounts.values()  # noqa: SLF001 - what it decides by
    assert account.limiter.policy.limits[0].length == seconds * 1_000_000
    gate.close()


@pytest.mark.parametrize("algorithm", ["fixed_window", "calendar_window"])
def test_a_request_that_arrives_in_the_next_window_counts_there(algorithm):
    clock = ManualClock(START)  # a whole minute
    known = providers(2, "minute" if algorithm == "calendar_window" else "1m", algorithm=algorithm)
    gate = Gate(known, clock=clock, timeout=0)

    def late(_provider):
        clock.advance(61)
        return ProviderResponse(200, (), lambda: None, None)

    gate.run(gate.send_flow(call(), late))
    gate.run(gate.send_flow(call(), lambda _provider: ProviderResponse(200, (), lambda: None, None)))
    with pytest.raises(Denied):
        gate.run(gate.send_flow(call(), lambda _provider: ProviderResponse(200, (), lambda: None, None)))
    gate.close()


def test_a_charge_that_cannot_be_repeated_is_not_returned():
    """A store that is lost between request and answer leaves the first charge as it was."""
    clock = ManualClock(START)
    store = MemoryStore(clock=clock)
    gate = Gate(providers(1), store, timeout=0)
    apply = store.apply

    def lost(verb, asks, now=None, at=None):
        assert verb != "adjust"
        decisions = apply("peek", asks, now, at)
        return [type(each)((False, *each[1:])) for each in decisions]

    def send(_provider):
        clock.advance(1)
        gate._accounts["x.example", "x.example"]._apply = lost  # noqa: SLF001 - the store is lost here
        return ProviderResponse(200, (), lambda: None, None)

    gate.run(gate.send_flow(call(), send))
    assert usage(providers(1), store) == 1
    gate.close()


def usage(known, store):
    provider = next(iter(known))
    with Limiter(provider.policy, store=store) as limiter:
        return next(iter(limiter.usage("x.example").values())).used


# ---- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aligned", [False, True])
def test_a_provider_that_allows_a_third_is_detected_within_three_windows(aligned):
    """Then 90 to 100 % of what it really allows is used, and fewer than 2 % of requests are refused."""
    clock = ManualClock(START)
    server = Server(clock, 30, aligned=aligned, latency=0.1)
    gate = saturate(server, providers(90), 15 * 60)
    settled = server.windows(15)[3:]
    assert all(27 <= let_through <= 30 for let_through, _ in settled)
    refused = sum(refused for _, refused in settled)
    assert refused / sum(map(sum, settled)) < 0.02
    assert gate.metrics()["refused"] > 0


def test_the_headers_of_a_stricter_provider_prevent_refusals_altogether():
    def headers(server, now, _ok):
        left = server.left(now)
        reset = int(server.recent[0] + 60 - now) + 1 if server.recent else 60
        return {"X-RateLimit-Limit": "30", "X-RateLimit-Remaining": str(left), "X-RateLimit-Reset": str(reset)}

    clock = ManualClock(START)
    server = Server(clock, 30, headers=headers, latency=0.1)
    gate = saturate(server, providers(90), 10 * 60)
    assert server.windows(10) == [(30, 0)] * 10
    assert gate.metrics()["refused"] == 0
    assert gate.metrics()["corrected"] > 0


def test_capacity_recovers_gradually_after_refusals():
    clock = ManualClock(START)
    server = Server(clock, 10, latency=0.1)
    transport = RateLimitTransport(providers(40), transport=httpx.MockTransport(server), clock=clock)
    with httpx.Client(transport=transport) as client:
        while clock.now() - START < 600:
            client.get(URL)
        server.limit = 40  # whatever was wrong there is over
        seen = [transport.gate.capacities()["x.example"]]
        for _ in range(32):
            clock.advance(300)
            client.get(URL)
            seen.append(transport.gate.capacities()["x.example"])
    assert seen[0] in (10, 11)
    assert max(after - before for before, after in pairwise(seen)) <= 2
    assert seen == sorted(seen)
    assert seen[-1] == 40


def test_capacity_recovers_without_waiting_callers():
    clock = ManualClock(START)
    gate, send = answers(clock, (429, {}), *[(200, {})] * 11)
    send()
    clock.advance(10 * 3600)
    for _ in range(10):
        assert send() == 200
    with pytest.raises(Denied):
        send()
    gate.close()


def answers(clock, *steps, known=None, **options):
    """A gate whose provider answers with these statuses and headers, one after another."""
    gate = Gate(known or providers(), clock=clock, timeout=0, **options)
    queue = iter(steps)

    def send(_provider):
        status, headers = next(queue)
        return ProviderResponse(status, list(headers.items()), lambda: None, status)

    return gate, lambda **options_given: gate.run(gate.send_flow(call(**options_given), send)).response


@pytest.mark.parametrize(
    "headers",
    [
        {"Retry-After": "30"},
        {"Retry-After": "Fri, 04 Oct 2024 00:00:30 GMT"},
        {"retry-after": "30", "X-RateLimit-Reset": "9999"},
    ],
)
def test_nothing_is_sent_before_retry_after(headers):
    clock = ManualClock(START)
    gate, send = answers(clock, (429, headers), (200, {}))
    assert send() == 429
    with pytest.raises(Denied) as denied:
        send()
    assert denied.value.decision.retry_after == 30.0
    clock.advance(29.999999)
    with pytest.raises(Denied):
        send()
    clock.advance(0.000001)
    assert send() == 200
    gate.close()


def test_without_retry_after_the_pause_doubles():
    clock = ManualClock(START)
    gate, send = answers(clock, *[(429, {})] * 5, (200, {}), (429, {}))
    pauses = []
    for _ in range(5):
        send()
        with pytest.raises(Denied) as denied:
            send()
        pauses.append(denied.value.decision.retry_after)
        clock.advance(pauses[-1])
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0]
    send()
    send()
    with pytest.raises(Denied) as denied:
        send()
    assert denied.value.decision.retry_after == 1.0  # it had worked in between
    gate.close()


def test_a_503_halves_the_capacity():
    clock = ManualClock(START)
    gate, send = answers(clock, (503, {"Retry-After": "5"}), (200, {}))
    send()
    assert gate.capacities() == {"x.example": 5}
    gate.close()


@pytest.mark.parametrize(
    ("headers", "left"),
    [
        ({"X-RateLimit-Limit": "10", "X-RateLimit-Remaining": "3", "X-RateLimit-Reset": "30"}, 3),
        ({"RateLimit-Policy": '"m";q=10;w=60', "RateLimit": '"m";r=2;t=30'}, 2),
        ({"RateLimit": "limit=10, remaining=4, reset=5"}, 4),
        ({"RateLimit-Limit": "10", "RateLimit-Remaining": "5", "RateLimit-Reset": "5"}, 5),
        ({"anthropic-ratelimit-requests-limit": "10", "anthropic-ratelimit-requests-remaining": "6",
          "anthropic-ratelimit-requests-reset": "2024-10-04T00:00:30Z"}, 6),
        ({"x-ratelimit-limit-requests": "10", "x-ratelimit-remaining-requests": "7",
          "x-ratelimit-reset-requests": "6m0s"}, 7),
        ({"X-RateLimit-Remaining": "999999999999"}, 9),  # never beyond what is configured
        ({"X-RateLimit-Remaining": "-5"}, 9),
        ({"X-RateLimit-Remaining": "9" * 5000}, 9),
        ({"X-RateLimit-Remaining": "two"}, 9),
        ({"RateLimit-Policy": '"day";q=10;w=86400', "RateLimit": '"day";r=0;t=30'}, 9),  # a limit that we do not have
    ],
)  # fmt: skip
def test_usage_is_corrected_by_provider_headers(headers, left):
    clock = ManualClock(START)
    gate, send = answers(clock, (200, headers), *[(200, {})] * 20)
    send()
    for _ in range(left):
        send()
    with pytest.raises(Denied):
        send()
    gate.close()


def test_provider_headers_can_only_undo_earlier_corrections():
    clock = ManualClock(START)
    store = MemoryStore(clock=clock)
    known = providers()
    queue = iter([{"X-RateLimit-Remaining": "2"}, {"X-RateLimit-Remaining": "6"}, {"X-RateLimit-Remaining": "10"}])
    gate = Gate(known, store, timeout=0)

    def send(_provider):
        return ProviderResponse(200, list(next(queue).items()), lambda: None, None)

    left = []
    for _ in range(3):
        gate.run(gate.send_flow(call(), send))
        left.append(10 - usage(known, store))
    assert left == [2, 6, 7]  # three were sent by us
    gate.close()


def test_an_exhausted_quota_pauses_until_the_reset():
    clock = ManualClock(START)
    said = {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "20"}
    gate, send = answers(clock, (200, said), (200, {"X-RateLimit-Remaining": "10"}), (200, {}))
    send()
    with pytest.raises(Denied):
        send()
    # The permits the provider took away are back when it says so; until it does, our own record stands.
    clock.advance(60)
    send()
    gate.close()


def test_absurd_header_values_have_little_effect():
    """A pause of a century is a day at most, and what is taken away is back after a period."""
    clock = ManualClock(START)
    gate, send = answers(clock, (429, {"Retry-After": "9" * 30}), (200, {"X-RateLimit-Remaining": "0",
                         "X-RateLimit-Reset": "99999999"}), (200, {}))  # fmt: skip
    send()
    with pytest.raises(Denied) as denied:
        send()
    assert denied.value.decision.retry_after == 86_400.0
    clock.advance(86_400)
    send()
    clock.advance(60)
    send()
    gate.close()


def test_learning_can_be_turned_off():
    clock = ManualClock(START)
    known = providers(learn="off")
    gate, send = answers(clock, *[(200, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "50"})] * 10, known=known)
    for _ in range(10):
        send()
    gate.close()


def test_a_refusal_reaches_other_processes_over_the_bus():
    clock = ManualClock(START)
    with open_bus("local://refusals", clock=clock) as mine, open_bus("local://refusals", clock=clock) as other:
        gate, send = answers(clock, (429, {"Retry-After": "30"}), bus=mine)
        elsewhere, send_there = answers(clock, (200, {}), (200, {}), bus=other)
        send_there()
        send()
        with pytest.raises(Denied) as denied:
            send_there()
        assert denied.value.decision.retry_after == 30.0
        assert elsewhere.capacities() == {"x.example": 5}
        gate.close()
        elsewhere.close()


# ---- retries ---------------------------------------------------------------------------------------------------------


def test_retries_are_bounded_in_number_and_time_and_have_jitter():
    clock = ManualClock(START)
    chances = iter([0.5, 1.0, 0.0, 0.0])
    known = providers(retries={"most": 3, "within": "100s"})
    gate = Gate(known, clock=clock, chance=lambda: next(chances))
    sent = []

    def send(_provider):
        sent.append(clock.now() - START)
        return ProviderResponse(429, [("Retry-After", "10")], lambda: None, 429)

    result = gate.run(gate.send_flow(call(), send))
    assert (result.response, result.outcome.attempts) == (429, 4)
    assert sent == [0.0, 10.0, 20.0, 30.0]  # the jitter lies within Retry-After here
    assert gate.metrics()["retried"] == 3
    gate.close()

    late = Gate(providers(retries={"most": 3, "within": "5s"}), clock=clock, chance=lambda: 0.0)
    result = late.run(
        late.send_flow(call(), lambda _provider: ProviderResponse(429, [("Retry-After", "10")], lambda: None, 429))
    )
    assert result.outcome.attempts == 1  # it would take longer than allowed
    late.close()


# ---- tokens ----------------------------------------------------------------------------------------------------------

TOKENS = {
    "domain": "x.example",
    "limits": ["100/1m", "10_000/1m unit=tokens name=tpm"],
    "concurrency": 2,
}


def test_tokens_are_reserved_by_estimate_and_committed_by_usage():
    clock = ManualClock(START)
    store = MemoryStore(clock=clock)
    known = Providers.of(TOKENS)
    body = b'{"max_tokens": 500, "messages": [{"role": "user", "content": "hello"}]}'
    during = []

    def handle(_request):
        during.append(used(known, store))
        answer = as_json({"usage": {"prompt_tokens": 12, "completion_tokens": 30, "total_tokens": 42}})
        return httpx.Response(200, content=answer.pieces[0])

    transport = RateLimitTransport(known, store, httpx.MockTransport(handle))
    with httpx.Client(transport=transport) as client:
        client.post(URL, content=body)
        assert during == [{"1m": 1, "tpm": 500 + -(-len(body) // 4), "concurrency": 1}]
        assert used(known, store) == {"1m": 1, "tpm": 42, "concurrency": 0}
        with request_options(cost={"tokens": 77}):
            client.post(URL, content=body)
        assert during[1]["tpm"] == 42 + 77
        assert used(known, store)["tpm"] == 84


def test_a_failure_costs_no_tokens_and_a_missing_usage_the_estimate():
    clock = ManualClock(START)
    store = MemoryStore(clock=clock)
    known = Providers.of({**TOKENS, "estimate": {"tokens": 800}})
    statuses = iter([500, 200])
    transport = RateLimitTransport(
        known, store, httpx.MockTransport(lambda _request: httpx.Response(next(statuses), content=b"oops"))
    )
    with httpx.Client(transport=transport) as client:
        client.post(URL, content=b"{}")
        assert used(known, store) == {"1m": 1, "tpm": 0, "concurrency": 0}
        client.post(URL, content=b"{}")
        assert used(known, store) == {"1m": 2, "tpm": 800, "concurrency": 0}


def used(known, store):
    provider = next(iter(known))
    with Limiter(provider.policy, store=store) as limiter:
        return {name: each.used for name, each in limiter.usage("x.example").items()}


# ---- tasks -----------------------------------------------------------------------------------------------------------


async def test_tasks_wait_by_priority_and_release_everything_when_cancelled():
    clock = ManualClock(START)
    gate = AsyncGate(providers(1), clock=clock)
    order = []

    async def work(name, priority):
        async def send(_provider):
            order.append(name)
            return ProviderResponse(200, (), lambda: None, None)

        with request_options(priority=priority):
            await gate.run(gate.send_flow(call(), send))

    await work("first", 0)
    tasks = [asyncio.create_task(work(*each)) for each in (("low", 0), ("gone", 20), ("high", 10))]
    while gate.metrics()["waiting"] < 3:
        await asyncio.sleep(0)
    tasks[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    clock.advance(60)
    await tasks[2]
    assert order == ["first", "high"]
    clock.advance(60)
    await tasks[0]
    await gate.close()


async def test_a_cancelled_request_counts_and_frees_its_slot():
    clock = ManualClock(START)
    store = MemoryStore(clock=clock)
    known = Providers.of(TOKENS)
    gate = AsyncGate(known, store)
    started = asyncio.Event()

    async def send(_provider):
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(gate.run(gate.send_flow(call(), send)))
    await started.wait()
    assert used(known, store)["concurrency"] == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert used(known, store) == {"1m": 1, "tpm": 1000, "concurrency": 0}
    await gate.close()
