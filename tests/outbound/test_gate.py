"""The flow of a request in virtual time: waiting, the windows of a provider, retries, tokens, tasks."""

import asyncio

import httpx
import pytest

from tests.outbound.server import as_json
from tests.outbound.virtual_provider import START, URL, Server, answers, call, providers, usage
from tidegate import ConfigError, Denied, Limiter, StoreUnavailable
from tidegate._runtime.clock import TaskSignal
from tidegate.outbound import AsyncGate, Gate, Providers, request_options
from tidegate.outbound._quota.exchange import ProviderResponse
from tidegate.outbound.httpx import RateLimitTransport
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

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
    (account,) = gate.accounts
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
    store = LosableStore(clock=clock)
    gate = Gate(providers(1), store, timeout=0)

    def send(_provider):
        clock.advance(1)
        store.lost = []
        return ProviderResponse(200, (), lambda: None, None)

    gate.run(gate.send_flow(call(), send))
    assert store.lost, "it has tried to charge the permit again"
    store.lost = None
    assert usage(providers(1), store) == 1
    gate.close()


class LosableStore(MemoryStore):
    """A store that is lost while `lost`, the list of what it was asked, is not None."""

    lost = None

    def apply(self, verb, asks, *arguments):
        if self.lost is not None:
            self.lost.append(verb)
            raise StoreUnavailable("lost")
        return super().apply(verb, asks, *arguments)

    def apply_one(self, verb, *ask_and_times):
        if self.lost is not None:
            self.lost.append(verb)
            raise StoreUnavailable("lost")
        return super().apply_one(verb, *ask_and_times)


# ---- retries ---------------------------------------------------------------------------------------------------------


def test_retries_are_bounded_in_number_and_time_and_have_jitter():
    clock = ManualClock(START)
    chances = iter([0.5, 1.0, 0.0, 0.0])
    known = providers(retries={"max": 3, "within": "100s"})
    gate = Gate(known, clock=clock, jitter=lambda: next(chances))
    sent = []

    def send(_provider):
        sent.append(clock.now() - START)
        return ProviderResponse(429, [("Retry-After", "10")], lambda: None, 429)

    result = gate.run(gate.send_flow(call(), send))
    assert (result.response, result.outcome.attempts) == (429, 4)
    assert sent == [0.0, 10.0, 20.0, 30.0]  # the jitter lies within Retry-After here
    assert gate.metrics()["retried"] == 3
    gate.close()

    late = Gate(providers(retries={"max": 3, "within": "5s"}), clock=clock, jitter=lambda: 0.0)
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

    task = asyncio.create_task(gate.run(gate.send_flow(call()._replace(method="POST"), send)))
    await started.wait()
    assert used(known, store)["concurrency"] == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert used(known, store) == {"1m": 1, "tpm": 1000, "concurrency": 0}
    await gate.close()


@pytest.mark.parametrize("kind", [Gate, AsyncGate])
def test_a_clock_beside_a_store_is_refused(kind):
    """The gate decides by the clock of the store: another one would be ignored."""
    providers = Providers.of({"domain": "a.test", "limit": 5, "period": "1m"})
    store = MemoryStore(clock=ManualClock(1_728_000_000))
    with pytest.raises(ConfigError, match="clock: cannot be combined with a Store"):
        kind(providers, store, clock=ManualClock(1_728_000_000))
    kind(providers, store, clock=store.clock)
