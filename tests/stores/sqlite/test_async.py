"""The async form: the event loop is never blocked, calls share transactions, cancelled calls are not charged."""

import asyncio
import sqlite3

import pytest

from tidegate import AsyncLimiter
from tidegate._policy import Policy
from tidegate.core._limit import Limit
from tidegate.errors import Closed, ConfigError, StoreUnavailable
from tidegate.stores._sqlite import SQLiteStore

KINDS = ("token_bucket", "fixed_window", "sliding_window", "sliding_log", "concurrency")
POLICY = Policy("api", tuple(Limit(100, "52w", kind, name=kind) for kind in KINDS))
ONE = (1,) * len(KINDS)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "limits.db"


@pytest.fixture
async def store(path):
    store = SQLiteStore(path, busy_timeout="60s")
    await store.apply_async("acquire", [(POLICY, "other", ONE)])
    yield store
    await store.close_async()


@pytest.fixture
def lock(path):
    db = sqlite3.connect(path, isolation_level=None)
    yield db
    db.close()


async def apply(store, verb="acquire"):
    return (await store.apply_async(verb, [(POLICY, "k", ONE)]))[0]


async def wait_until_locked(store):
    """Run the loop until the store's thread has found the file locked; returns the number of iterations."""
    before = store.metrics()["waits"]
    for iteration in range(1_000_000):
        await asyncio.sleep(0)
        if store.metrics()["waits"] > before:
            return iteration
    raise AssertionError("the store never found the file locked")


async def remaining(store):
    decision = await store.apply_async("peek", [(POLICY, "k", (0,) * len(KINDS))])
    return {view[0] for view in decision[0].views}


async def test_the_loop_runs_while_the_file_is_locked(store, lock):
    lock.execute("BEGIN IMMEDIATE")
    task = asyncio.create_task(apply(store))
    assert await wait_until_locked(store) > 0
    for _ in range(100):
        await asyncio.sleep(0)
    assert not task.done()
    lock.execute("ROLLBACK")
    assert await task
    assert await remaining(store) == {99}


async def test_many_tasks_share_transactions_and_get_exactly_the_quota(store):
    before = store.metrics()["transactions"]
    decisions = await asyncio.gather(*(apply(store) for _ in range(300)))
    assert sum(map(bool, decisions)) == 100
    assert store.metrics()["transactions"] - before < 100


@pytest.mark.parametrize("verb", ["acquire", "hold"])
async def test_a_call_cancelled_while_it_is_decided_is_given_back(store, lock, verb):
    lock.execute("BEGIN IMMEDIATE")
    task = asyncio.create_task(apply(store, verb))
    await wait_until_locked(store)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    lock.execute("ROLLBACK")
    # Calls are applied in order: the peek comes after the cancelled call, and its correction before the next call.
    await apply(store, "peek")
    assert await remaining(store) == {100}


async def cancel_queued(store, lock, first, second):
    """Start a call that finds the file locked, and a second one behind it; cancel the second, and unlock the file."""
    decided = asyncio.create_task(first)
    await wait_until_locked(store)
    cancelled = asyncio.create_task(second)
    await asyncio.sleep(0)
    cancelled.cancel()
    lock.execute("ROLLBACK")
    assert await decided
    with pytest.raises(asyncio.CancelledError):
        await cancelled


async def test_a_call_cancelled_before_it_is_decided_is_never_charged(store, lock):
    lock.execute("BEGIN IMMEDIATE")
    await cancel_queued(store, lock, apply(store), apply(store))
    assert await remaining(store) == {99}


async def test_a_correction_is_made_although_its_task_is_cancelled(store, lock):
    decision = await apply(store, "hold")
    lock.execute("BEGIN IMMEDIATE")
    back = [(POLICY, "k", (-1,) * len(KINDS))]
    correction = store.apply_async("adjust", back, None, decision.at)
    await cancel_queued(store, lock, store.apply_async("acquire", [(POLICY, "other", ONE)]), correction)
    assert await remaining(store) == {100}


async def wait_for_delivery(task):
    """Wait until the loop is about to deliver the decision; returns False if it was delivered before."""
    ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]  # noqa: SLF001 - the only way to find that moment
    while not task.done():
        if any("Worker._deliver" in repr(handle) for handle in list(ready)):  # a copy: threads add to it
            return True
        await asyncio.sleep(0)
    return False


async def test_a_call_cancelled_at_the_moment_of_delivery_is_given_back(store):
    cancelled = 0
    while cancelled < 50:
        task = asyncio.create_task(apply(store))
        if await wait_for_delivery(task):
            cancelled += 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await apply(store, "reset")
    await apply(store, "peek")
    assert await remaining(store) == {100}


def test_a_call_whose_loop_ends_before_its_decision_is_given_back(path):
    store = SQLiteStore(path, busy_timeout="60s")
    store.apply_one("acquire", POLICY, "other", ONE)
    lock = sqlite3.connect(path, isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")

    async def start_call():
        asyncio.get_running_loop().create_task(apply(store)).add_done_callback(lambda _: None)
        await wait_until_locked(store)

    asyncio.run(start_call())
    lock.execute("ROLLBACK")
    lock.close()
    store.close()
    after = SQLiteStore(path)
    assert {view[0] for view in after.apply_one("peek", POLICY, "k", (0,) * len(KINDS)).views} == {100}
    after.close()


async def test_errors_reach_every_caller(tmp_path):
    store = SQLiteStore(tmp_path / "nowhere" / "limits.db")
    results = await asyncio.gather(*(apply(store) for _ in range(5)), return_exceptions=True)
    assert [type(result) for result in results] == [StoreUnavailable] * 5
    await store.close_async()
    with pytest.raises(Closed):
        await apply(store)


async def test_an_async_limiter_uses_the_store(path):
    async with AsyncLimiter("3/52w", store=SQLiteStore(path)) as limiter:
        assert [bool(await limiter.try_acquire("k")) for _ in range(4)] == [True, True, True, False]
        async with limiter.reserve("r", 2) as reservation:
            await reservation.commit(1)
        assert (await limiter.peek("r", 0)).remaining == 2
        await limiter.store.close_async()


async def test_a_call_that_is_refused_does_not_fail_those_that_are_queued_with_it(store):
    """Found in a review: all calls of the transaction raised the error."""
    other = Policy("api", (Limit(7, "1w", "fixed_window", name=KINDS[1]),))
    twice = [(POLICY, "k", ONE), (other, "k", (1,))]
    before = store.metrics()["transactions"]
    calls = [apply(store), apply(store), store.apply_async("acquire", twice), apply(store)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert store.metrics()["transactions"] - before < 4
    assert isinstance(answers[2], ConfigError)
    assert [bool(answer) for answer in answers[:2] + answers[3:]] == [True] * 3
    assert await remaining(store) == {97}
