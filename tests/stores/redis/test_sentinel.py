"""Sentinels: the store asks them who is primary, and asks again when that one is gone."""

from __future__ import annotations

import asyncio
import shutil
import time
from typing import TYPE_CHECKING

import pytest

from tests.servers.process import need, until
from tests.servers.valkey import ValkeyServer
from tidegate import Limit, Policy, StoreUnavailable
from tidegate.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def test_a_service_that_nobody_knows(trio: tuple[ValkeyServer, ValkeyServer, SentinelServer]) -> None:
    store = open_store(f"redis+sentinel://127.0.0.1:{trio[2].port}/other?timeout=1&connect_timeout=1")
    with pytest.raises(StoreUnavailable, match="check the service name"):
        store.apply("acquire", ((POLICY, "k", (1,)),))
    store.close()
