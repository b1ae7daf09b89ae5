"""The document's operations on MemoryLimiter and AsyncMemoryLimiter, in virtual time."""

import asyncio
import threading
from datetime import timedelta

import pytest

from tests.cases import cases
from tests.swarm.conftest import START, WatchedClock
from tidegate import Closed, ConfigError, Denied, ResourceUnknown
from tidegate.swarm import AsyncMemoryLimiter, Capacity, MemoryLimiter


@pytest.fixture
def limiter(face, clock):
    return face.memory(clock=clock)


def available(face, limiter, resource="api"):
    return face.run(limiter.get_capacity(resource)).available


def test_a_new_resource_starts_full(face, limiter):
    face.run(limiter.set_capacity("openai-api", 60, timedelta(minutes=1)))
    assert face.run(limiter.get_capacity("openai-api")) == Capacity("openai-api", 60, 60, 60.0, 0)


@cases("window", [60, 60.0, "1m", timedelta(minutes=1)])
def test_forms_of_a_window(face, limiter, window):
    face.run(limiter.set_capacity("api", 60, window))
    assert face.run(limiter.get_capacity("api")).window == 60


def test_tokens_come_back_with_time(face, limiter, clock):
    face.run(limiter.set_capacity("fast-api", 10, 1))
    for _ in range(10):
        assert face.run(limiter.try_acquire("fast-api")) is True
    assert face.run(limiter.try_acquire("fast-api")) is False
    clock.advance(0.099_999)
    assert face.run(limiter.try_acquire("fast-api")) is False
    clock.advance(0.000_001)
    assert face.run(limiter.try_acquire("fast-api")) is True
    clock.advance(100)
    assert available(face, limiter, "fast-api") == 10


def test_acquire_waits(face, limiter, clock):
    face.run(limiter.set_capacity("api", 2, 10))
    for _ in range(4):
        assert face.run(limiter.acquire("api"))
    assert clock.now() == START + 10


def test_acquire_gives_up_at_its_timeout(face, limiter, clock):
    face.run(limiter.set_capacity("api", 1, 10))
    face.run(limiter.acquire("api"))
    with pytest.raises(Denied):
        face.run(limiter.acquire("api", timeout=5))
    assert clock.now() == START + 5
    assert face.run(limiter.get_capacity("api")).in_flight == 1, "who got nothing is not in flight"


def test_release_returns_a_token_and_counts_what_is_in_flight(face, limiter):
    face.run(limiter.set_capacity("api", 2, 60))
    face.run(limiter.acquire("api"))
    face.run(limiter.acquire("api"))
    assert face.run(limiter.get_capacity("api")) == Capacity("api", 0, 2, 60.0, 2)
    face.run(limiter.release("api"))
    assert face.run(limiter.get_capacity("api")) == Capacity("api", 1, 2, 60.0, 1)
    assert face.run(limiter.try_acquire("api"))


def test_release_without_returning_the_token(face, limiter, clock):
    face.run(limiter.set_capacity("api", 2, 60))
    face.run(limiter.acquire("api"))
    face.run(limiter.release("api", return_token=False))
    assert face.run(limiter.get_capacity("api")) == Capacity("api", 1, 2, 60.0, 0)
    face.run(limiter.release("api"))
    assert available(face, limiter) == 1, "a release without a call returns nothing"
    clock.advance(30)
    assert available(face, limiter) == 2


def test_release_at_full_capacity_changes_nothing_and_in_flight_is_never_negative(face, limiter):
    face.run(limiter.set_capacity("api", 2, 60))
    face.run(limiter.release("api"))
    assert face.run(limiter.get_capacity("api")) == Capacity("api", 2, 2, 60.0, 0)
    face.run(limiter.acquire("api"))
    for _ in range(3):
        face.run(limiter.release("api"))
    assert face.run(limiter.get_capacity("api")) == Capacity("api", 2, 2, 60.0, 0)


def test_changing_capacity_caps_what_is_available(face, limiter):
    face.run(limiter.set_capacity("api", 100, 60))
    face.run(limiter.try_acquire("api", cost=50))
    face.run(limiter.set_capacity("api", 30, 60))
    assert face.run(limiter.get_capacity("api")) == Capacity("api", 30, 30, 60.0, 1)
    face.run(limiter.set_capacity("api", 100, 60))
    assert face.run(limiter.get_capacity("api")) == Capacity("api", 30, 100, 60.0, 1), "nothing is refilled"
    face.run(limiter.set_capacity("api", 200, 60))
    assert available(face, limiter) == 30


def test_a_full_bucket_does_not_become_fuller(face, limiter, clock):
    face.run(limiter.set_capacity("api", 10, 10))
    face.run(limiter.set_capacity("api", 20, 10))
    assert face.run(limiter.get_capacity("api")) == Capacity("api", 10, 20, 10.0, 0)
    clock.advance(5)
    assert available(face, limiter) == 20


def test_changing_the_window_keeps_what_is_available(face, limiter, clock):
    face.run(limiter.set_capacity("api", 10, 10))
    face.run(limiter.try_acquire("api", cost=10))
    face.run(limiter.set_capacity("api", 10, 100))
    assert available(face, limiter) == 0
    clock.advance(10)
    assert available(face, limiter) == 1


@cases(
    ("capacity", "window"),
    [
        (0, 60),
        (-1, 60),
        (60, 0),
        (60, -1.5),
        (60, timedelta(0)),
        (0, timedelta(-1)),
        (5, "0s"),
        (5, " 0.0 minutes "),
        (5, "0h0m"),
        (5, "-5m"),
    ],
)
def test_zero_removes_the_resource(face, limiter, capacity, window):
    face.run(limiter.set_capacity("old-api", 1, 60))
    face.run(limiter.acquire("old-api"))
    face.run(limiter.set_capacity("old-api", capacity, window))
    assert face.run(limiter.get_capacity("old-api")) is None
    face.run(limiter.set_capacity("old-api", 1, 60))
    assert face.run(limiter.get_capacity("old-api")) == Capacity("old-api", 1, 1, 60.0, 0), "a new one, full"


def test_unknown_resources(face, limiter):
    with pytest.raises(ResourceUnknown, match="no capacity is set for 'nope'"):
        face.run(limiter.acquire("nope"))
    assert face.run(limiter.try_acquire("nope")) is False
    assert face.run(limiter.get_capacity("nope")) is None
    face.run(limiter.release("nope"))
    assert face.run(limiter.announce_reduced("nope", "429")) is None
    face.run(limiter.set_capacity("nope", 0, 60))


def test_announce_reduced_leaves_three_quarters_and_at_least_one(face, limiter, clock):
    face.run(limiter.set_capacity("api", 100, 60))
    seen = []
    for _ in range(16):
        face.run(limiter.announce_reduced("api", "received 429 response"))
        seen.append(face.run(limiter.get_capacity("api")).total)
    assert seen[:5] == [75, 56, 42, 31, 23]
    assert seen[-1] == 1
    clock.advance(10_000)
    assert face.run(limiter.get_capacity("api")).total == 1, "nobody brings it back but set_capacity"
    face.run(limiter.set_capacity("api", 100, 60))
    assert face.run(limiter.get_capacity("api")).total == 100


def test_a_retry_after_freezes(face, limiter, clock):
    face.run(limiter.set_capacity("api", 100, 60))
    face.run(limiter.announce_reduced("api", "429", retry_after=12))
    capacity = face.run(limiter.get_capacity("api"))
    assert (capacity.available, capacity.total, capacity.frozen_for) == (0, 75, 12.0)
    assert face.run(limiter.try_acquire("api")) is False
    clock.advance(1)
    with pytest.raises(Denied) as denied:
        face.run(limiter.acquire("api", timeout=2))
    assert denied.value.decision.retry_after == 9
    face.run(limiter.acquire("api"))
    assert clock.now() == START + 12
    assert available(face, limiter) == 74


def test_setting_the_capacity_ends_a_freeze(face, limiter, clock):
    face.run(limiter.set_capacity("api", 100, 60))
    face.run(limiter.announce_reduced("api", "429", retry_after=timedelta(hours=1)))
    face.run(limiter.set_capacity("api", 10, 60))
    assert face.run(limiter.try_acquire("api")) is True
    assert clock.now() == START


def test_the_callback_of_a_limiter_without_a_swarm(face, limiter):
    seen = []
    face.run(limiter.on_capacity_change(seen.append))
    face.run(limiter.set_capacity("api", 100, 60))
    face.run(limiter.announce_reduced("api", "why"))
    assert [(update.resource, update.new_capacity, update.reason) for update in seen] == [("api", 75, "why")]


def test_reserve_and_commit(face, limiter):
    face.run(limiter.set_capacity("tokens", 1000, 60))
    held = face.run(limiter.reserve("tokens", cost=800))
    assert face.run(limiter.get_capacity("tokens")) == Capacity("tokens", 200, 1000, 60.0, 1)
    with pytest.raises(Denied):
        face.run(limiter.reserve("tokens", cost=201))
    face.run(held.commit(300))
    assert face.run(limiter.get_capacity("tokens")) == Capacity("tokens", 700, 1000, 60.0, 0)
    held = face.run(limiter.reserve("tokens", cost=700))
    face.run(held.cancel())
    assert available(face, limiter, "tokens") == 700
    with pytest.raises(ResourceUnknown):
        face.run(limiter.reserve("nope"))


def test_close(face, limiter):
    face.run(limiter.set_capacity("api", 1, 60))
    face.run(limiter.close())
    for refused in (lambda: limiter.acquire("api"), lambda: limiter.set_capacity("api", 1, 60), limiter.close):
        with pytest.raises(Closed):
            face.run(refused())
    assert face.run(limiter.try_acquire("api")) is False
    assert face.run(limiter.get_capacity("api")) is None
    face.run(limiter.release("api"))
    face.run(limiter.announce_reduced("api", "429"))


@cases(
    ("arguments", "message"),
    [
        (("", 1, 60), "resource: must be a non-empty string, not ''"),
        ((None, 1, 60), "resource: must be a non-empty string, not None"),
        (("api", 1.5, 60), "capacity: must be an integer number of permits per window, not 1.5"),
        (("api", True, 60), "capacity: must be an integer"),
        (("api", 1, "soon"), "period"),
        (("api", 1, None), "expected a string such as '30s'"),
        (("api", 2**60, 60), "quota: must be an integer"),
    ],
)
def test_invalid_capacities_are_refused(face, limiter, arguments, message):
    with pytest.raises(ConfigError, match=message):
        face.run(limiter.set_capacity(*arguments))
    assert face.run(limiter.get_capacity("api")) is None


def test_a_callback_must_be_callable(face, limiter):
    with pytest.raises(ConfigError, match="callback: must be a function"):
        limiter.on_capacity_change(None)


# ---- who waits is woken ----------------------------------------------------------------------------------------------


def wait_in_threads(limiter, clock, count):
    outcomes = []

    def work():
        try:
            outcomes.append(limiter.acquire("api"))
        except Exception as error:  # noqa: BLE001 - told to the test
            outcomes.append(error)

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    waiting = threading.Event()
    while len(clock.waiting) < count:
        waiting.wait(0.001)
    return threads, outcomes


@pytest.mark.parametrize(("end", "error"), [("close", Closed), ("remove", ResourceUnknown)])
def test_threads_that_wait_are_woken(end, error):
    clock = WatchedClock()
    limiter = MemoryLimiter(clock=clock)
    limiter.set_capacity("api", 1, 3600)
    limiter.acquire("api")
    threads, outcomes = wait_in_threads(limiter, clock, 5)
    if end == "close":
        limiter.close()
    else:
        limiter.set_capacity("api", 0, 0)
    for thread in threads:
        thread.join(20)
    assert [type(outcome) for outcome in outcomes] == [error] * 5


@pytest.mark.parametrize("end", ["release", "more"])
def test_waiting_threads_get_freed_permits(end):
    clock = WatchedClock()
    limiter = MemoryLimiter(clock=clock)
    limiter.set_capacity("api", 1, 3600)
    limiter.acquire("api")
    threads, outcomes = wait_in_threads(limiter, clock, 1)
    if end == "release":
        limiter.release("api")
    else:
        limiter.set_capacity("api", 3_600_000_000, 3600)
    for thread in threads:
        thread.join(20)
    assert [outcome.allowed for outcome in outcomes] == [True]
    limiter.close()


def test_a_block_may_close_its_limiter_itself(clock):
    with MemoryLimiter(clock=clock) as limiter:
        limiter.close()
    with pytest.raises(Closed):
        limiter.close()


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("end", "error"), [("close", Closed), ("remove", ResourceUnknown)])
async def test_tasks_that_wait_are_woken(clock, end, error):
    limiter = AsyncMemoryLimiter(clock=clock)
    await limiter.set_capacity("api", 1, 3600)
    await limiter.acquire("api")
    tasks = [asyncio.create_task(limiter.acquire("api")) for _ in range(5)]
    await settle()
    await (limiter.close() if end == "close" else limiter.set_capacity("api", 0, 0))
    for task in tasks:
        with pytest.raises(error):
            await task
    assert clock.now() == START


async def test_a_cancelled_task_takes_nothing(clock):
    async with AsyncMemoryLimiter(clock=clock) as limiter:
        await limiter.set_capacity("api", 1, 3600)
        await limiter.acquire("api")
        first, second = (asyncio.create_task(limiter.acquire("api")) for _ in range(2))
        await settle()
        first.cancel()
        await settle()
        await limiter.release("api")
        assert await second
        assert await limiter.get_capacity("api") == Capacity("api", 0, 1, 3600.0, 1)


def test_a_bucket_does_not_refill_during_a_freeze(face, limiter, clock):
    """Otherwise all agents of a swarm would start with full buckets when it ends."""
    face.run(limiter.set_capacity("api", 100, 60))
    for _ in range(100):
        face.run(limiter.acquire("api"))
    face.run(limiter.announce_reduced("api", "429", retry_after=12))
    face.run(limiter.announce_reduced("api", "429", retry_after=30))
    clock.advance(30)
    assert face.run(limiter.get_capacity("api")).available == 0
    clock.advance(60)
    capacity = face.run(limiter.get_capacity("api"))
    assert capacity.available == capacity.total


def test_a_bucket_refills_at_once_when_a_freeze_is_ended(face, limiter, clock):
    face.run(limiter.set_capacity("api", 100, 60))
    for _ in range(60):
        face.run(limiter.acquire("api"))
    face.run(limiter.announce_reduced("api", "429", retry_after=3600))
    face.run(limiter.set_capacity("api", 100, 60))
    assert face.run(limiter.get_capacity("api")).available == 40
    clock.advance(30)
    assert face.run(limiter.get_capacity("api")).available == 90


def test_permits_that_were_free_before_a_freeze_are_free_after_it(face, limiter, clock):
    face.run(limiter.set_capacity("api", 100, "1d"))
    face.run(limiter.announce_reduced("api", "429", retry_after=1))
    clock.advance(1)
    assert face.run(limiter.get_capacity("api")).available == 75


def test_an_agent_that_waits_longer_than_a_freeze_loses_nothing(face, limiter, clock):
    """Its next permit is due after 80 seconds at the reduced rate, with and without a stop of 30 seconds."""
    face.run(limiter.set_capacity("api", 4, 240))
    for _ in range(4):
        face.run(limiter.acquire("api"))
    face.run(limiter.announce_reduced("api", "429", retry_after=30))
    clock.advance(79.9)
    assert face.run(limiter.get_capacity("api")).available == 0
    clock.advance(0.2)
    assert face.run(limiter.get_capacity("api")).available == 1
