"""The guard itself, in virtual time: one failure ends the asking, a probe begins it again, each policy gets its answer.

Over-admission counted: 0, except under `allow`, where it is what was chosen.
"""

import asyncio
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.outage.simulation import START, Link
from tidegate import AsyncLimiter, ConfigError, Limit, Limiter, Policy, StoreUnavailable
from tidegate.core.decision import LocalDecision
from tidegate.stores import MemoryStore, Store
from tidegate.stores.outage import GuardedStore, open_guarded
from tidegate.stores.sqlite import SQLiteStore
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
def guard(link, clock):
    return GuardedStore(link, bounded=True, clock=clock, background=False, number=1)


def ask(guard, policy=DENY, key="k", cost=1, verb="acquire"):
    return guard.apply_one(verb, policy, key, (cost,))


def lose(guard, link, state="lost"):
    ask(guard)  # the first answer of all
    link.state = state
    assert isinstance(ask(guard), LocalDecision)


def test_a_lost_store_is_asked_once_and_not_again_until_a_probe(guard, link):
    lose(guard, link, "deaf")
    before = link.reached
    answers = [ask(guard) for _ in range(1000)]
    assert link.reached == before
    assert all(isinstance(answer, LocalDecision) and not answer for answer in answers)
    assert guard.metrics()["denied_without_store"] == 1001


def test_the_first_question_of_all_is_put_three_times(guard, link):
    link.state = "deaf"
    assert not ask(guard)
    assert link.reached == 3


def test_deny_says_when_to_ask_again(guard, link, clock):
    lose(guard, link)
    guard.tend()  # a probe, in vain: the next one is due in 50 ms
    answer = ask(guard)
    assert (answer.allowed, answer.retry_after, answer.violated) == (False, 0.05, ("1h",))
    assert ask(guard, cost=11).retry_after is None  # never, store or no store


def test_allow_allows_and_the_answer_shows_who_gave_it(guard, link):
    lose(guard, link)
    answers = [ask(guard, ALLOW) for _ in range(25)]
    assert all(answers)
    assert {type(answer) for answer in answers} == {LocalDecision}
    assert guard.metrics()["allowed_without_store"] == 25  # 15 more than the limit: what `allow` means


def test_pauses_between_probes_double_up_to_two_seconds(guard, link, clock):
    lose(guard, link)
    pauses = []
    for _ in range(9):
        due = guard.tend()
        pauses.append((due - clock.steady()) // 1000)
        clock.advance((due - clock.steady()) / 1e6)
    assert pauses == [50, 100, 200, 400, 800, 1600, 2000, 2000, 2000]


def test_it_returns_by_itself_and_says_both_once(guard, link, clock, caplog):
    lose(guard, link)
    for _ in range(10):
        ask(guard)
    clock.advance(3)
    link.state = "up"
    guard.tend()
    assert type(ask(guard)) is not LocalDecision
    lost, back = caplog.records
    assert lost.levelno == logging.ERROR
    assert "could not ask: the link is cut; mend it" in lost.message
    assert "calls to policy 'api' are denied" in lost.message
    assert back.message == "store available again after 3.000 s; 11 calls were decided without it"
    counts = guard.metrics()
    assert (counts["store_lost"], counts["losses"], counts["returns"], counts["probes"]) == (0, 1, 1, 1)


def test_a_store_that_is_lost_again_at_once_is_looked_for_more_rarely(guard, link, clock):
    lose(guard, link)
    asked = 0
    for _ in range(1000):  # it answers probes and nothing else, for ten seconds
        link.state = "up"
        guard.tend()
        link.state = "deaf"
        before = link.reached
        ask(guard)
        asked += link.reached - before
        clock.advance(0.01)
    assert asked <= 12


def test_the_late_failure_of_an_old_call_does_not_lose_a_store_that_is_back(guard, link):
    losses = guard.metrics()["losses"]
    lose(guard, link)
    link.state = "up"
    guard.tend()
    guard._lose(StoreUnavailable("late"), losses)  # noqa: SLF001 - as a call does that began before the loss
    assert not guard.metrics()["store_lost"]


def test_a_batch_is_decided_as_one(guard, link):
    lose(guard, link)
    asks = [(ALLOW, "a", (1,)), (DENY, "b", (1,))]
    assert [bool(answer) for answer in guard.apply("acquire", asks)] == [False, False]
    assert [bool(answer) for answer in guard.apply("acquire", [asks[0], (ALLOW, "c", (0,))])] == [True, True]


def test_corrections_reach_the_store_when_it_is_back(guard, link, clock):
    first = ask(guard, cost=6)
    link.state = "lost"
    assert not ask(guard)
    guard.apply_one("adjust", DENY, "k", (-4,), at=first.at)
    assert guard.metrics()["corrections_waiting"] == 1
    link.state = "up"
    guard.tend()
    assert guard.metrics()["corrections_waiting"] == 0
    log = Policy("log", (Limit(10, "1h", algorithm="sliding_log"),))
    slots = ask(guard, log, cost=6)
    link.state = "lost"
    ask(guard)
    guard.apply_one("adjust", log, "k", (-4,), at=slots.at)
    clock.advance(1)
    link.state = "up"
    guard.tend()
    assert ask(guard, log, cost=0, verb="peek").remaining == 8


def test_reset_says_that_it_was_not_done(guard, link):
    lose(guard, link)
    with pytest.raises(StoreUnavailable, match="could not reset 'k': the store is unavailable"):
        guard.apply_one("reset", DENY, "k", (0,))


def test_other_mistakes_are_not_mistaken_for_a_loss(guard, link, monkeypatch):
    def fail(*_):
        raise ConfigError("the driver is not installed")

    monkeypatch.setattr(link, "apply", fail)
    with pytest.raises(ConfigError):
        ask(guard)


def test_waiting_goes_on_while_the_store_is_lost(link, clock):
    guard = GuardedStore(link, bounded=True, background=True, clock=None)
    with Limiter(DENY, store=guard) as limiter:
        assert limiter.try_acquire("k")
        link.state = "lost"
        assert not limiter.try_acquire("k")
        threading.Timer(0.2, setattr, (link, "state", "up")).start()
        assert limiter.acquire("k", timeout=20)
        guard.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deadline": 0}, "deadline: must be a number of seconds from 0.001"),
        ({"local_for": "1h"}, "local_for: must be a number of seconds"),
        ({"beat": True}, "beat: must be a number of seconds"),
    ],
)
def test_wrong_options_are_refused(link, options, message):
    with pytest.raises(ConfigError, match=message):
        GuardedStore(link, **options)


def test_a_url_carries_the_guards_options(tmp_path):
    guard = open_guarded(f"sqlite:///{tmp_path}/x.db?deadline=70ms&local_for=5m&beat=2")
    assert isinstance(guard, GuardedStore)
    assert guard.deadline == 0.07
    assert isinstance(guard.store, SQLiteStore)
    assert guard.store._patience == 70_000  # noqa: SLF001 - the store was told
    assert not isinstance(open_guarded("memory://"), GuardedStore)
    with pytest.raises(ConfigError, match="deadline: cannot use this store URL"):
        open_guarded(f"sqlite:///{tmp_path}/x.db?deadline=soon")
    guard.close()


# ---- stores that hang ------------------------------------------------------------------------------------------------


class Hanging(MemoryStore):
    """Answers, until it hangs: then for as long as the test lasts."""

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


def test_a_store_that_hangs_costs_one_deadline_and_few_threads(hanging):
    guard = GuardedStore(hanging, deadline=0.05)
    assert ask(guard)
    hanging.hangs = True
    before = threading.active_count()
    answers = [ask(guard) for _ in range(200)]
    assert {type(answer) for answer in answers} == {LocalDecision}
    assert hanging.calls <= 2 + guard.metrics()["probes"] + 1  # one call hung, and at most one probe at a time
    assert threading.active_count() - before <= 3
    hanging.released.set()
    guard.close()


async def test_in_an_event_loop_a_store_without_async_neither_blocks_nor_hangs(hanging):
    guard = GuardedStore(hanging, deadline=0.05)
    async with AsyncLimiter(DENY, store=guard) as limiter:
        assert await limiter.try_acquire("k")
        hanging.hangs = True
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        other = asyncio.ensure_future(tick())
        assert isinstance(await limiter.try_acquire("k"), LocalDecision)
        other.cancel()
        assert ticks > 10  # the loop ran on while the store hung
        calls = hanging.calls
        assert not any([await limiter.try_acquire("k") for _ in range(1000)])
        assert hanging.calls <= calls + 1  # a probe
        hanging.released.set()
    guard.close()


class HangingTasks(Hanging):
    """The same for tasks; `tidied` is set when one was let finish."""

    def __init__(self):
        super().__init__()
        self.tidied = asyncio.Event()

    async def apply_async(self, verb, asks, now=None, at=None):
        if self.hangs:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.tidied.set()
        return MemoryStore.apply(self, verb, asks, now, at)


async def test_a_cancelled_call_says_nothing_about_the_store():
    store = HangingTasks()
    guard = GuardedStore(store, deadline=0.2)
    assert await guard.apply_async("acquire", ((DENY, "k", (1,)),))
    store.hangs = True
    call = asyncio.ensure_future(guard.apply_async("acquire", ((DENY, "k", (1,)),)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.wait_for(store.tidied.wait(), 10)
    assert guard.metrics()["losses"] == 0


async def test_a_task_that_hangs_is_left_behind_at_the_deadline():
    store = HangingTasks()
    guard = GuardedStore(store, deadline=0.05)
    assert await guard.apply_async("acquire", ((DENY, "k", (1,)),))
    store.hangs = True
    answer = (await guard.apply_async("acquire", ((DENY, "k", (1,)),)))[0]
    assert isinstance(answer, LocalDecision)
    assert guard.metrics()["losses"] == 1
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    guard.close()


class Busy(MemoryStore):
    """Takes its time for each call, as a store does whose connections are few."""

    instant = False

    def __init__(self):
        super().__init__()
        self.places = threading.Semaphore(4)

    def apply(self, *asked):
        with self.places:
            threading.Event().wait(0.01)
            return super().apply(*asked)

    def apply_one(self, verb, policy, key, costs, now=None, at=None):
        return self.apply(verb, ((policy, key, costs),), now, at)[0]


def test_threads_that_wait_for_others_do_not_lose_the_store():
    guard = GuardedStore(Busy(), deadline=0.1)
    roomy = Policy("roomy", ("1000/1h",))
    assert ask(guard, roomy)
    with ThreadPoolExecutor(120) as threads:
        answers = list(threads.map(lambda _: ask(guard, roomy), range(120)))  # 0.3 s for all, by four at a time
    assert all(type(answer) is not LocalDecision and answer for answer in answers)
    assert guard.metrics()["losses"] == 0
    guard.close()


async def test_tasks_that_wait_for_others_do_not_lose_the_store():
    guard = GuardedStore(Busy(), deadline=0.1)
    async with AsyncLimiter("1000/1h", store=guard) as limiter:
        assert await limiter.try_acquire("k")
        answers = await asyncio.gather(*(limiter.try_acquire("k") for _ in range(120)))
        assert all(type(answer) is not LocalDecision and answer for answer in answers)
        assert guard.metrics()["losses"] == 0
    guard.close()


class Elsewhere(MemoryStore):
    """Answers tasks after some turns of their loop."""

    instant = False

    async def apply_async(self, verb, asks, now=None, at=None):
        for _ in range(5):
            await asyncio.sleep(0)
        return self.apply(verb, asks, now, at)


@pytest.mark.parametrize("store", [Elsewhere, Busy])
async def test_a_loop_that_stands_still_does_not_lose_the_store(store):
    guard = GuardedStore(store(), deadline=0.05)
    async with AsyncLimiter("1000/1h", store=guard) as limiter:
        assert await limiter.try_acquire("k")
        for turns in range(5):
            call = asyncio.ensure_future(limiter.try_acquire("k"))
            for _ in range(turns):
                await asyncio.sleep(0)
            time.sleep(0.2)  # noqa: ASYNC251 - this is what is tested: four deadlines
            assert type(await call) is not LocalDecision
        assert guard.metrics()["losses"] == 0
    guard.close()


class Plain(Store):
    """A store of somebody else's that raises what its driver raised."""

    def apply(self, verb, asks, now=None, at=None):
        raise ConnectionResetError("by peer")


def test_the_error_of_a_socket_does_not_reach_the_caller(caplog):
    guard = GuardedStore(Plain(), background=False)
    assert not ask(guard)
    assert "store unavailable: by peer" in caplog.text
