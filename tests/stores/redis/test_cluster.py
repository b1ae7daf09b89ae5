"""A cluster: calls go to the server of their keys, keys of one call share a slot, and fail-overs are handled."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import nullcontext, suppress
from itertools import cycle, islice
from typing import TYPE_CHECKING, Self

import pytest
import redis
from redis.crc import key_slot

from tests.conformance.test_batches import BATCH_GUARANTEES
from tests.servers.process import until
from tests.servers.valkey import ValkeyCluster, ValkeyServer
from tests.stores.redis.conftest import address_of
from tidegate import AsyncLimiter, ConfigError, Limit, Limiter, Policy, StoreUnavailable
from tidegate.core._decision import LocalDecision
from tidegate.stores._outage import GuardedStore
from tidegate.stores._redis import RedisStore
from tidegate.testing import random_vectors
from tidegate.testing._reference import answer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tidegate import Decision
    from tidegate.stores import Store

LIMITS = (Limit(50, "1h"), Limit(50, "1h", "sliding_log", name="log"), Limit(50, "1h", "concurrency", name="slots"))
POLICY = Policy("p", LIMITS)


@pytest.fixture(scope="module")
def cluster() -> Iterator[ValkeyCluster]:
    with ValkeyCluster() as running:
        yield running


def open_cluster(cluster: ValkeyCluster, **options: object) -> RedisStore:
    hosts = tuple(("127.0.0.1", server.port) for server in cluster.servers)
    return RedisStore(address_of(cluster.servers[0], kind="cluster", hosts=hosts, **options))


def test_random_histories_on_a_cluster(cluster: ValkeyCluster) -> None:
    store = open_cluster(cluster, hash_tag="all")
    for place, (verb, asks, now, at, answers) in enumerate(random_vectors(5, 240)):
        assert tuple(map(answer_of, store.apply(verb, asks, now, at))) == answers, f"step {place}"
    store.close()


@pytest.mark.parametrize("guarantee", BATCH_GUARANTEES, ids=lambda guarantee: guarantee.__name__)
def test_batches_on_a_cluster(cluster: ValkeyCluster, guarantee: Callable[[Store], None]) -> None:
    store = open_cluster(cluster, hash_tag="all", prefix=guarantee.__name__)
    guarantee(store)
    store.close()


async def test_concurrent_calls_to_many_slots(cluster: ValkeyCluster) -> None:
    store = open_cluster(cluster)
    calls = [store.apply_async("acquire", ((POLICY, f"k{number % 40}", (1, 1, 1)),)) for number in range(400)]
    answers = await asyncio.gather(*calls)
    assert sorted(answer[0].remaining for answer in answers) == sorted(list(range(40, 50)) * 40)
    assert store.metrics()["scripts"] <= 40 * 2  # one for each slot, and the source to each server
    await store.close_async()


def test_a_call_with_keys_in_different_slots_is_rejected(cluster: ValkeyCluster) -> None:
    asks = [(POLICY, f"k{number}", (1, 1, 1)) for number in range(10)]
    store = open_cluster(cluster)
    with pytest.raises(ConfigError, match="hash_tag=policy"):
        store.apply("acquire", asks)
    store.close()
    for tag in ("policy", "all"):
        store = open_cluster(cluster, hash_tag=tag)
        assert all(decision.allowed for decision in store.apply("acquire", asks))
        store.close()


@pytest.mark.parametrize("tasks", [False, True], ids=["threads", "tasks"])
def test_fail_over_of_a_primary(tasks: bool) -> None:
    """Over-admission: 0, since the replica is in sync; writes that were not replicated would be lost."""
    with ValkeyCluster() as cluster, asyncio.Runner() as runner:
        store = open_cluster(cluster, timeout=1.0, connect_timeout=1.0)
        keys = [f"k{number}" for number in range(30)]

        def ask(key: str) -> bool:
            asks = ((POLICY, key, (1, 1, 1)),)
            return (runner.run(store.apply_async("acquire", asks)) if tasks else store.apply("acquire", asks))[
                0
            ].allowed

        admitted = {key: sum(ask(key) for _ in range(20)) for key in keys}
        for primary, replica in zip(cluster.servers[:3], cluster.servers[3:], strict=True):
            until(
                lambda p=primary, r=replica: offset(p, b"master_repl_offset") == offset(r, b"slave_repl_offset"), "sync"
            )  # type: ignore[misc]  # bound at once
        cluster.servers[0].kill()
        start = time.monotonic()
        errors = 0
        for key in keys:
            while True:
                try:
                    admitted[key] += ask(key)
                    break
                except StoreUnavailable:
                    errors += 1
                    assert time.monotonic() - start < 15, "no replica took over"
        assert errors, "some keys were on the server that is gone"
        for key in keys:
            for _ in range(50):
                with suppress(StoreUnavailable):
                    admitted[key] += ask(key)
        assert max(admitted.values()) <= 50
        assert min(admitted.values()) > 20
        if tasks:
            runner.run(store.close_async())
        store.close()


def offset(server: object, name: bytes) -> bytes:
    info: bytes = server.ask("INFO", "replication")  # type: ignore[attr-defined]  # a ValkeyServer
    return info.split(name + b":")[1].split(b"\r")[0]


# ---- an outage of one server is not one of the others ----------------------------------------------------------------

# Two keys of the server for each key, of which a migration moves one after the other.
OUTAGE_POLICY = Policy("p", (Limit(400, "52w", "fixed_window"), Limit(400, "52w", "sliding_log", name="log")))


class ClusterLoad:
    """Calls a limiter for many keys all the time, from threads or tasks; counts what was admitted, by key."""

    def __init__(self, cluster: ValkeyCluster, *, tasks: bool) -> None:
        self.keys = [f"k{number}" for number in range(60)]
        self.admitted = dict.fromkeys(self.keys, 0)
        self.by_store = dict.fromkeys(self.keys, 0)  # calls that the store decided
        self.local = dict.fromkeys(self.keys, 0)  # calls that were decided without it
        self.slowest: dict[str, float] = dict.fromkeys(self.keys, 0.0)
        self.errors: list[Exception] = []
        self.url = f"{cluster.url}?timeout=0.5&connect_timeout=1&prefix=load"
        self._stop = threading.Event()
        workers = [self._tasks] if tasks else [self._thread] * 4
        self._limiter = Limiter(OUTAGE_POLICY, store=self.url)
        self._threads = [threading.Thread(target=work, args=(number,)) for number, work in enumerate(workers)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        until(lambda: min(self.admitted.values()) > 2, "calls for every key")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._limiter.close()
        assert not self.errors

    def _thread(self, number: int) -> None:
        for key in islice(cycle(self.keys), number * 15, None):
            began = time.monotonic()
            self._record(key, self._limiter.try_acquire(key), began)
            if self._stop.is_set():
                return

    def _tasks(self, _: int) -> None:
        async def call(limiter: AsyncLimiter, number: int) -> None:
            for key in islice(cycle(self.keys), number * 15, None):
                began = time.monotonic()
                self._record(key, await limiter.try_acquire(key), began)
                if self._stop.is_set():
                    return

        async def main() -> None:
            async with AsyncLimiter(OUTAGE_POLICY, store=self.url) as limiter:
                await asyncio.gather(*(call(limiter, number) for number in range(4)))

        try:
            asyncio.run(main())
        except Exception as error:  # noqa: BLE001 - the test fails on any exception
            self.errors.append(error)

    def _record(self, key: str, decision: Decision, began: float) -> None:
        self.admitted[key] += decision.allowed
        decided_by = self.local if isinstance(decision, LocalDecision) else self.by_store
        decided_by[key] += 1
        self.slowest[key] = max(self.slowest[key], time.monotonic() - began)

    def used(self) -> dict[str, int]:
        """Return what the store has counted, by key."""
        with Limiter(OUTAGE_POLICY, store=f"{self.url}&timeout=5") as limiter:
            return {key: next(iter(limiter.usage(key).values())).used for key in self.keys}


def keys_of(load: ClusterLoad, first: int, last: int) -> set[str]:
    return {key for key in load.keys if first <= key_slot(f"load:{{p/{key}}}".encode()) <= last}


@pytest.mark.parametrize("tasks", [False, True], ids=["threads", "tasks"])
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_keys_of_other_servers_go_on_while_one_is_lost(tasks: bool, how: str) -> None:
    """Over-admission: 0 for the keys of other servers; of the lost one, the charges that were not replicated."""
    with ValkeyCluster() as cluster:
        load = ClusterLoad(cluster, tasks=tasks)
        primary, replica = cluster.servers[0], cluster.servers[3]
        lost = keys_of(load, 0, 5461)
        others = set(load.keys) - lost
        with load, primary.frozen() if how == "frozen" else nullcontext():
            if how == "killed":
                primary.kill()
            until(lambda: min(load.local[key] for key in lost) > 0, "the outage of the lost keys")
            until(lambda: b"role:master" in replica.ask("INFO", "replication"), "the promotion", 30)
            before, promoted = dict(load.by_store), time.monotonic()
            until(lambda: all(load.by_store[key] > before[key] for key in lost), "answers for the lost keys", 30)
            assert time.monotonic() - promoted < 5
        assert {key: load.local[key] for key in others if load.local[key]} == {}
        assert max(load.slowest[key] for key in others) < 0.5  # nobody waits for the lost server until its timeout
        used = load.used()
        assert {key: used[key] for key in others} == {key: load.admitted[key] for key in others}
        assert all(load.admitted[key] - used[key] <= 20 for key in lost)


@pytest.mark.parametrize("tasks", [False, True], ids=["threads", "tasks"])
def test_resharding_under_load_is_exact(tasks: bool) -> None:
    with ValkeyCluster() as cluster:
        load = ClusterLoad(cluster, tasks=tasks)
        source, target = cluster.servers[1], cluster.servers[2]
        moved = keys_of(load, 5462, 10_923)
        with load:
            for key in moved:
                move_slot(cluster, key_slot(f"load:{{p/{key}}}".encode()), source, target)
            before = dict(load.by_store)
            until(lambda: all(load.by_store[key] > before[key] for key in load.keys), "answers for all keys")
        assert sum(load.local.values()) == 0
        assert load.used() == load.admitted
        assert len(moved) > 5


def move_slot(cluster: ValkeyCluster, slot: int, source: ValkeyServer, target: ValkeyServer) -> None:
    """Move a slot key by key, as redis-cli does."""
    names = {server: server.ask("CLUSTER", "MYID").split(b"\r\n")[1].decode() for server in (source, target)}
    target.ask("CLUSTER", "SETSLOT", str(slot), "IMPORTING", names[source])
    source.ask("CLUSTER", "SETSLOT", str(slot), "MIGRATING", names[target])
    with redis.Redis(port=source.port) as client:
        while found := client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 10):
            for key in found:
                client.execute_command("MIGRATE", "127.0.0.1", target.port, key, 0, 5000)
    for server in (target, source, cluster.servers[0]):
        server.ask("CLUSTER", "SETSLOT", str(slot), "NODE", names[target])


@pytest.mark.parametrize("tasks", [False, True], ids=["threads", "tasks"])
def test_slots_that_get_a_server_later_are_found(tasks: bool) -> None:
    with ValkeyServer(None, *ValkeyCluster.OPTIONS) as server, asyncio.Runner() as runner:
        server.ask("CLUSTER", "ADDSLOTSRANGE", "0", "8191")
        until(lambda: b"cluster_state:ok" in server.ask("CLUSTER", "INFO"), "the first half")
        address = address_of(server, kind="cluster", hosts=(("127.0.0.1", server.port),))
        guarded = GuardedStore(RedisStore(address), background=False)
        asks = [(POLICY, f"k{number}", (1, 1, 1)) for number in range(40)]

        def count_allowed() -> int:
            calls = (("acquire", (ask,)) for ask in asks)
            if tasks:
                answers = [runner.run(guarded.apply_async(*call)) for call in calls]
            else:
                answers = [guarded.apply(*call) for call in calls]
            return sum(answer[0].allowed for answer in answers)

        assert 0 < count_allowed() < 40
        assert guarded.metrics()["losses"] == 1, "all slots without a server are one part of the store"
        server.ask("CLUSTER", "ADDSLOTSRANGE", "8192", "16383")
        until(lambda: b"cluster_slots_assigned:16384" in server.ask("CLUSTER", "INFO"), "the second half")
        until(lambda: guarded.maintain() is None, "the end of the outage")
        assert count_allowed() == 40
        runner.run(guarded.close_async())
