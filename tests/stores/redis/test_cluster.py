"""A cluster: calls go to the server of their keys, keys of one call share a slot, and fail-overs are handled."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from tests.conformance.test_batches import BATCH_GUARANTEES
from tests.servers.process import until
from tests.servers.valkey import ValkeyCluster
from tests.stores.redis.conftest import address_of
from tidegate import ConfigError, Limit, Policy, StoreUnavailable
from tidegate.stores.redis import RedisStore
from tidegate.testing import random_vectors
from tidegate.testing.reference import answer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
