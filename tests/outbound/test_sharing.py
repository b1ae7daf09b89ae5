"""Gates share what they learn from refusals, over a bus or through a common store."""

import asyncio
import operator
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.outbound.clients import QUICK
from tests.outbound.server import Answer, QuotaServer
from tests.servers.nats import NatsServer
from tests.servers.process import until
from tests.servers.valkey import ValkeyServer
from tidegate import Denied, StoreUnavailable
from tidegate._runtime.clock import TaskSignal
from tidegate._runtime.flow import run
from tidegate.adaptive import CapacityUpdate
from tidegate.bus._local import LocalBus
from tidegate.outbound import AsyncGate, Gate, OutboundRequest, Providers
from tidegate.outbound._capacity.shared_notices import COLLECTION, NAME, SharedNotice, SharedNotices, StoreCalls
from tidegate.outbound._quota.exchange import ProviderResponse
from tidegate.outbound.httpx import RateLimitTransport
from tidegate.stores import MemoryStore, open_store
from tidegate.stores._values import Collection
from tidegate.testing import ManualClock

START = 1_728_000_000
CALL = OutboundRequest("GET", "https://x.example/", {}.get, lambda: None, True, lambda _error: False)


def providers(limit=10, **more):
    return Providers.of({"domain": "x.example", "limit": limit, "period": "1m", **more})


def answer(gate, status=200, headers=()):
    return gate.run(
        gate.send_flow(CALL, lambda _provider: ProviderResponse(status, headers, lambda: None, status))
    ).response


# ---- over a bus ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [NatsServer, ValkeyServer])
def test_one_refusal_slows_every_transport_on_a_bus(kind):
    """Two transports that share nothing but the bus; the server refuses one of them."""
    paths = []

    def respond(request):
        paths.append(request.path)
        return Answer(429, (("Retry-After", "3600"),)) if request.path == "/refused" else Answer()

    with ExitStack() as stack:
        bus = stack.enter_context(kind())
        server = stack.enter_context(QuotaServer(respond=respond))
        known = Providers.of({"domain": "127.0.0.1", "limit": 10, "period": "1m"})
        transports = [
            RateLimitTransport(known, transport=httpx.HTTPTransport(verify=QUICK), bus=bus.url, timeout=0)
            for _ in range(2)
        ]
        clients = [stack.enter_context(httpx.Client(transport=each)) for each in transports]
        for client in clients:
            assert client.get(f"{server.url}/fine").status_code == 200
        assert clients[0].get(f"{server.url}/refused").status_code == 429
        for transport in transports:
            until(lambda gate=transport.gate: gate.capacities() == {"127.0.0.1": 5}, "the news")
        for client in clients:
            with pytest.raises(Denied) as denied:
                client.get(f"{server.url}/late")
            assert 3000 < denied.value.decision.retry_after <= 3600
    assert paths == ["/fine", "/fine", "/refused"]


# ---- through the store -----------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "sqlite", "redis"])
def stores(request, tmp_path):
    """Two stores with one content, and what lets time pass."""
    with ExitStack() as stack:
        if request.param == "redis":
            server = stack.enter_context(ValkeyServer())
            yield [stack.enter_context(_closing(open_store(server.url))) for _ in range(2)]
            return
        clock = ManualClock(START)
        if request.param == "memory":
            yield [MemoryStore(clock=clock)] * 2
            return
        url = f"sqlite:///{tmp_path}/quota.db"
        yield [stack.enter_context(_closing(open_store(url, clock=clock))) for _ in range(2)]


class _closing:  # noqa: N801 - like contextlib's
    def __init__(self, store):
        self.store = store

    def __enter__(self):
        return self.store

    def __exit__(self, *_):
        self.store.close()


def test_one_refusal_slows_every_gate_on_a_store(stores):
    mine, other = (Gate(providers(1000), store, timeout=0) for store in stores)
    assert answer(other) == 200
    assert answer(mine, 429, [("Retry-After", "3600")]) == 429
    until(lambda: _denied(other), "the look")  # at most a second later
    assert other.capacities() == mine.capacities() == {"x.example": 500}
    for gate in (mine, other):
        with pytest.raises(Denied) as denied:
            answer(gate)
        assert 3000 < denied.value.decision.retry_after <= 3600
        gate.close()


def _denied(gate):
    if isinstance(gate.clock, ManualClock):
        gate.clock.advance(0.5)
    try:
        answer(gate)
    except Denied:
        return True
    return False


async def test_gates_on_one_store_detect_a_stricter_limit_together():
    """Four of them, a provider that allows a third: each alone would be refused nearly twice as often."""
    clock = ManualClock(START)
    store = MemoryStore(clock=clock)
    gates = [AsyncGate(providers(90), store) for _ in range(4)]
    recent, log = [], []

    async def send(_provider):
        await clock.wait_async(TaskSignal(), clock.steady() + 250_000)
        now = clock.now()
        recent[:] = [at for at in recent if at > now - 60]
        fits = len(recent) < 30
        recent.extend([now] * fits)
        log.append((now - START, fits))
        await clock.wait_async(TaskSignal(), clock.steady() + 250_000)
        return ProviderResponse(200 if fits else 429, (), lambda: None, None)

    async def work(gate):
        while clock.now() < START + 20 * 60:
            await gate.run(gate.send_flow(CALL, send))

    tasks = [asyncio.create_task(work(gate)) for gate in gates for _ in range(3)]
    while not all(task.done() for task in tasks):
        for _ in range(8):
            await asyncio.sleep(0)
        clock.advance(0.25)
    for gate in gates:
        await gate.close()
    settled = [fits for at, fits in log if 180 <= at < 1200]
    assert sum(settled) >= 0.95 * 30 * 17
    assert settled.count(False) / len(settled) < 0.01


def test_a_notice_reaches_those_that_share_the_store_only_over_the_store_and_others_over_the_bus():
    """One gate has the bus and the store, one only the store, one only the bus: all end at the same capacity."""
    clock = ManualClock(START)
    store, bus = MemoryStore(clock=clock), LocalBus("reductions", clock=clock)
    both = Gate(providers(1000), store, bus=bus, timeout=0)
    by_store = Gate(providers(1000), store, timeout=0)
    by_bus = Gate(providers(1000), MemoryStore(clock=clock), bus=bus, timeout=0)
    gates = both, by_store, by_bus
    for gate in gates:
        answer(gate)
    answer(both, 429, [("Retry-After", "60")])
    for gate in gates:
        until(lambda gate=gate: _denied(gate), "the notice")
        assert gate.capacities() == {"x.example": 500}
    for gate in gates:
        gate.close()
    bus.close()


# ---- notices themselves ----------------------------------------------------------------------------------------------


take = partial(run, perform=operator.call)


def reduction(value, pause=0.0, since=0, epoch=1):
    at = datetime.fromtimestamp(START, UTC)
    return SharedNotice(CapacityUpdate("x.example", "a", value, "refused", at, epoch, pause or None), since)


def notices_of(count, clock):
    store = MemoryStore(clock=clock)
    return [SharedNotices("x.example", "x.example", calls_of(store)) for _ in range(count)]


def calls_of(store):
    return StoreCalls(store, store.apply, store.get_value)


def test_an_unavailable_store_has_no_notices():
    store = MemoryStore(clock=ManualClock(START))
    lost = False

    def unless_lost(function):
        def call(*args):
            if lost:
                raise StoreUnavailable("away")
            return function(*args)

        return call

    calls = StoreCalls(store, unless_lost(store.apply), unless_lost(store.get_value))
    notices = SharedNotices("x.example", "x.example", calls)
    take(notices.read_flow())
    lost = True
    assert take(notices.read_flow()) is None
    assert take(notices.write_flow(reduction(30)))
    lost = False
    assert take(notices.read_flow()) is None  # so nothing was written


def test_a_store_without_values_shares_nothing():
    store = MemoryStore(clock=ManualClock(START))
    store.keeps_values = False
    mine, other = (SharedNotices("x.example", "x.example", calls_of(store)) for _ in range(2))
    take(mine.read_flow())
    assert take(mine.write_flow(reduction(30)))
    store.keeps_values = True
    assert take(other.read_flow()) is None


def test_a_notice_is_read_once_by_each_other_process():
    mine, *others = notices_of(3, ManualClock(START))
    assert take(mine.read_flow()) is None
    assert take(mine.write_flow(reduction(30, 5.0, 7)))
    for other in others:
        assert take(other.read_flow()) == reduction(30, 5.0, 7)
        assert take(other.read_flow()) is None
    assert take(mine.read_flow()) is None


def test_of_two_concurrent_notices_the_second_is_written_after_the_first_was_read():
    mine, other = notices_of(2, ManualClock(START))
    take(mine.read_flow())
    take(other.read_flow())
    assert take(mine.write_flow(reduction(30)))
    assert not take(other.write_flow(reduction(40)))
    assert take(other.read_flow()) == reduction(30)
    assert take(other.write_flow(reduction(20)))
    assert take(mine.read_flow()) == reduction(20)


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b'{"update": "{}", "since": 1}', b'{"quotas": {"60/1m": null}}'])
def test_a_notice_that_cannot_be_read_is_ignored_and_replaced(data):
    store = MemoryStore(clock=ManualClock(START))
    store.put_value(Collection(COLLECTION, ("x.example", "x.example"), listed=False), NAME, data, ttl=60)
    mine, other = (SharedNotices("x.example", "x.example", calls_of(store), limits=("60/1m",)) for _ in range(2))
    assert take(mine.read_flow()) is None
    assert mine.quotas == (0,)
    assert take(mine.write_flow(reduction(30)))
    assert take(other.read_flow()) == reduction(30)


def test_learned_quotas_are_kept_beside_a_reduction():
    store = MemoryStore(clock=ManualClock(START))
    mine, other = (SharedNotices("x.example", "x.example", calls_of(store), limits=("a", "b")) for _ in range(2))
    take(mine.read_flow())
    take(mine.write_quotas_flow((0, 30)))
    assert take(mine.write_flow(reduction(5)))
    assert take(other.read_flow()) == reduction(5)
    assert other.quotas == (0, 30)


def test_two_processes_that_are_refused_at_the_same_time_end_at_the_lower_capacity():
    """Each reads before the other has written: what was written first is not lost."""
    clock = ManualClock(START)
    store = MemoryStore(clock=clock)
    gates = [Gate(providers(1000), store, timeout=0) for _ in range(3)]
    for gate in gates:
        answer(gate)
    first, second, third = (gate.accounts[0].account_capacity for gate in gates)
    take(second.check_flow(START * 10**6))
    answer(gates[0], 429, [("Retry-After", "600")])
    assert first.quota == 500
    second.shared_capacity.announce("x.example", 700, 0, "refused")
    take(second._share_flow(second.shared_capacity.make_update("x.example", 700, 0, "refused"), START * 10**6))  # noqa: SLF001 - between its read and its write, the other one wrote
    take(third.check_flow(START * 10**6))
    assert (second.quota, third.quota) == (500, 500)
    assert gates[2].accounts[0].paused_for() > 590 * 10**6
    for gate in gates:
        gate.close()


class SetBack(ManualClock):
    """The time of day is set back; steady time goes on."""

    back = 0

    def ns(self):
        return super().ns() - self.back * 10**9


def test_a_store_clock_set_back_keeps_the_pause():
    clock = SetBack(START)
    store = MemoryStore(clock=clock)
    mine, other = (Gate(providers(1000), store, timeout=0) for _ in range(2))
    for gate in (mine, other):
        answer(gate)
    answer(mine, 429, [("Retry-After", "1")])
    clock.advance(120)
    clock.back = 3600
    assert _denied(other)  # hears of the first pause only now
    clock.advance(5)
    assert not _denied(other)
    answer(mine, 429, [("Retry-After", "600")])
    clock.advance(2)
    with pytest.raises(Denied) as denied:
        answer(other)
    assert denied.value.decision.retry_after > 590
    for gate in (mine, other):
        gate.close()


steps = st.tuples(st.sampled_from(("look", "write", "wait")), st.integers(0, 2), st.integers(1, 90), st.integers(0, 99))


@given(st.lists(steps, max_size=30))
def test_all_processes_converge_to_the_last_notice(plan):
    clock = ManualClock(START)
    everybody = notices_of(3, clock)
    for notices in everybody:
        assert take(notices.read_flow()) is None
    known = [None] * 3  # by each: the notice it knows of
    fresh = [True] * 3  # whether nobody has written since its last look
    last = None
    for epoch, (what, who, value, pause) in enumerate(plan, 1):
        if what == "wait":
            clock.advance(pause / 10)
        elif what == "look":
            known[who], fresh[who] = take(everybody[who].read_flow()) or known[who], True
            assert known[who] == last
        else:
            notice = reduction(value, pause, epoch=epoch)
            written = take(everybody[who].write_flow(notice))
            assert written == fresh[who]
            if written:
                last, fresh = notice, [False] * 3
                known[who], fresh[who] = notice, True
    for notices, notice in zip(everybody, known, strict=True):
        assert (take(notices.read_flow()) or notice) == last
