"""Timeouts measure the server's silence, not waiting for other calls or a blocked process."""

from __future__ import annotations

import asyncio
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from tests.servers.tcp_proxy import TcpProxy
from tests.stores.redis.conftest import address_of
from tidegate import AsyncLimiter, Limit, Policy, StoreUnavailable
from tidegate.stores._redis import RedisStore
from tidegate.stores._redis.protocol import MAX_IN_FLIGHT, MAX_LIMITS_PER_CALL

if TYPE_CHECKING:
    from tests.servers.valkey import ValkeyServer

BUCKET = Policy("bucket", (Limit(1000, "52w", burst=10**5),))  # refills nothing during a test
LOGS = Policy("logs", tuple(Limit(10**6, "1h", "sliding_log", name=name) for name in "ab"))


class PacedProxy(TcpProxy):
    """Forwards one reply at a time and then pauses, like a slow server."""

    pause = 0.0

    def _forward(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        if not answers:
            super()._forward(source, sink, answers)
            return
        waiting = b""
        with suppress(OSError):
            while data := source.recv(65_536):
                waiting += data
                while size := reply_size(waiting):
                    self._closing.wait(self.pause)
                    sink.sendall(waiting[:size])
                    waiting = waiting[size:]
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()


def reply_size(data: bytes) -> int:
    """Return the size of the first reply; 0 if it is incomplete."""
    end = data.find(b"\r\n")
    if end < 0:
        return 0
    size = end + 2
    if data[:1] == b"$":
        size += int(data[1:end]) + 2
    return size if size <= len(data) else 0


async def test_a_long_pipeline_is_waited_for_while_replies_flow(valkey: ValkeyServer) -> None:
    with PacedProxy(valkey.port) as proxy:
        store = RedisStore(address_of(valkey, hosts=(("127.0.0.1", proxy.port),), timeout=0.4, batch=10))
        await store.apply_async("peek", ((BUCKET, "k", (0,)),))
        proxy.pause = 0.05
        began = time.monotonic()
        calls = [store.apply_async("acquire", ((BUCKET, "k", (1,)),)) for _ in range(150)]
        answers = await asyncio.gather(*calls)
        assert time.monotonic() - began > 0.5  # longer than the timeout: 15 scripts follow each other
        assert sorted(10**5 - decision.remaining for [decision] in answers) == list(range(1, 151))
        assert store.metrics()["failures"] == 0
        await store.close_async()


def test_threads_wait_while_replies_flow(valkey: ValkeyServer) -> None:
    with PacedProxy(valkey.port) as proxy:
        store = RedisStore(address_of(valkey, hosts=(("127.0.0.1", proxy.port),), timeout=0.4, batch=2))
        store.apply("peek", ((BUCKET, "k", (0,)),))
        proxy.pause = 0.05
        with ThreadPoolExecutor(40) as pool:
            answers = list(pool.map(lambda _: store.apply("acquire", ((BUCKET, "k", (1,)),)), range(40)))
        assert sorted(10**5 - decision.remaining for [decision] in answers) == list(range(1, 41))
        assert store.metrics()["failures"] == 0
        store.close()


async def test_a_single_call_does_not_wait_for_a_whole_batch(valkey: ValkeyServer) -> None:
    with PacedProxy(valkey.port) as proxy:
        store = RedisStore(address_of(valkey, hosts=(("127.0.0.1", proxy.port),), batch=10))
        await store.apply_async("peek", ((BUCKET, "k", (0,)),))
        proxy.pause = 0.01
        batch = [asyncio.ensure_future(store.apply_async("acquire", ((BUCKET, "k", (1,)),))) for _ in range(400)]
        for _ in range(3):
            await asyncio.sleep(0)
        await store.apply_async("acquire", ((BUCKET, "single", (1,)),))
        assert sum(call.done() for call in batch) < 200  # of 40 scripts, those in flight and a few more
        await asyncio.gather(*batch)
        await store.close_async()


async def test_number_and_cost_of_scripts_in_flight_are_limited(server: ValkeyServer) -> None:
    store = RedisStore(address_of(server))
    await store.apply_async("peek", ((LOGS, "k", (0, 0)),))
    before = store.metrics()
    with server.frozen():
        calls = [asyncio.ensure_future(store.apply_async("acquire", ((LOGS, "k", (1, 1)),))) for _ in range(1000)]
        for _ in range(20):
            await asyncio.sleep(0)
        sent = {name: count - before[name] for name, count in store.metrics().items()}
        assert sent["scripts"] <= MAX_IN_FLIGHT
        assert sent["calls"] <= 26 * MAX_IN_FLIGHT  # 256 units, at 10 for a call to two logs
    assert all(decision.allowed for [decision] in await asyncio.gather(*calls))
    await store.close_async()


async def test_calls_that_were_not_sent_are_not_charged_in_an_outage(server: ValkeyServer) -> None:
    store = RedisStore(address_of(server, timeout=0.3, connect_timeout=0.3))
    await store.apply_async("peek", ((LOGS, "k", (0, 0)),))
    with server.frozen():
        calls = [store.apply_async("acquire", ((LOGS, "k", (1, 1)),)) for _ in range(1000)]
        began = time.monotonic()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert time.monotonic() - began < 5  # one timeout for all, not one for each of 39 batches
        assert all(isinstance(answer, StoreUnavailable) for answer in answers)
    await store.close_async()
    store = RedisStore(address_of(server, prefix=store.address.prefix))
    [left] = await store.apply_async("peek", ((LOGS, "k", (0, 0)),))
    assert 10**6 - left.remaining <= 26 * MAX_IN_FLIGHT
    await store.close_async()


async def test_calls_that_were_not_sent_are_sent_over_a_new_connection(valkey: ValkeyServer) -> None:
    with PacedProxy(valkey.port) as proxy:
        store = RedisStore(address_of(valkey, hosts=(("127.0.0.1", proxy.port),), batch=10))
        await store.apply_async("peek", ((BUCKET, "k", (0,)),))
        proxy.pause = 0.05
        calls = [asyncio.ensure_future(store.apply_async("acquire", ((BUCKET, "k", (1,)),))) for _ in range(400)]
        while not any(call.done() for call in calls):
            await asyncio.sleep(0)
        proxy.pause = 0.0
        proxy.reset()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        lost = sum(isinstance(answer, StoreUnavailable) for answer in answers)
        assert 0 < lost <= 10 * MAX_IN_FLIGHT
        await store.close_async()


@pytest.mark.parametrize("mode", ["deny", "allow"])
async def test_the_charge_of_a_late_reply_is_given_back(server: ValkeyServer, mode: str) -> None:
    """Calls that timed out were denied; `allow` has admitted them, so they stay charged."""
    slots = Limit(100, "1h", "concurrency", name="slots")
    policy = Policy("late", (Limit(100, "1h", "sliding_log"), slots), "enforce", mode)  # type: ignore[arg-type]  # a mode
    store = RedisStore(address_of(server, timeout=0.2, connect_timeout=5))
    await store.apply_async("peek", ((policy, "k", (0, 0)),))
    with server.frozen():
        calls = [asyncio.ensure_future(store.apply_async("acquire", ((policy, "k", (1, 1)),))) for _ in range(10)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(answer, StoreUnavailable) for answer in answers)
    async with asyncio.timeout(20):
        while store.metrics()["refunded"] < (10 if mode == "deny" else 0):
            await asyncio.sleep(0.001)
    [left] = await store.apply_async("peek", ((policy, "k", (0, 0)),))
    assert [view[0] for view in left.views] == ([100, 100] if mode == "deny" else [90, 90])
    await store.close_async()


async def test_refunds_that_failed_are_sent_when_the_server_is_back(server: ValkeyServer) -> None:
    policy = Policy("again", (Limit(10**5, "1h", "fixed_window"),))
    store = RedisStore(address_of(server, timeout=0.2, connect_timeout=5, batch=1))
    await store.apply_async("peek", ((policy, "k", (0,)),))
    pipeline = store._pipeline()  # noqa: SLF001 - to cancel after the answers arrived
    pending_calls = [pipeline.ask("acquire", ((policy, "k", (1,)),), None, None) for _ in range(40)]
    tasks = [asyncio.ensure_future(pending_call.wait()) for pending_call in pending_calls]
    while not all(pending_call.future.done() for pending_call in pending_calls[:30]):
        await asyncio.sleep(0)
    with server.frozen():
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(20):
            while store.metrics()["failures"] == 0:
                await asyncio.sleep(0.001)
    async with asyncio.timeout(20):
        while (await store.apply_async("peek", ((policy, "k", (0,)),)))[0].remaining + sum(
            task.done() and not task.cancelled() for task in tasks
        ) < 10**5:
            await asyncio.sleep(0.001)
    await store.close_async()


async def test_a_blocked_event_loop_causes_no_timeout(valkey: ValkeyServer) -> None:
    store = RedisStore(address_of(valkey, timeout=0.05, connect_timeout=0.25))
    connecting = asyncio.ensure_future(store.apply_async("acquire", ((BUCKET, "k", (1,)),)))
    for _ in range(4):
        await asyncio.sleep(0)
        time.sleep(0.3)  # noqa: ASYNC251 - blocks the loop for longer than both timeouts
    assert (await connecting)[0].allowed
    for turns in range(4):
        call = asyncio.ensure_future(store.apply_async("acquire", ((BUCKET, "k", (1,)),)))
        for _ in range(turns):
            await asyncio.sleep(0)
        time.sleep(0.2)  # noqa: ASYNC251 - as above
        assert (await call)[0].allowed
    assert store.metrics()["failures"] == 0
    await store.close_async()


async def test_an_expensive_call_has_a_longer_timeout(valkey: ValkeyServer) -> None:
    """A thousand logs in one call: 0.25 s more than the timeout."""
    policy = Policy("wide", tuple(Limit(10, "1h", "sliding_log", name=str(i)) for i in range(100)))
    asks = tuple((policy, str(key), policy.one) for key in range(MAX_LIMITS_PER_CALL // 100))
    with PacedProxy(valkey.port) as proxy:
        address = address_of(valkey, hosts=(("127.0.0.1", proxy.port),), timeout=0.1)
        for tasks in (True, False):
            store = RedisStore(address)
            store.apply("peek", ((BUCKET, "k", (0,)),)) if not tasks else await store.apply_async(
                "peek", ((BUCKET, "k", (0,)),)
            )
            proxy.pause = 0.15
            decisions = await store.apply_async("acquire", asks) if tasks else store.apply("acquire", asks)
            assert decisions[0].allowed
            proxy.pause = 0.0
            await store.close_async()


@pytest.mark.parametrize("mode", ["deny", "allow"])
async def test_batches_of_thousands_cause_no_outage(valkey: ValkeyServer, mode: str) -> None:
    """This load once caused nine outages in eight seconds; `allow` then admitted nearly all of 44 calls at 5/1h."""
    policies = [
        Policy(
            "big",
            (Limit(100, "1h", "sliding_log", name="a"), Limit(10**6, "1m", "sliding_log", name="b")),
            "enforce",
            mode,
        ),  # type: ignore[arg-type]  # one of the modes
        Policy("small", (Limit(5, "1h"),), "enforce", mode),  # type: ignore[arg-type]  # as above
    ]
    # A machine that runs many tests at once may be blocked for longer than the default of 50 ms.
    url = f"redis://127.0.0.1:{valkey.port}?prefix=thousands-{mode}&deadline=100ms&connect_timeout=5"
    async with AsyncLimiter(policies[0], store=url) as big:
        small = AsyncLimiter(policies[1], store=big.store)

        async def load(number: int) -> None:
            for _ in range(3):
                await asyncio.gather(*(big.try_acquire(f"{number}:{i}") for i in range(1000)))

        loads = [asyncio.ensure_future(load(number)) for number in range(4)]
        allowed = 0
        while not all(load.done() for load in loads):
            allowed += bool(await small.try_acquire("one"))
        await asyncio.gather(*loads)
        assert big.store.metrics()["losses"] == 0
        assert allowed == 5
