"""A server is lost when it is silent, not when calls wait for a connection or a key, nor when this process stops."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.servers.process import until
from tidegate import AsyncLimiter, Limit, Limiter, Policy
from tidegate.core.decision import LocalDecision
from tidegate.stores.outage import open_guarded
from tidegate.stores.postgres import PostgresStore

TEN = Policy("p", (Limit(1000, "1d", "fixed_window"),))
WAITERS = "select count(*) from pg_locks where locktype = 'advisory' and not granted"


class Held:
    """Holds the lock of a key, as a call that does not end would."""

    def __init__(self, url, schema, key="k"):
        self.connection = psycopg.connect(url)
        self.connection.execute(f"select pg_advisory_xact_lock(\"{schema}\".hash('p', %s))", (key,))

    def until_somebody_waits(self):
        until(lambda: self.connection.execute(WAITERS).fetchone() != (0,), "a call that waits for the key")

    def let_go(self):
        self.connection.close()


@pytest.fixture
def guard(server, schema, sql):
    """Guard a store as a URL opens it: one connection, a deadline that is soon over, time enough for a call."""
    guard = open_guarded(f"{server.url}?schema={schema}&pool_size=1&deadline=100ms&timeout=20&connect_timeout=20")
    assert guard.apply_one("acquire", TEN, "k", (1,))
    yield guard
    guard.close()
    sql(f'drop schema if exists "{schema}" cascade')


def test_threads_that_wait_for_a_connection_or_a_key_do_not_lose_the_server(server, schema, guard):
    with Limiter(TEN, store=guard) as limiter, ThreadPoolExecutor(40) as threads:
        held = Held(server.url, schema)
        calls = [threads.submit(limiter.try_acquire, "k" if n == 0 else f"other{n}") for n in range(40)]
        held.until_somebody_waits()
        time.sleep(0.5)  # five deadlines: the one connection is in use, the server says nothing of the call
        assert not any(call.done() and isinstance(call.result(), LocalDecision) for call in calls)
        held.let_go()
        assert all(type(call.result()) is not LocalDecision and call.result() for call in calls)
    assert guard.metrics()["losses"] == 0


async def test_tasks_that_wait_for_a_connection_or_a_key_do_not_lose_the_server(server, schema, guard):
    limiter = AsyncLimiter(TEN, store=guard)
    held = Held(server.url, schema)
    calls = [asyncio.ensure_future(limiter.try_acquire("k" if n == 0 else f"other{n}")) for n in range(40)]
    await asyncio.to_thread(held.until_somebody_waits)
    await asyncio.sleep(0.5)  # as above
    assert not any(call.done() for call in calls)
    held.let_go()
    assert all(type(answer) is not LocalDecision and answer for answer in await asyncio.gather(*calls))
    assert guard.metrics()["losses"] == 0


async def test_a_loop_that_stands_still_is_not_the_servers_silence(guard):
    limiter = AsyncLimiter(TEN, store=guard)
    for turns in range(6):
        call = asyncio.ensure_future(limiter.try_acquire("k"))
        for _ in range(turns):
            await asyncio.sleep(0)
        time.sleep(0.3)  # noqa: ASYNC251 - this is what is tested: three deadlines
        assert type(await call) is not LocalDecision
    assert guard.metrics()["losses"] == 0


@pytest.mark.parametrize("tasks", [False, True], ids=["threads", "tasks"])
def test_a_frozen_server_is_lost_after_its_silence(own_server, schema, tasks):
    guard = open_guarded(f"{own_server.url}?schema={schema}&deadline=200ms&timeout=20&connect_timeout=2")
    with asyncio.Runner() as runner:

        def ask():
            asks = ((TEN, "k", (1,)),)
            return (runner.run(guard.apply_async("acquire", asks)) if tasks else guard.apply("acquire", asks))[0]

        until(lambda: type(ask()) is not LocalDecision, "an answer by the server")
        own_server.freeze()
        began = time.monotonic()
        assert isinstance(ask(), LocalDecision)
        assert time.monotonic() - began < 1.9  # its silence, and five times that to connect for a sign of life
        assert guard.metrics()["losses"] == 1
        own_server.thaw()
        until(lambda: not guard.metrics()["store_lost"], "the return of the server")
        if tasks:
            runner.run(guard.close_async())
        else:
            guard.close()


def test_a_connection_that_cannot_be_opened_fails_all_who_wait_for_one(own_server, schema):
    store = PostgresStore(own_server.url, schema=schema, pool_size=1, timeout=20, connect_timeout=1)
    own_server.freeze()
    ready, errors = threading.Barrier(6), []

    def ask():
        ready.wait()
        try:
            store.apply_one("acquire", TEN, "k", (1,))
        except Exception as error:  # noqa: BLE001 - looked at below
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
