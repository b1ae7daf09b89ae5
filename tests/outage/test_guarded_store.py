"""GuardedStore in virtual time: one failure starts an outage, a probe ends it, and each policy decides meanwhile.

Over-admission: 0, except under `allow`, which was chosen for that.
"""

import asyncio
import logging
import sqlite3
import threading
import time
from contextlib import closing

import pytest

from tests.outage.simulation import START, Link
from tidegate import AsyncLimiter, ConfigError, Denied, Limit, Limiter, Policy, StoreUnavailable
from tidegate.core._decision import LocalDecision
from tidegate.stores import MemoryStore, Store
from tidegate.stores._delegating import DelegatingStore
from tidegate.stores._lease import Lease, LeasedStore
from tidegate.stores._outage import GuardedStore, open_guarded
from tidegate.stores._sqlite import SQLiteStore
from tidegate.testing import ManualClock

DENY = Policy("api", ("10/1h",))
ALLOW = Policy("open", ("10/1h",), on_store_error="allow")


@pytest.fixture
def clock():
    return ManualClock(START)


@pytest.fixture
def link(clock):
    return Link(MemoryStore(clock=clock))


@pytest.fixture
def guarded(link, clock):
    return GuardedStore(link, clock=clock, background=False)


def ask(guarded, policy=DENY, key="k", cost=1, verb="acquire"):
    return guarded.apply_one(verb, policy, key, (cost,))


def start_outage(guarded, link, state="lost"):
    ask(guarded)  # the very first call
    link.state = state
    assert isinstance(ask(guarded), LocalDecision)


def test_during_an_outage_only_probes_reach_the_store(guarded, link):
    start_outage(guarded, link, "deaf")
    before = link.reached
    answers = [ask(guarded) for _ in range(1000)]
    assert link.reached == before
    assert all(isinstance(answer, LocalDecision) and not answer for answer in answers)
    assert guarded.metrics()["denied_without_store"] == 1001


def test_the_very_first_call_is_tried_three_times(guarded, link):
    link.state = "deaf"
    assert not ask(guarded)
    assert link.reached == 3


def test_deny_returns_the_time_until_the_next_probe(guarded, link, clock):
    start_outage(guarded, link)
    guarded.maintain()  # a probe that fails: the next one is due in 50 ms
    answer = ask(guarded)
    assert (answer.allowed, answer.retry_after, answer.violated) == (False, 0.05, ("1h",))
    assert ask(guarded, cost=11).retry_after is None  # never, with or without the store


class HangingProbe(Link):
    """A link that calls `meanwhile`, if it is set, before the next call is answered."""

    meanwhile = None

    def apply(self, verb, asks, now=None, at=None):
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return super().apply(verb, asks, now, at)


def test_while_a_probe_hangs_retry_after_is_the_pause_after_it(clock):
    """Found in a soak test: retry_after was 1 ms, so callers polled a thousand times a second."""
    link = HangingProbe(MemoryStore(clock=clock))
    guarded = GuardedStore(link, clock=clock, background=False)
    start_outage(guarded, link)
    seen = []

    def wait_and_ask():
        for _ in range(5):
            clock.advance(0.2)
            seen.append(ask(guarded).retry_after)

    for pause in (0.05, 0.1, 0.2):
        link.meanwhile = wait_and_ask
        due = guarded.maintain()
        assert seen == [pause] * 5
        seen.clear()
        assert ask(guarded).retry_after == pause
        clock.advance((due - clock.steady()) / 1e6)
    link.state = "up"
    guarded.maintain()
    assert ask(guarded)


def test_a_waiting_call_polls_no_more_often_than_the_pause_while_a_probe_hangs(clock):
    link = HangingProbe(MemoryStore(clock=clock))
    guarded = GuardedStore(link, clock=clock, background=False)
    limiter = Limiter(DENY, store=guarded, clock=clock)
    start_outage(guarded, link)
    denied = guarded.metrics()["denied_without_store"]

    def wait():
        with pytest.raises(Denied):
            limiter.acquire("k", timeout=1)

    link.meanwhile = wait
    guarded.maintain()
    assert guarded.metrics()["denied_without_store"] - denied <= 22  # every 50 ms, for a second


def test_allow_returns_local_decisions(guarded, link):
    start_outage(guarded, link)
    answers = [ask(guarded, ALLOW) for _ in range(25)]
    assert all(answers)
    assert {type(answer) for answer in answers} == {LocalDecision}
    assert guarded.metrics()["allowed_without_store"] == 25  # 15 more than the limit: what `allow` means


def test_pauses_between_probes_double_up_to_two_seconds(guarded, link, clock):
    start_outage(guarded, link)
    pauses = []
    for _ in range(9):
        due = guarded.maintain()
        pauses.append((due - clock.steady()) // 1000)
        clock.advance((due - clock.steady()) / 1e6)
    assert pauses == [50, 100, 200, 400, 800, 1600, 2000, 2000, 2000]


def test_start_and_end_of_an_outage_are_logged_once(guarded, link, clock, caplog):
    start_outage(guarded, link)
    for _ in range(10):
        ask(guarded)
    clock.advance(3)
    link.state = "up"
    guarded.maintain()
    assert type(ask(guarded)) is not LocalDecision
    started, ended = caplog.records
    assert started.levelno == logging.ERROR
    assert "could not ask: the link is down" in started.message
    assert "calls to policy 'api' are denied" in started.message
    assert ended.message == "store available again after 3.000 s; 11 calls were decided without it"
    counts = guarded.metrics()
    assert (counts["store_lost"], counts["losses"], counts["returns"], counts["probes"]) == (0, 1, 1, 1)


def test_a_store_that_fails_again_at_once_is_probed_less_often(guarded, link, clock):
    start_outage(guarded, link)
    asked = 0
    for _ in range(1000):  # it answers only probes, for ten seconds
        link.state = "up"
        guarded.maintain()
        link.state = "deaf"
        before = link.reached
        ask(guarded)
        asked += link.reached - before
        clock.advance(0.01)
    assert asked <= 12


def test_a_late_failure_from_before_the_recovery_starts_no_outage(clock):
    link = HangingProbe(MemoryStore(clock=clock))
    guarded = GuardedStore(link, clock=clock, background=False)

    def outage():
        start_outage(guarded, link)
        link.state = "up"
        guarded.maintain()
        link.state = "lost"

    ask(guarded)
    link.meanwhile = outage
    assert isinstance(ask(guarded), LocalDecision)  # asked before the outage, failed after it
    assert guarded.metrics().items() >= {"losses": 1, "returns": 1, "store_lost": False}.items()


def test_a_batch_is_denied_if_one_of_its_policies_denies(guarded, link):
    start_outage(guarded, link)
    asks = [(ALLOW, "a", (1,)), (DENY, "b", (1,))]
    assert [bool(answer) for answer in guarded.apply("acquire", asks)] == [False, False]
    assert [bool(answer) for answer in guarded.apply("acquire", [asks[0], (ALLOW, "c", (0,))])] == [True, True]


def test_corrections_reach_the_store_when_it_is_back(guarded, link, clock):
    first = ask(guarded, cost=6)
    link.state = "lost"
    assert not ask(guarded)
    guarded.apply_one("adjust", DENY, "k", (-4,), at=first.at)
    assert guarded.metrics()["corrections_waiting"] == 1
    link.state = "up"
    guarded.maintain()
    assert guarded.metrics()["corrections_waiting"] == 0
    log = Policy("log", (Limit(10, "1h", algorithm="sliding_log"),))
    slots = ask(guarded, log, cost=6)
    link.state = "lost"
    ask(guarded)
    guarded.apply_one("adjust", log, "k", (-4,), at=slots.at)
    clock.advance(1)
    link.state = "up"
    guarded.maintain()
    assert ask(guarded, log, cost=0, verb="peek").remaining == 8


def test_reset_raises_during_an_outage(guarded, link):
    start_outage(guarded, link)
    with pytest.raises(StoreUnavailable, match="could not reset 'k': the store is unavailable"):
        guarded.apply_one("reset", DENY, "k", (0,))


def test_other_exceptions_start_no_outage(guarded, link, monkeypatch):
    def fail(*_):
        raise ConfigError("the driver is not installed")

    monkeypatch.setattr(link, "apply", fail)
    with pytest.raises(ConfigError):
        ask(guarded)


def test_acquire_waits_through_an_outage(link, clock):
    guarded = GuardedStore(link, background=True, clock=None)
    with Limiter(DENY, store=guarded) as limiter:
        assert limiter.try_acquire("k")
        link.state = "lost"
        assert not limiter.try_acquire("k")
        threading.Timer(0.2, setattr, (link, "state", "up")).start()
        assert limiter.acquire("k", timeout=20)
        guarded.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"processes": 0}, "processes: must be an integer from 1"),
        ({"processes": "4"}, "processes: must be an integer from 1"),
    ],
)
def test_invalid_options_raise_config_error(link, options, message):
    with pytest.raises(ConfigError, match=message):
        GuardedStore(link, **options)


def test_a_url_sets_the_options_of_the_guarded_store(tmp_path):
    guarded = open_guarded(f"sqlite:///{tmp_path}/x.db?deadline=70ms&processes=4")
    assert isinstance(guarded, GuardedStore)
    assert isinstance(guarded.store, SQLiteStore)
    assert ask(guarded)
    with closing(sqlite3.connect(tmp_path / "x.db")) as other:
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        assert isinstance(ask(guarded), LocalDecision)
        assert 0.06 < time.monotonic() - began < 1.5  # without a deadline, a locked file is waited for 2 s
    assert not isinstance(open_guarded("memory://"), GuardedStore)
    assert guarded.metrics()["processes"] == 4
    for option in ("deadline=soon", "deadline=100us", "processes=some"):
        with pytest.raises(ConfigError, match=r"(deadline|processes): cannot use this store URL"):
            open_guarded(f"sqlite:///{tmp_path}/x.db?{option}")
    guarded.close()


# ---- stores that hang ------------------------------------------------------------------------------------------------


class Hanging(MemoryStore):
    """A store that can be made to hang until the test ends."""

    instant = False

    def __init__(self):
        super().__init__()
        self.hangs = False
        self.released = threading.Event()
        self.calls = 0

    def apply(self, *asked):
        self.calls += 1
        if self.hangs:
            self.released.wait(60)
        return super().apply(*asked)

    def apply_one(self, verb, policy, key, costs, now=None, at=None):
        return self.apply(verb, ((policy, key, costs),), now, at)[0]


@pytest.fixture
def hanging():
    store = Hanging()
    yield store
    store.released.set()


async def test_a_store_whose_apply_blocks_does_not_block_the_event_loop(hanging):
    async with AsyncLimiter(DENY, store=GuardedStore(hanging)) as limiter:
        assert await limiter.try_acquire("k")
        hanging.hangs = True
        call = asyncio.ensure_future(limiter.try_acquire("k"))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not call.done()
        hanging.released.set()
        assert type(await call) is not LocalDecision


class HangingTasks(Hanging):
    """The same for tasks; `cleaned_up` is set when a hanging task was cancelled."""

    def __init__(self):
        super().__init__()
        self.cleaned_up = asyncio.Event()

    async def apply_async(self, verb, asks, now=None, at=None):
        if self.hangs:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.cleaned_up.set()
        return MemoryStore.apply(self, verb, asks, now, at)


async def test_a_cancelled_call_starts_no_outage():
    store = HangingTasks()
    guarded = GuardedStore(store)
    assert await guarded.apply_async("acquire", ((DENY, "k", (1,)),))
    store.hangs = True
    call = asyncio.ensure_future(guarded.apply_async("acquire", ((DENY, "k", (1,)),)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.wait_for(store.cleaned_up.wait(), 10)
    assert guarded.metrics()["losses"] == 0


class Plain(Store):
    """A third-party store that raises the exception of its driver."""

    def apply(self, verb, asks, now=None, at=None):
        raise ConnectionResetError("by peer")


def test_socket_errors_start_an_outage_instead_of_reaching_the_caller(caplog):
    guarded = GuardedStore(Plain(), background=False)
    assert not ask(guarded)
    assert "store unavailable: by peer" in caplog.text


class TwoParts(DelegatingStore):
    """Two parts that fail separately; the values and keys with "y" are in another one than keys with "x"."""

    lost = False
    reached = 0

    def shard(self, asks, values=()):
        return "X" if asks and asks[0][1].startswith("x") else "Y"

    def apply(self, verb, asks, now=None, at=None, writes=()):
        if asks and self.shard(asks) == "X":
            self.reached += 1
            if self.lost:
                error = StoreUnavailable("server X is down")
                error.shard = "X"
                raise error
        return super().apply(verb, asks, now, at, writes)


def test_a_part_that_fails_while_it_is_settled_is_one_outage_until_it_answers(clock, caplog):
    store = TwoParts(MemoryStore(clock=clock))
    guarded = GuardedStore(store, clock=clock, background=False, processes=1)
    policy = Policy("p", ("100/1h",), on_store_error="local")
    send = store.inner.apply

    def fail_before_the_settlement(verb, asks, now=None, at=None, writes=()):
        store.lost = verb == "peek"
        return send(verb, asks, now, at, writes)

    ask(guarded, policy, "x")
    store.lost = True
    ask(guarded, policy, "x")
    store.lost, store.inner.apply = False, fail_before_the_settlement
    guarded.maintain()
    store.inner.apply = send
    store.reached = 0
    for _ in range(600):
        clock.advance(0.05)
        guarded.maintain()
        ask(guarded, policy, "x2")
    assert (guarded.metrics()["losses"], guarded.metrics()["returns"]) == (2, 1)
    assert store.reached <= 65, "probes only, one in half a second"
    store.lost = False
    clock.advance(1)
    assert guarded.maintain() is None
    assert guarded.metrics()["keys_unsettled"] == 0


def test_socket_errors_of_a_leased_store_start_an_outage(clock):
    """Found in a review: they reached the caller, and no outage started."""

    class Broken(DelegatingStore):
        broken = False

        def apply(self, verb, asks, now=None, at=None, writes=()):
            if self.broken:
                raise ConnectionResetError("by peer")
            return super().apply(verb, asks, now, at, writes)

    store = Broken(MemoryStore(clock=clock))
    guarded = GuardedStore(store, clock=clock, background=False)
    limiter = Limiter(Policy("p", ("1000/1m",)), store=LeasedStore(guarded, Lease(), clock=clock))
    for _ in range(4):
        assert limiter.try_acquire("k")
        clock.advance(0.6)
    store.broken = True
    clock.advance(5)
    assert not any(limiter.try_acquire("k") for _ in range(3))
    assert guarded.metrics()["losses"] == 1
