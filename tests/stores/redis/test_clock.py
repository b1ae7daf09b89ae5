"""The server's clock decides; wrong clocks of clients and several processes admit nothing extra."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.stores.redis.conftest import address_of
from tidegate import Limit, Limiter, Policy
from tidegate._runtime.clock import SystemClock
from tidegate.core._bounds import SECOND
from tidegate.stores._redis import RedisStore

if TYPE_CHECKING:
    import pytest

    from tests.servers.valkey import ValkeyServer

ALGORITHMS = ("token_bucket", "fixed_window", "sliding_window", "sliding_log", "concurrency")


class OffClock(SystemClock):
    """The machine's clock, wrong by some seconds."""

    def __init__(self, ahead: float) -> None:
        self.ahead = round(ahead * 1e9)

    def ns(self) -> int:  # type: ignore[override]  # a method here
        return SystemClock.ns() + self.ahead


def test_clients_with_wrong_clocks_admit_nothing_extra(valkey: ValkeyServer) -> None:
    address = address_of(valkey)
    for algorithm in (*ALGORITHMS, "calendar_window"):
        period = "day" if algorithm == "calendar_window" else "1h"
        policy = Policy(algorithm, (Limit(5, period, algorithm),))
        answers = []
        for ahead in (0.0, 60.0, -60.0, 7200.0):
            store = RedisStore(address)
            store.clock = OffClock(ahead)
            answers += [store.apply_one("acquire", policy, "k", (1,)) for _ in range(3)]
            store.close()
        assert [answer.allowed for answer in answers] == [True] * 5 + [False] * 7, algorithm
        instants = [answer.at for answer in answers]
        assert instants == sorted(instants)
        assert instants[-1] - instants[0] < 30 * SECOND


def test_calendar_windows_are_found_with_any_client_clock(
    valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy(
        "p", (Limit(5, "minute", "calendar_window"), Limit(9, "month", "calendar_window", timezone="Asia/Tokyo"))
    )
    loading = RedisStore(address_of(valkey))
    loading.apply_one("acquire", policy, "first", (1, 1))  # the first call to a server also loads the library
    loading.close()
    for years in (-20, -1, 0, 1, 20):
        store = RedisStore(address_of(valkey))
        monkeypatch.setattr(store.protocol, "_clock", OffClock(years * 366 * 86_400))
        first, second = (store.apply_one("acquire", policy, "k", (1, 1)) for _ in range(2))
        assert first.allowed
        assert second.remaining in (3, 4)  # a minute may have ended between
        assert store.metrics()["calls"] == (2 if years == 0 else 3)  # one more call to learn the server's time
        store.close()


def test_a_store_opens_a_new_connection_after_a_fork(valkey: ValkeyServer) -> None:
    store = RedisStore(address_of(valkey))
    policy = Policy("p", (Limit(100, "1h"),))
    store.apply_one("acquire", policy, "k", (1,))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if store.apply_one("acquire", policy, "k", (1,)).remaining == 98 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.apply_one("acquire", policy, "k", (1,)).remaining == 97
    store.close()


COUNT = """
import asyncio, sys
from tidegate import AsyncLimiter, Limit, Limiter
limits = [Limit(300, "1h"), Limit(280, "1h", "sliding_log", name="log"), Limit(500, "day", "calendar_window")]
async def tasks():
    async with AsyncLimiter(limits, store=sys.argv[1]) as limiter:
        return sum(d.allowed for d in await asyncio.gather(*(limiter.try_acquire("k") for _ in range(200))))
with Limiter(limits, store=sys.argv[1]) as limiter:
    print(sum(limiter.try_acquire("k").allowed for _ in range(50)) + asyncio.run(tasks()))
"""


def test_two_processes_admit_exactly_the_limit(server: ValkeyServer) -> None:
    command = [sys.executable, "-c", COUNT, f"{server.url}?timeout=5&connect_timeout=5"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in range(2)]
    counts = [int(process.communicate()[0]) for process in running]
    assert sum(counts) == 280
    assert multiprocessing.active_children() == []


def test_a_limiter_waits_by_the_servers_clock(valkey: ValkeyServer) -> None:
    with Limiter("1/20ms", store=f"{valkey.url}?timeout=5&prefix=waits") as limiter:
        decisions = [limiter.acquire("k", timeout=10) for _ in range(3)]
    assert decisions[2].at - decisions[0].at >= 40_000
