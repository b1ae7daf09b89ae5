"""Outages start when the server is silent, not when calls wait for a connection or key or this process is blocked."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.servers.process import until
from tests.stores.postgres.conftest import drop_schemas
from tidegate import AsyncLimiter, Limit, Limiter, Policy
from tidegate.core._decision import LocalDecision
from tidegate.stores._outage import open_guarded
from tidegate.stores._postgres import PostgresStore

TEN = Policy("p", (Limit(1000, "1d", "fixed_window"),))
WAITERS = "select count(*) from pg_locks where locktype = 'advisory' and not granted"


class LockedKey:
    """Holds the lock of a key, like a call that does not end."""

    def __init__(self, url, schema, key="k"):
        self.connection = psycopg.connect(url)
        self.connection.execute("select pg_advisory_xact_lock(hashtextextended(%s, hashtextextended('p', 0)))", (key,))

    def wait_for_waiter(self):
        until(lambda: self.connection.execute(WAITERS).fetchone() != (0,), "a call that waits for the key")

    def unlock(self):
        self.connection.close()


@pytest.fixture
def guarded(server, schema, sql):
    """Open a guarded store with one connection, a short deadline and a long timeout."""
    guarded = open_guarded(f"{server.url}?schema={schema}&pool_size=1&deadline=100ms&timeout=20&connect_timeout=20")
    assert guarded.apply_one("acquire", TEN, "k", (1,))
    yield guarded
    guarded.close()
    drop_schemas(sql, schema)


def test_threads_that_wait_for_a_connection_or_a_key_start_no_outage(server, schema, guarded):
    with Limiter(TEN, store=guarded) as limiter, ThreadPoolExecutor(40) as threads:
        locked_key = LockedKey(server.url, schema)
        calls = [threads.submit(limiter.try_acquire, "k" if n == 0 else f"other{n}") for n in range(40)]
        locked_key.wait_for_waiter()
        time.sleep(0.5)  # five deadlines: the only connection is in use and silent
        assert not any(call.done() and isinstance(call.result(), LocalDecision) for call in calls)
        locked_key.unlock()
        assert all(type(call.result()) is not LocalDecision and call.result() for call in calls)
    assert guarded.metrics()["losses"] == 0


async def test_tasks_that_wait_for_a_connection_or_a_key_start_no_outage(server, schema, guarded):
    limiter = AsyncLimiter(TEN, store=guarded)
    locked_key = LockedKey(server.url, schema)
    calls = [asyncio.ensure_future(limiter.try_acquire("k" if n == 0 else f"other{n}")) for n in range(40)]
    await asyncio.to_thread(locked_key.wait_for_waiter)
    await asyncio.sleep(0.5)  # as above
    assert not any(call.done() for call in calls)
    locked_key.unlock()
    assert all(type(answer) is not LocalDecision and answer for answer in await asyncio.gather(*calls))
    assert guarded.metrics()["losses"] == 0


async def test_a_blocked_event_loop_starts_no_outage(guarded):
    limiter = AsyncLimiter(TEN, store=guarded)
    for iterations in range(6):
        call = asyncio.ensure_future(limiter.try_acquire("k"))
        for _ in range(iterations):
            await asyncio.sleep(0)
        time.sleep(0.3)  # noqa: ASYNC251 - blocks the loop for three deadlines
        assert type(await call) is not LocalDecision
    assert guarded.metrics()["losses"] == 0


@pytest.mark.parametrize("tasks", [False, True], ids=["threads", "tasks"])
def test_a_frozen_server_starts_an_outage_after_the_deadline(own_server, schema, tasks):
    guarded = open_guarded(f"{own_server.url}?schema={schema}&deadline=200ms&timeout=20&connect_timeout=2")
    with asyncio.Runner() as runner:

        def ask():
            asks = ((TEN, "k", (1,)),)
            return (runner.run(guarded.apply_async("acquire", asks)) if tasks else guarded.apply("acquire", asks))[0]

        until(lambda: type(ask()) is not LocalDecision, "an answer by the server")
        own_server.freeze()
        began = time.monotonic()
        assert isinstance(ask(), LocalDecision)
        assert time.monotonic() - began < 1.9  # the deadline, and five times that to connect for the heartbeat
        assert guarded.metrics()["losses"] == 1
        own_server.thaw()
        until(lambda: not guarded.metrics()["store_lost"], "the end of the outage")
        if tasks:
            runner.run(guarded.close_async())
        else:
            guarded.close()


def test_a_connection_that_cannot_be_opened_fails_all_waiting_calls(own_server, schema):
    store = PostgresStore(own_server.url, schema=schema, pool_size=1, timeout=20, connect_timeout=1)
    own_server.freeze()
    ready, errors = threading.Barrier(6), []

    def ask():
        ready.wait()
        try:
            store.apply_one("acquire", TEN, "k", (1,))
        except Exception as error:  # noqa: BLE001 - checked below
            errors.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began < 4  # not a second for each of them
    assert len(errors) == 6
    assert all("connect" in error for error in errors)
    own_server.thaw()
    store.close()
