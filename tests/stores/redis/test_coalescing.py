"""Concurrent calls share a round trip, with the same results as separate calls."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from tests.cases import cases
from tests.servers.process import until
from tests.servers.tcp_proxy import TcpProxy
from tests.stores.redis.conftest import address_of
from tidegate import AsyncLimiter, Closed, ConfigError, Limit, Limiter, Policy
from tidegate.stores._redis import RedisStore
from tidegate.stores._redis.protocol import MAX_LIMITS_PER_CALL

if TYPE_CHECKING:
    from tests.servers.valkey import ValkeyServer


async def test_calls_of_one_loop_iteration_are_one_script(server: ValkeyServer) -> None:
    async with AsyncLimiter("50/1h", store=RedisStore(address_of(server))) as limiter:
        await limiter.peek("warm")
        server.ask("CONFIG", "RESETSTAT")
        decisions = await asyncio.gather(*(limiter.try_acquire("k") for _ in range(100)))
        assert server.calls("fcall") == 1
        assert [d.remaining for d in decisions] == [*range(49, -1, -1), *[0] * 50]
        assert [d.allowed for d in decisions] == [True] * 50 + [False] * 50
        await limiter.store.close_async()


async def test_large_batches_are_split(server: ValkeyServer) -> None:
    store = RedisStore(address_of(server, batch=10))
    async with AsyncLimiter("1000/1h", store=store) as limiter:
        await limiter.peek("warm")
        server.ask("CONFIG", "RESETSTAT")
        decisions = await asyncio.gather(*(limiter.try_acquire("k") for _ in range(95)))
        assert server.calls("fcall") == 10
        assert [d.remaining for d in decisions] == list(range(999, 904, -1))
        await store.close_async()


def test_a_call_with_too_many_limits_is_rejected(store: RedisStore) -> None:
    policy = Policy("wide", tuple(Limit(1, "1h", name=str(i)) for i in range(100)))
    asks = [(policy, str(key), policy.one) for key in range(MAX_LIMITS_PER_CALL // 100)]
    assert store.apply("acquire", asks)[0].allowed
    with pytest.raises(ConfigError, match="split the call"):
        store.apply("acquire", [*asks, (policy, "one more", policy.one)])


def test_calls_of_threads_share_scripts_and_are_counted_exactly(valkey: ValkeyServer) -> None:
    with TcpProxy(valkey.port) as proxy:
        proxy.faults.delay = 0.002  # so that calls queue while others are in flight
        store = RedisStore(address_of(valkey, hosts=(("127.0.0.1", proxy.port),)))
        with Limiter("150/1h", store=store) as limiter, ThreadPoolExecutor(16) as pool:
            limiter.peek("k")  # a server that does not know the script yet is sent it again, which counts
            before = store.metrics()["calls"]
            decisions = list(pool.map(lambda _: limiter.try_acquire("k"), range(320)))
        assert sum(d.allowed for d in decisions) == 150
        assert sorted(d.remaining for d in decisions if d.allowed) == list(range(150))
        assert store.metrics()["calls"] - before == 320
        assert store.metrics()["scripts"] < 160
        store.close()


def test_several_event_loops_and_threads_share_one_store(store: RedisStore) -> None:
    limiter = AsyncLimiter("100/1h", store=store)
    plain = Limiter("100/1h", store=store)

    async def some() -> int:
        answers = await asyncio.gather(*(limiter.try_acquire("k") for _ in range(40)))
        return sum(answer.allowed for answer in answers)

    with ThreadPoolExecutor(4) as pool:
        loops = [pool.submit(lambda: asyncio.run(some())) for _ in range(3)]
        thread = pool.submit(lambda: sum(plain.try_acquire("k").allowed for _ in range(40)))
        assert sum(loop.result() for loop in loops) + thread.result() == 100


@cases("algorithm", ["token_bucket", "fixed_window", "sliding_window", "sliding_log", "concurrency"])
@cases("verb", ["acquire", "hold"])
async def test_a_cancelled_call_leaves_no_charge(server: ValkeyServer, algorithm: str, verb: str) -> None:
    store = RedisStore(address_of(server))
    policy = Policy("p", (Limit(10, "1h", algorithm),))
    await store.apply_async("acquire", ((policy, "k", (1,)),))
    with server.frozen():
        task = asyncio.ensure_future(store.apply_async(verb, ((policy, "k", (4,)),)))
        sent = store.metrics()["scripts"] + 1
        while store.metrics()["scripts"] < sent:
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    while store.metrics()["refunded"] == 0:
        await asyncio.sleep(0)
    [decision] = await store.apply_async("peek", ((policy, "k", (0,)),))
    assert decision.remaining == 9
    await store.close_async()


async def test_a_call_cancelled_before_it_was_sent_is_never_made(server: ValkeyServer) -> None:
    store = RedisStore(address_of(server))
    policy = Policy("p", (Limit(10, "1h"),))
    await store.apply_async("peek", ((policy, "k", (0,)),))
    task = asyncio.ensure_future(store.apply_async("acquire", ((policy, "k", (4,)),)))
    await asyncio.sleep(0)
    task.cancel()
    [decision] = await store.apply_async("acquire", ((policy, "k", (1,)),))
    assert decision.remaining == 9
    assert store.metrics()["refunded"] == 0
    await store.close_async()


async def test_closing_answers_waiting_calls(server: ValkeyServer) -> None:
    store = RedisStore(address_of(server, timeout=0.3))
    policy = Policy("p", (Limit(10, "1h"),))
    await store.apply_async("peek", ((policy, "k", (0,)),))
    with server.frozen():
        calls = [asyncio.ensure_future(store.apply_async("acquire", ((policy, "k", (1,)),))) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await store.close_async()
        answers = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(answer, Exception) for answer in answers)
    with pytest.raises(Closed):
        await store.apply_async("peek", ((policy, "k", (0,)),))
    with pytest.raises(Closed):
        store.apply("peek", ((policy, "k", (0,)),))


def test_closing_in_a_thread_closes_connections_of_other_loops(server: ValkeyServer) -> None:
    store = RedisStore(address_of(server))
    policy = Policy("p", (Limit(10, "1h"),))
    called, done = threading.Event(), threading.Event()

    async def ask() -> None:
        await store.apply_async("peek", ((policy, "k", (0,)),))
        called.set()
        while not done.is_set():
            await asyncio.sleep(0)

    thread = threading.Thread(target=lambda: asyncio.run(ask()))
    thread.start()
    called.wait()
    store.close()
    until(lambda: b"connected_clients:1\r" in server.ask("INFO", "clients"), "the end of the connection", 5)
    done.set()
    thread.join()


async def test_a_call_cancelled_at_any_moment_leaves_no_charge(server: ValkeyServer) -> None:
    """Also between the arrival of its answer and its reading: that is one turn of the loop of many."""
    store = RedisStore(address_of(server))
    policy = Policy("p", (Limit(2000, "1h", "sliding_log"), Limit(2000, "1h", "concurrency", name="slots")))
    answered = 0
    for number in range(1200):
        task = asyncio.ensure_future(store.apply_async("acquire", ((policy, "k", (1, 1)),)))
        for _ in range(number % 60):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            answered += len(await task)
    assert answered < 1200
    left = [2000 - answered] * 2
    async with asyncio.timeout(20):
        while [view[0] for view in (await store.apply_async("peek", ((policy, "k", (0, 0)),)))[0].views] != left:
            await asyncio.sleep(0.001)
    assert store.metrics()["refunded"] > 0
    await store.close_async()


@pytest.mark.parametrize("cancelled", [True, False], ids=["cancelled", "left to the loop"])
def test_calls_cancelled_with_their_loop_are_given_back_before_the_loop_ends(
    server: ValkeyServer, cancelled: bool
) -> None:
    store = RedisStore(address_of(server))
    policy = Policy("p", (Limit(100, "1h", "fixed_window"),))

    async def leave() -> None:
        await store.apply_async("peek", ((policy, "k", (0,)),))
        sent = store.metrics()["scripts"] + 1
        tasks = [asyncio.ensure_future(store.apply_async("acquire", ((policy, "k", (1,)),))) for _ in range(10)]
        while store.metrics()["scripts"] < sent:
            await asyncio.sleep(0)
        if cancelled:
            for task in tasks:
                task.cancel()

    asyncio.run(leave())
    assert store.apply_one("peek", policy, "k", (0,)).remaining == 100
    store.close()


async def test_slots_of_cancelled_calls_are_released_and_waiters_woken(server: ValkeyServer) -> None:
    async with AsyncLimiter(
        Policy("p", (Limit(10, "1h", "concurrency"),)), store=RedisStore(address_of(server))
    ) as slots:
        await slots.peek("k")
        with server.frozen():
            tasks = [asyncio.ensure_future(slots.try_acquire("k")) for _ in range(10)]
            sent = slots.store.metrics()["scripts"] + 1
            while slots.store.metrics()["scripts"] < sent:
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            # Called before anything is given back: it is denied, and waits for a slot.
            waiter = asyncio.ensure_future(slots.acquire("k", 10, timeout=30))
            await asyncio.sleep(0)
        began = asyncio.get_running_loop().time()
        assert await waiter
        assert asyncio.get_running_loop().time() - began < 0.9  # it would retry by itself after a second
        await slots.store.close_async()


async def test_a_cancelled_release_is_carried_out_and_wakes_the_next_waiter(server: ValkeyServer) -> None:
    async with AsyncLimiter(
        Policy("p", (Limit(1, "1h", "concurrency"),)), store=RedisStore(address_of(server))
    ) as slots:
        decision = await slots.acquire("k")
        waiter = asyncio.ensure_future(slots.acquire("k", timeout=30))
        while slots.waiting == 0 or slots.store.metrics()["calls"] < 2:
            await asyncio.sleep(0)
        release = asyncio.ensure_future(slots.release("k", 1, decision))
        await asyncio.sleep(0)
        release.cancel()
        began = asyncio.get_running_loop().time()
        assert await waiter
        assert asyncio.get_running_loop().time() - began < 0.9
        await slots.store.close_async()


async def test_closing_gives_back_cancelled_calls(server: ValkeyServer) -> None:
    store = RedisStore(address_of(server))
    policy = Policy("p", (Limit(100, "1h"),))
    await store.apply_async("peek", ((policy, "k", (0,)),))
    calls = [asyncio.ensure_future(store.apply_async("hold", ((policy, "k", (1,)),))) for _ in range(50)]
    sent = store.metrics()["scripts"] + 1
    while store.metrics()["scripts"] < sent:
        await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    await store.close_async()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(answer, list) for answer in answers) == 25
    left = RedisStore(address_of(server, prefix=store.address.prefix))
    assert left.apply_one("peek", policy, "k", (0,)).remaining == 75
    left.close()
