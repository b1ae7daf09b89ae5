"""Gates share what they learn from refusals, over a bus or through a common store."""

import asyncio
import operator
from contextlib import ExitStack
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
from tidegate.clock import TaskSignal
from tidegate.flow import run
from tidegate.outbound import AsyncGate, Gate, OutboundRequest, Providers
from tidegate.outbound.capacity.refusals import Notice
from tidegate.outbound.capacity.shared_notices import SharedNotices
from tidegate.outbound.httpx import RateLimitTransport
from tidegate.outbound.quota.exchange import ProviderResponse
from tidegate.stores import MemoryStore, open_store
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


# ---- the board itself ------------------------------------------------------------------------------------------------


take = partial(run, perform=operator.call)


def boards(count, clock):
    store = MemoryStore(clock=clock)
    return [SharedNotices("x.example", "x.example", store.apply, 60_000_000) for _ in range(count)]


def test_an_unavailable_store_has_no_notices():
    store = MemoryStore(clock=ManualClock(START))
    lost = False

    def apply(*args):
        if lost:
            raise StoreUnavailable("away")
        return store.apply(*args)

    notices = SharedNotices("x.example", "x.example", apply, 60_000_000)
    take(notices.read_flow())
    lost = True
    assert take(notices.read_flow()) is None
    assert take(notices.write_flow(Notice(30, 0))) is None
    lost = False
    assert take(notices.read_flow()) is None  # so nothing was written


def test_a_notice_is_read_once_by_each_other_process():
    clock = ManualClock(START)
    mine, *others = boards(3, clock)
    assert take(mine.read_flow()) is None
    assert take(mine.write_flow(Notice(30, 5_000_000))) is None
    clock.advance(2)
    for other in others:
        assert take(other.read_flow()) == (Notice(30, 5_000_000), 2_000_000)
        assert take(other.read_flow()) is None
    assert take(mine.read_flow()) is None


def test_of_two_concurrent_notices_one_is_written_and_returned():
    clock = ManualClock(START)
    mine, other = boards(2, clock)
    take(mine.read_flow())
    take(other.read_flow())
    assert take(mine.write_flow(Notice(30, 0))) is None
    assert take(other.write_flow(Notice(40, 9))) == (Notice(30, 0), 0)
    assert take(other.write_flow(Notice(20, 0))) is None
    assert take(mine.read_flow()) == (Notice(20, 0), 0)


def test_a_notice_that_cannot_be_encoded_is_skipped():
    mine, other = boards(2, ManualClock(START))
    assert take(mine.write_flow(Notice(30, 0))) is None  # without a look: the store could not be asked
    take(mine.read_flow())
    assert take(mine.write_flow(Notice(2**31, 0))) is None
    assert take(other.read_flow()) is None


def test_a_store_clock_set_back_keeps_the_pause():
    clock = ManualClock(START)
    store = MemoryStore(clock=clock)
    mine, other = (Gate(providers(1000), store, timeout=0) for _ in range(2))
    for gate in (mine, other):
        answer(gate)
    answer(mine, 429, [("Retry-After", "1")])
    clock.advance(120)
    store._ns = lambda: clock.ns() - 3600 * 10**9  # noqa: SLF001 - the store's clock alone; steady time goes on
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


def test_counters_that_expire_between_read_and_write_are_handled():
    """The counters began anew, so what is left is nonsense, and so old that nobody minds."""
    clock = ManualClock(START)
    mine, other = boards(2, clock)
    take(mine.read_flow())
    take(mine.write_flow(Notice(30, 0)))
    clock.advance(86_399)
    take(mine.read_flow())
    clock.advance(2)
    take(mine.write_flow(Notice(40, 0)))
    news = take(other.read_flow())
    assert news.age > 10**15
    assert news.notice.pause <= 86_400_000_000


steps = st.tuples(st.sampled_from(("look", "write", "wait")), st.integers(0, 2), st.integers(1, 90), st.integers(0, 99))


@given(st.lists(steps, max_size=30))
def test_all_processes_converge_to_the_last_notice(plan):
    clock = ManualClock(START)
    everybody = boards(3, clock)
    for notices in everybody:
        assert take(notices.read_flow()) is None
    known = [None] * 3  # by each: the notice it knows of
    fresh = [True] * 3  # whether nobody has written since its last look
    last = None
    for what, who, value, pause in plan:
        if what == "wait":
            clock.advance(pause / 10)
        elif what == "look":
            news = take(everybody[who].read_flow())
            known[who], fresh[who] = news.notice.value if news else known[who], True
            assert known[who] == last
        else:
            news = take(everybody[who].write_flow(Notice(value, pause)))
            assert (news is None) == fresh[who]
            if news is None:
                last, fresh = value, [False] * 3
            known[who], fresh[who] = last, True
    for notices, value in zip(everybody, known, strict=True):
        news = take(notices.read_flow())
        assert (news.notice.value if news else value) == last
