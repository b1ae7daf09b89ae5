"""Servers that are killed, restarted, frozen or down: what errors say, how long calls take, and what was charged."""

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tidegate import Limit, Policy, StoreUnavailable
from tidegate._runtime.flow import run
from tidegate.errors import Closed
from tidegate.stores import open_store as open_url
from tidegate.stores._postgres import PostgresStore
from tidegate.stores._postgres.call import APPLY, StoreCall
from tidegate.stores._postgres.connection import Connection
from tidegate.stores._postgres.io_flow import SYSTEM_CLOCK, Caller, perform

TEN = Policy("p", (Limit(10, "1d", "fixed_window"), Limit(10, "1d", "sliding_log", name="log")))
ONE = (1, 1)


@pytest.fixture
def store(own_server, schema):
    store = PostgresStore(own_server.url, schema=schema, timeout=10, connect_timeout=10)
    yield store
    store.close()


def remaining(store):
    return store.apply_one("peek", TEN, "k", (0, 0)).remaining


class LockedKey:
    """Holds the lock of a key, like a call that does not end."""

    def __init__(self, url, schema, key="k"):
        self.connection = psycopg.connect(url)
        self.connection.execute("select pg_advisory_xact_lock(hashtextextended(%s, hashtextextended('p', 0)))", (key,))

    def wait_for_waiter(self):
        query = "select count(*) from pg_locks where locktype = 'advisory' and not granted"
        while self.connection.execute(query).fetchone() == (0,):
            pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.connection.close()


def test_charges_survive_a_killed_server(own_server, store):
    for _ in range(5):
        assert store.apply_one("acquire", TEN, "k", ONE)
    own_server.kill()
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match=r"could not connect: .*Connection refused.*; start the server"):
            store.apply_one("acquire", TEN, "k", ONE)
    own_server.start()
    assert remaining(store) == 5


def test_a_call_in_progress_when_the_server_restarts_is_charged_only_if_answered(own_server, store):
    assert store.apply_one("acquire", TEN, "k", ONE)
    with LockedKey(own_server.url, store.schema.name) as locked_key, ThreadPoolExecutor(1) as thread:
        call = thread.submit(store.apply_one, "acquire", TEN, "k", ONE)
        locked_key.wait_for_waiter()
        own_server.restart()
        # A server that stops ends sessions in any order: the call may finish before its session ends.
        error = call.exception()
        assert error is None or (isinstance(error, StoreUnavailable) and "could not acquire" in str(error))
    assert remaining(store) == (9 if error else 8)


def test_a_server_killed_during_a_call_charges_nothing(own_server, store):
    assert store.apply_one("acquire", TEN, "k", ONE)
    with LockedKey(own_server.url, store.schema.name) as locked_key, ThreadPoolExecutor(1) as thread:
        call = thread.submit(store.apply_one, "acquire", TEN, "k", ONE)
        locked_key.wait_for_waiter()
        own_server.kill()
        with pytest.raises(StoreUnavailable, match=r"could not acquire: .*closed the connection"):
            call.result()
    own_server.start()
    assert remaining(store) == 9


def test_a_frozen_server_takes_no_longer_than_the_timeout(own_server, store):
    assert remaining(store) == 10
    slow_store, store = store, PostgresStore(own_server.url, schema=store.schema.name, timeout=0.3, connect_timeout=0.3)
    assert store.apply_one("acquire", TEN, "k", ONE)
    own_server.freeze()
    for what in ("acquire", "connect"):  # over the open connection, then over a new one
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match=f"could not {what} in time: .*hangs"):
            store.apply_one("acquire", TEN, "k", ONE)
        assert 0.25 < time.monotonic() - began < 2
    own_server.thaw()
    store.close()
    assert remaining(slow_store) in (8, 9)  # the call that was sent may have been charged


def test_a_call_that_waits_too_long_for_its_key_is_cancelled_by_the_server(server, schema, open_store):
    store = open_store(timeout=0.2)
    assert store.apply_one("acquire", TEN, "k", ONE)
    with LockedKey(server.url, schema):
        with pytest.raises(StoreUnavailable, match=r"acquire.*(raise timeout|statement timeout)"):
            store.apply_one("acquire", TEN, "k", ONE)
        assert store.apply_one("acquire", TEN, "other", ONE)  # other keys are not blocked
    assert remaining(open_store()) == 9


def test_idle_connections_that_were_closed_are_replaced(open_store, sql):
    store = open_store()
    assert store.apply_one("acquire", TEN, "k", ONE)
    sql("select pg_terminate_backend(pid, 5000) from pg_stat_activity where application_name = 'tidegate'")
    assert store.apply_one("acquire", TEN, "k", ONE)
    assert remaining(store) == 8


def test_no_connection_becomes_free_in_time(open_store):
    store = open_store(pool_size=1, timeout=0.2)
    assert store.apply_one("acquire", TEN, "k", ONE)
    caller = Caller()
    assert run(store._pool.acquire_flow(StoreCall("peek", ()), caller), perform) is not None  # noqa: SLF001 - as a call would
    with pytest.raises(StoreUnavailable, match=r"none of the 1 connections .* pool_size"):
        store.apply_one("acquire", TEN, "k", ONE)
    store._pool.release(caller)  # noqa: SLF001 - as a call would
    assert store.apply_one("acquire", TEN, "k", ONE)
    assert store.metrics().items() >= {"connections": 1, "idle": 1, "waiting": 0}.items()


def test_a_connection_that_is_reset_while_it_is_prepared_is_an_outage(open_store):
    store = open_store()
    connection, until = Connection(store.target, None), SYSTEM_CLOCK.steady() + 10_000_000
    run(connection.connect_flow(until), perform)
    with socket.socket(fileno=os.dup(connection.pgconn.socket)) as copy:
        copy.shutdown(socket.SHUT_RDWR)
    with pytest.raises(StoreUnavailable, match="could not prepare"):
        run(connection.prepare_flow(APPLY, until), perform)
    connection.close()


def test_threads_share_a_small_pool_fairly(open_store):
    store = open_store(pool_size=2)
    start = threading.Barrier(8)

    def call_repeatedly(thread):
        start.wait()
        return [store.apply_one("acquire", TEN, f"k{thread}", ONE).allowed for _ in range(10)]

    with ThreadPoolExecutor(8) as threads:
        assert all(all(calls) for calls in threads.map(call_repeatedly, range(8)))
    assert store.metrics()["connections"] <= 2


def test_a_closed_store_raises_closed(open_store, sql):
    store = open_store()
    assert store.apply_one("acquire", TEN, "k", ONE)
    store.close()
    with pytest.raises(Closed):
        store.apply_one("acquire", TEN, "k", ONE)
    while sql("select count(*) from pg_stat_activity where application_name = 'tidegate'").fetchone() != (0,):
        pass  # the server needs a moment to end the session


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("tide:", "nobody:"), "authentication failed.*; check the user and password"),
        (("{password}", "wrong"), "authentication failed.*; check the user and password"),
        (("/postgres", "/missing"), '"missing" does not exist; create the database'),
        (("{port}", "1"), "Connection refused.*; start the server, or check the host and port"),
        (("127.0.0.1", "no-such-host.invalid"), "translate host name.*; check the host"),
    ],
    ids=["user", "password", "database", "port", "host"],
)
def test_connection_errors_say_what_is_wrong_with_the_url(server, change, message):
    old, new = (part.format(password=server.password, port=server.port) for part in change)
    store = open_url(f"{server.url.replace(old, new)}?connect_timeout=10")
    with pytest.raises(StoreUnavailable, match=message) as raised:
        store.apply_one("acquire", TEN, "k", ONE)
    assert server.password not in str(raised.value)
    assert raised.value.__cause__ is None


def test_a_read_only_server(server, schema, open_store, sql):
    open_store().apply_one("acquire", TEN, "k", ONE)
    sql("alter role tide set default_transaction_read_only = on")
    try:
        with pytest.raises(StoreUnavailable, match="target_session_attrs=read-write"):
            PostgresStore(server.url, schema=schema).apply_one("acquire", TEN, "k", ONE)
    finally:
        sql("alter role tide reset default_transaction_read_only")
