"""Sentinels: the store asks them who is primary, and asks again when that one is gone. What is lost is counted."""

from __future__ import annotations

import asyncio
import shutil
import time
from typing import TYPE_CHECKING

import pytest

from tests.servers.process import need, until
from tests.servers.valkey import ValkeyCluster, ValkeyServer
from tidegate import AsyncLimiter, Limit, Policy, StoreUnavailable
from tidegate.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

POLICY = Policy("p", (Limit(50, "1h"),))


class SentinelServer(ValkeyServer):
    """A sentinel that watches one primary."""

    def __init__(self, program: str, primary: int) -> None:
        super().__init__(program)
        self.primary = primary
        self.options = ("--sentinel",)

    def start(self) -> SentinelServer:
        config = self.folder / "sentinel.conf"
        lines = [f"port {self.port}", f"dir {self.folder}", "bind 127.0.0.1", f"logfile {self.folder / 'log'}"]
        lines += [f"sentinel monitor main 127.0.0.1 {self.primary} 1", "sentinel down-after-milliseconds main 300"]
        lines += ["sentinel failover-timeout main 3000"]
        config.write_text("\n".join(lines))
        self.launch([self.program, str(config), "--sentinel"])
        return self


@pytest.fixture
def trio() -> Iterator[tuple[ValkeyServer, ValkeyServer, SentinelServer]]:
    program = need(shutil.which("redis-server"), "redis-server", "apt-get install redis-server")
    follow = ("--replicaof", "127.0.0.1")
    delay = ("--repl-diskless-sync-delay", "0")
    with ValkeyServer(program, *delay) as primary, ValkeyServer(program, *follow, str(primary.port)) as replica:
        until(lambda: b"master_link_status:up" in replica.ask("INFO", "replication"), "the replica's link")
        with SentinelServer(program, primary.port) as sentinel:
            known = str(replica.port).encode()
            until(lambda: known in sentinel.ask("SENTINEL", "REPLICAS", "main"), "the sentinel's knowledge")
            yield primary, replica, sentinel


@pytest.fixture
def cluster() -> Iterator[ValkeyCluster]:
    with ValkeyCluster() as started:
        yield started


def told(server: ValkeyServer, field: bytes) -> int:
    """Read a number of what a server says of its replication."""
    return int(server.ask("INFO", "replication").split(field + b":")[1].split(b"\r\n")[0])


@pytest.mark.parametrize("tasks", [False, True], ids=["threads", "tasks"])
def test_the_store_follows_the_sentinels(trio: tuple[ValkeyServer, ValkeyServer, SentinelServer], tasks: bool) -> None:
    primary, replica, sentinel = trio
    store = open_store(f"redis+sentinel://127.0.0.1:{sentinel.port}/main?timeout=1&connect_timeout=1")
    with asyncio.Runner() as runner:

        def ask() -> int:
            asks = ((POLICY, "k", (1,)),)
            return (runner.run(store.apply_async("acquire", asks)) if tasks else store.apply("acquire", asks))[
                0
            ].remaining

        assert ask() == 49
        assert ask() == 48
        # WAIT would speak of this connection's writes only; the replica must have those of the store's.
        until(lambda: told(replica, b"slave_repl_offset") >= told(primary, b"master_repl_offset"), "the replica's copy")
        primary.kill()
        start, left = time.monotonic(), None
        while left is None:
            try:
                left = ask()
            except StoreUnavailable:
                assert time.monotonic() - start < 20, "no replica took over"
        assert left == 47
        assert b"role:master" in replica.ask("INFO", "replication")
        if tasks:
            runner.run(store.close_async())
        store.close()


async def test_a_fail_over_under_load(trio: tuple[ValkeyServer, ValkeyServer, SentinelServer]) -> None:
    """Calls are denied while there is no primary; then they go on with what the replica knew. Both are counted."""
    primary, replica, sentinel = trio
    url = f"redis+sentinel://127.0.0.1:{sentinel.port}/main?deadline=300ms&connect_timeout=1"
    policy = Policy("load", (Limit(10**6, "1h", "fixed_window"),))
    async with AsyncLimiter(policy, store=url) as limiter:
        store, answered, stop = limiter.store, 0, False

        async def hammer() -> None:
            nonlocal answered
            while not stop:
                allowed = bool(await limiter.try_acquire("k"))
                answered += allowed
                if not allowed:
                    await asyncio.sleep(0.001)  # so that the event loop has time for others

        async def until_so(condition: Callable[[], bool]) -> None:
            async with asyncio.timeout(40):
                while not condition():
                    await asyncio.sleep(0.002)

        tasks = [asyncio.ensure_future(hammer()) for _ in range(8)]
        await until_so(lambda: answered > 300)
        known = answered
        await until_so(lambda: told(replica, b"slave_repl_offset") >= told(primary, b"master_repl_offset") - 5000)
        primary.kill()
        await until_so(lambda: store.metrics()["losses"] >= 1)
        await until_so(lambda: store.metrics()["store_lost"] == 0)
        before = answered
        await until_so(lambda: answered > before + 100)
        stop = True
        await asyncio.gather(*tasks)
        counts = store.metrics()
        assert counts["denied_without_store"] > 0
        assert counts["server_changes"] == 1
        assert counts["state_losses"] == 0  # the replica had the keys, but for the last writes
        used = (await limiter.usage("k"))["1h"].used
        assert known + 100 <= used <= answered + 8  # a lost answer is a charge without a use


@pytest.mark.parametrize("tasks", [False, True], ids=["threads", "tasks"])
def test_a_flushed_server_is_counted_and_gives_every_key_its_whole_quota(server: ValkeyServer, tasks: bool) -> None:
    store = open_store(f"{server.url}?timeout=5&connect_timeout=5")
    policy = Policy("p", (Limit(10, "1h"),))
    with asyncio.Runner() as runner:

        def ask(key: str = "k") -> int:
            asks = ((policy, key, (1,)),)
            answer = runner.run(store.apply_async("acquire", asks)) if tasks else store.apply("acquire", asks)
            return answer[0].remaining

        assert [ask() for _ in range(10)] == [*range(9, -1, -1)]
        until(lambda: [ask("other") for _ in range(10)] and store.metrics()["calls"] > 100, "some load")
        assert store.metrics()["state_losses"] == 0
        server.ask("FLUSHALL")
        assert ask() == 9  # nobody can tell what was spent
        until(lambda: ask("other") >= 0 and store.metrics()["state_losses"] == 1, "the loss is noticed", 5)
        server.ask("SCRIPT", "FLUSH")
        ask("other")
        assert store.metrics()["server_changes"] == 1
        if tasks:
            runner.run(store.close_async())
        store.close()


def test_a_flushed_server_of_a_cluster_is_counted(cluster: ValkeyCluster) -> None:
    store = open_store(f"{cluster.url}?timeout=5&connect_timeout=5")
    policy = Policy("p", (Limit(10**6, "1h"),))

    def counts() -> dict[str, int]:
        for key in range(20):
            store.apply("acquire", ((policy, str(key), (1,)),))
        return store.metrics()

    until(lambda: counts() and b":marker{" in cluster.servers[0].ask("KEYS", "*marker*"), "the server's marker")
    assert store.metrics()["state_losses"] == 0
    cluster.servers[0].ask("FLUSHALL")
    until(lambda: counts()["state_losses"] == 1, "the loss is noticed", 5)
    store.close()


def test_a_service_that_nobody_knows(trio: tuple[ValkeyServer, ValkeyServer, SentinelServer]) -> None:
    store = open_store(f"redis+sentinel://127.0.0.1:{trio[2].port}/other?timeout=1&connect_timeout=1")
    with pytest.raises(StoreUnavailable, match="check the service name"):
        store.apply("acquire", ((POLICY, "k", (1,)),))
    store.close()
