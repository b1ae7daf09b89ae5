"""Sentinels: the store asks them for the primary, and again when it fails."""

from __future__ import annotations

import asyncio
import shutil
import time
from typing import TYPE_CHECKING

import pytest

from tests.servers.process import need, until
from tests.servers.valkey import ValkeyServer
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
def sentinel_setup() -> Iterator[tuple[ValkeyServer, ValkeyServer, SentinelServer]]:
    program = need(shutil.which("redis-server"), "redis-server", "apt-get install redis-server")
    follow = ("--replicaof", "127.0.0.1")
    delay = ("--repl-diskless-sync-delay", "0")
    with ValkeyServer(program, *delay) as primary, ValkeyServer(program, *follow, str(primary.port)) as replica:
        until(lambda: b"master_link_status:up" in replica.ask("INFO", "replication"), "the replica's link")
        with SentinelServer(program, primary.port) as sentinel:
            known = str(replica.port).encode()
            until(lambda: known in sentinel.ask("SENTINEL", "REPLICAS", "main"), "the sentinel's knowledge")
            yield primary, replica, sentinel


def replication_info(server: ValkeyServer, field: bytes) -> int:
    """Return a number from the replication info of a server."""
    return int(server.ask("INFO", "replication").split(field + b":")[1].split(b"\r\n")[0])


@pytest.mark.parametrize("tasks", [False, True], ids=["threads", "tasks"])
def test_the_store_uses_the_new_primary_after_a_fail_over(
    sentinel_setup: tuple[ValkeyServer, ValkeyServer, SentinelServer], tasks: bool
) -> None:
    primary, replica, sentinel = sentinel_setup
    store = open_store(f"redis+sentinel://127.0.0.1:{sentinel.port}/main?timeout=1&connect_timeout=1")
    with asyncio.Runner() as runner:

        def ask() -> int:
            asks = ((POLICY, "k", (1,)),)
            return (runner.run(store.apply_async("acquire", asks)) if tasks else store.apply("acquire", asks))[
                0
            ].remaining

        assert ask() == 49
        assert ask() == 48
        # WAIT covers only writes of its own connection; the replica must have those of the store.
        until(
            lambda: replication_info(replica, b"slave_repl_offset") >= replication_info(primary, b"master_repl_offset"),
            "the replica's copy",
        )
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


async def test_fail_over_under_load(sentinel_setup: tuple[ValkeyServer, ValkeyServer, SentinelServer]) -> None:
    """Calls are denied while there is no primary, then continue with the data of the replica. Both are counted."""
    primary, replica, sentinel = sentinel_setup
    url = f"redis+sentinel://127.0.0.1:{sentinel.port}/main?deadline=300ms&connect_timeout=1"
    policy = Policy("load", (Limit(10**6, "1h", "fixed_window"),))
    async with AsyncLimiter(policy, store=url) as limiter:
        store, answered, stop = limiter.store, 0, False

        async def call_repeatedly() -> None:
            nonlocal answered
            while not stop:
                allowed = bool(await limiter.try_acquire("k"))
                answered += allowed
                if not allowed:
                    await asyncio.sleep(0.001)  # let other tasks run

        async def wait_until(condition: Callable[[], bool]) -> None:
            async with asyncio.timeout(40):
                while not condition():
                    await asyncio.sleep(0.002)

        tasks = [asyncio.ensure_future(call_repeatedly()) for _ in range(8)]
        await wait_until(lambda: answered > 300)
        known = answered
        await wait_until(
            lambda: (
                replication_info(replica, b"slave_repl_offset")
                >= replication_info(primary, b"master_repl_offset") - 5000
            )
        )
        primary.kill()
        await wait_until(lambda: store.metrics()["losses"] >= 1)
        await wait_until(lambda: store.metrics()["store_lost"] == 0)
        before = answered
        await wait_until(lambda: answered > before + 100)
        stop = True
        await asyncio.gather(*tasks)
        counts = store.metrics()
        assert counts["denied_without_store"] > 0
        used = (await limiter.usage("k"))["1h"].used
        assert known + 100 <= used <= answered + 8  # a call whose answer was lost is charged and not used


def test_an_unknown_service_name(sentinel_setup: tuple[ValkeyServer, ValkeyServer, SentinelServer]) -> None:
    store = open_store(f"redis+sentinel://127.0.0.1:{sentinel_setup[2].port}/other?timeout=1&connect_timeout=1")
    with pytest.raises(StoreUnavailable, match="check the service name"):
        store.apply("acquire", ((POLICY, "k", (1,)),))
    store.close()
