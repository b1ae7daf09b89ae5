"""Tasks: several event loops share a store, and the charge of a cancelled task is given back."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.stores.postgres.comparison import use_core
from tidegate import AsyncLimiter, Limit, Policy, StoreUnavailable
from tidegate.stores._postgres import PostgresStore
from tidegate.stores._postgres.io_flow import RunBlocking, TaskCaller

LIMITS = tuple(
    Limit(10, "1d", algorithm, name=algorithm)
    for algorithm in ("token_bucket", "fixed_window", "sliding_window", "sliding_log", "concurrency")
)
ALL = Policy("p", LIMITS)
ONE = (1,) * len(LIMITS)
WRONG_CORE = """
create function apply(text[], int[], text[], text[], int[], limit_t[], bigint[], bigint[], bigint[], int)
    returns bigint[] language sql as $$ select array[1 / 0]::bigint[] $$;"""


@pytest.fixture
async def locked_key(server, schema, open_store):
    """Lock a key; return a function that waits until a call waits for it, and one that unlocks it."""
    assert (await open_store().apply_async("acquire", [(ALL, "k", ONE)]))[0]
    async with await psycopg.AsyncConnection.connect(server.url) as connection:
        await connection.execute("select pg_advisory_xact_lock(hashtextextended('k', hashtextextended('p', 0)))")

        async def wait_for_waiter():
            query = "select count(*) from pg_locks where locktype = 'advisory' and not granted"
            while await (await connection.execute(query)).fetchone() == (0,):
                pass

        yield wait_for_waiter, connection.rollback


def remaining(store, key="k"):
    return [view[0] for view in store.apply_one("peek", ALL, key, (0,) * len(LIMITS)).views]


async def wait_for_refunds(store):
    """Wait until the store has given back the charges of cancelled tasks."""
    async with asyncio.timeout(20):
        while store._background:  # noqa: SLF001 - not needed outside tests
            await asyncio.sleep(0)


@pytest.mark.parametrize("verb", ["acquire", "hold"])
async def test_a_cancelled_task_ends_at_once_and_leaves_no_charge(open_store, locked_key, verb):
    wait_for_waiter, unlock = locked_key
    store = open_store()
    before = [9] * len(LIMITS)
    task = asyncio.create_task(store.apply_async(verb, [(ALL, "k", ONE)]))
    await wait_for_waiter()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task  # while the call still waits for its key
    await unlock()
    await wait_for_refunds(store)
    assert remaining(store) == before
    connections = {"connections": 1, "idle": 1, "waiting": 0}
    given = 1 if verb == "hold" else 2  # buckets separately, unless they are marked
    assert store.metrics() == {**connections, "refunded": given, "refunds_failed": 0}


def test_calls_cancelled_with_their_loop_are_given_back_before_the_loop_ends(open_store, server, schema):
    store = open_store()
    store.apply_one("acquire", ALL, "k", ONE)
    waiters = "select count(*) from pg_locks where locktype = 'advisory' and not granted"
    with psycopg.connect(server.url) as connection:
        connection.execute("select pg_advisory_xact_lock(hashtextextended('k', hashtextextended('p', 0)))")

        async def main():
            task = asyncio.create_task(store.apply_async("acquire", [(ALL, "k", ONE)]))
            while connection.execute(waiters).fetchone() == (0,):
                await asyncio.sleep(0)
            task.add_done_callback(lambda _: connection.rollback())  # unlocks the key when the loop ends

        asyncio.run(main())
    assert remaining(store) == [9] * len(LIMITS)


async def test_closing_waits_for_refunds(open_store, locked_key):
    wait_for_waiter, unlock = locked_key
    store, other = open_store(), open_store()
    task = asyncio.create_task(store.apply_async("acquire", [(ALL, "k", ONE)]))
    await wait_for_waiter()
    task.cancel()
    closing = asyncio.create_task(store.close_async())
    await asyncio.sleep(0)
    await unlock()
    await closing
    assert remaining(other) == [9] * len(LIMITS)


async def test_a_release_cancelled_while_it_waits_for_a_connection_is_carried_out(open_store, locked_key):
    wait_for_waiter, unlock = locked_key
    store = open_store(pool_size=1)
    first = asyncio.create_task(store.apply_async("acquire", [(ALL, "k", ONE)]))
    await wait_for_waiter()
    back = [(ALL, "k", tuple(-c for c in ONE))]
    release = asyncio.create_task(store.apply_async("adjust", back))
    while store.metrics()["waiting"] < 1:
        await asyncio.sleep(0)
    release.cancel()
    with pytest.raises(asyncio.CancelledError):
        await release
    await unlock()
    assert (await first)[0]
    await wait_for_refunds(store)
    assert remaining(store) == [9] * len(LIMITS)


async def test_a_task_cancelled_while_it_waits_for_a_connection_ends_at_once(open_store, locked_key):
    wait_for_waiter, unlock = locked_key
    store = open_store(pool_size=1)
    first = asyncio.create_task(store.apply_async("acquire", [(ALL, "k", ONE)]))
    await wait_for_waiter()
    second = asyncio.create_task(store.apply_async("acquire", [(ALL, "k", ONE)]))
    third = asyncio.create_task(store.apply_async("acquire", [(ALL, "k", ONE)]))
    while store.metrics()["waiting"] < 2:
        await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    await unlock()
    assert (await first)[0]
    assert (await third)[0]
    assert remaining(store) == [7] * len(LIMITS)


async def start_calls(store, wait_for_waiter, count):
    """Start a call, and others that wait for its connection."""
    first = asyncio.create_task(store.apply_async("acquire", [(ALL, "k", ONE)]))
    await wait_for_waiter()
    others = [asyncio.create_task(store.apply_async("acquire", [(ALL, f"other{n}", ONE)])) for n in range(count)]
    while store.metrics()["waiting"] < count:
        await asyncio.sleep(0)
    return first, others


async def test_waiting_calls_share_a_transaction(open_store, locked_key, sql):
    wait_for_waiter, unlock = locked_key
    store = open_store(pool_size=1)
    first, others = await start_calls(store, wait_for_waiter, 20)
    await unlock()
    assert all(decisions[0].allowed for decisions in await asyncio.gather(first, *others))
    assert sql("select count(distinct xmin::text), count(*) from tidegate.keys where key <> 'k'").fetchone() == (1, 20)


async def test_calls_of_one_iteration_share_a_transaction_while_connections_are_free(open_store, sql):
    store = open_store()
    await store.apply_async("peek", [(ALL, "k", ONE)])
    calls = (store.apply_async("acquire", [(ALL, f"k{n}", ONE)]) for n in range(20))
    assert all(decisions[0].allowed for decisions in await asyncio.gather(*calls))
    assert sql("select count(distinct xmin::text), count(*) from tidegate.keys").fetchone() == (1, 20)


async def test_calls_are_sent_though_the_task_that_would_send_them_is_cancelled(open_store):
    store = open_store()
    await store.apply_async("peek", [(ALL, "k", ONE)])
    first, *others = [asyncio.create_task(store.apply_async("acquire", [(ALL, f"k{n}", ONE)])) for n in range(20)]
    await asyncio.sleep(0)
    first.cancel()
    assert all([(await other)[0].allowed for other in others])
    with pytest.raises(asyncio.CancelledError):
        await first
    await wait_for_refunds(store)
    assert (remaining(store, "k0"), remaining(store, "k1")) == ([10] * len(LIMITS), [9] * len(LIMITS))


async def test_a_cancelled_task_whose_call_another_task_sent_leaves_no_charge(open_store, locked_key, server, schema):
    wait_for_waiter, unlock = locked_key
    store = open_store(pool_size=1)
    first, others = await start_calls(store, wait_for_waiter, 3)
    async with await psycopg.AsyncConnection.connect(server.url) as connection:
        await connection.execute("select pg_advisory_xact_lock(hashtextextended('other2', hashtextextended('p', 0)))")
        await unlock()
        assert (await first)[0]
        await wait_for_waiter()  # the other three are in flight
        others[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await others[1]
    assert [(await other)[0].allowed for other in (others[0], others[2])] == [True, True]
    await wait_for_refunds(store)
    assert [remaining(store, f"other{n}")[0] for n in range(3)] == [9, 10, 9]


async def test_calls_of_one_statement_fail_together(open_store, locked_key, sql):
    wait_for_waiter, unlock = locked_key
    store = open_store(pool_size=1)
    first, others = await start_calls(store, wait_for_waiter, 3)
    use_core(store, WRONG_CORE)
    sql("select pg_terminate_backend(pid, 5000) from pg_stat_activity where application_name = 'tidegate'")
    for task in (first, *others):  # the first was in flight; a new connection serves the others with a wrong function
        with pytest.raises(StoreUnavailable):
            await task
    await unlock()


async def test_a_timeout_around_a_call_leaves_no_charge(open_store, locked_key):
    wait_for_waiter, unlock = locked_key
    limiter = AsyncLimiter(ALL, store=open_store())

    async def release():
        await wait_for_waiter()
        await asyncio.sleep(0.05)  # longer than the timeout below
        await unlock()

    releasing = asyncio.create_task(release())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await limiter.try_acquire("k")
    await releasing
    await wait_for_refunds(limiter.store)
    assert remaining(limiter.store) == [9] * len(LIMITS)


async def test_a_denied_call_that_was_cancelled_gives_nothing_back(open_store, locked_key):
    wait_for_waiter, unlock = locked_key
    store = open_store()
    task = asyncio.create_task(store.apply_async("acquire", [(ALL, "k", (10,) * len(LIMITS))]))
    await wait_for_waiter()
    task.cancel()
    await unlock()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_for_refunds(store)
    assert remaining(store) == [9] * len(LIMITS)


def test_several_event_loops_and_threads_share_a_store(open_store):
    store = open_store(pool_size=3)
    policy = Policy("shared", (Limit(100, "1d", "fixed_window"),))

    async def tasks():
        calls = (store.apply_async("acquire", [(policy, "k", (1,))]) for _ in range(30))
        return sum(decisions[0].allowed for decisions in await asyncio.gather(*calls))

    def plain():
        return sum(store.apply_one("acquire", policy, "k", (1,)).allowed for _ in range(30))

    with ThreadPoolExecutor(5) as threads:
        loops = [threads.submit(asyncio.run, tasks()) for _ in range(3)]
        others = [threads.submit(plain) for _ in range(2)]
        assert sum(done.result() for done in loops + others) == 100


async def test_a_frozen_server_does_not_block_the_loop(own_server, schema):
    store = PostgresStore(own_server.url, schema=schema, timeout=0.3, connect_timeout=0.3)
    assert (await store.apply_async("acquire", [(ALL, "k", ONE)]))[0]
    own_server.freeze()
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticker = asyncio.create_task(tick())
    for _ in range(2):  # over the open connection, then over a new one
        with pytest.raises(StoreUnavailable, match=r"(did not respond|could not .*) in time"):
            await store.apply_async("acquire", [(ALL, "k", ONE)])
    ticker.cancel()
    own_server.thaw()
    assert ticks > 20
    await store.close_async()


async def test_limiters_wait_for_permits_by_the_servers_clock(open_store):
    async with AsyncLimiter("1/50ms fixed_window", store=open_store()) as limiter:
        assert await limiter.try_acquire("k")
        assert not await limiter.try_acquire("k")
        assert await limiter.acquire("k", timeout=5)


@pytest.mark.parametrize("failure", [OSError("no address"), SystemExit()])
async def test_what_a_step_raises_is_raised_in_the_flow(failure):
    def fail():
        raise failure

    def flow():
        try:
            yield RunBlocking(fail)
        except (OSError, SystemExit) as error:
            return error, (yield RunBlocking(lambda: "after"))

    assert await TaskCaller().run(flow()).result == (failure, "after")


async def test_a_run_goes_on_after_the_cancellation_of_the_task_that_waits_for_it():
    begun, ending = threading.Event(), threading.Event()

    def block():
        assert not begun.is_set(), "the step is executed once"
        begun.set()
        ending.wait(10)
        return "answer"

    def flow():
        return (yield RunBlocking(block))

    run = TaskCaller().run(flow())
    task = asyncio.ensure_future(asyncio.wait_for(run.result, None))
    await asyncio.to_thread(begun.wait, 10)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    result = run.detach()
    ending.set()
    assert await result == "answer"
