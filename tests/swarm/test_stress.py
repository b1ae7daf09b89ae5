"""Many threads and tasks at once, in virtual time: no permit is lost, no call hangs, no state is left behind."""

import asyncio
import gc
import os
import random
import threading
import tracemalloc
from contextlib import suppress

import pytest

from tests.swarm.conftest import WatchedClock
from tidegate import Closed, Denied, ResourceUnknown
from tidegate.swarm import AsyncMemoryLimiter, AsyncSwarmLimiter, Capacity, MemoryLimiter, SwarmLimiter

PAIRS = int(os.environ.get("TIDEGATE_PAIRS", "25000"))  # the benchmark does a million


def in_threads(count, work):
    """Run work(number) in threads, and give back what went wrong."""
    errors = []

    def run(number):
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - told to the test
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    return threads, errors


def join(threads):
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread is stuck"


def test_threads_get_exactly_the_available_permits(clock, hub):
    with SwarmLimiter(hub(), agent_id="a", clock=clock) as limiter:
        limiter.set_capacity("api", 1000, 3600)
        admitted = [0] * 8

        def work(number):
            admitted[number] = sum(limiter.try_acquire("api") for _ in range(500))

        threads, errors = in_threads(8, work)
        join(threads)
        assert errors == []
        assert sum(admitted) == 1000
        assert limiter.get_capacity("api") == Capacity("api", 0, 1000, 3600.0, 1000)


def test_acquire_and_release_in_threads_restores_the_state(clock):
    with MemoryLimiter(clock=clock) as limiter:
        limiter.set_capacity("api", 4, 3600)

        def work(_number):
            for _ in range(200):
                limiter.acquire("api")
                limiter.release("api")

        threads, errors = in_threads(8, work)
        join(threads)
        assert errors == []
        assert limiter.get_capacity("api") == Capacity("api", 4, 4, 3600.0, 0)


def do_something(agent, rng):
    """One of the things that can be done with a limiter."""
    chance = rng.random()
    with suppress(Denied, ResourceUnknown):
        if chance < 0.4:
            agent.acquire("api", timeout=rng.choice((0, 0.5)))
        elif chance < 0.7:
            agent.release("api", return_token=rng.random() < 0.5)
        elif chance < 0.75:
            agent.announce_reduced("api", "429", retry_after=rng.choice((None, 0.3)))
        elif chance < 0.8:
            agent.set_capacity("api", rng.choice((0, 5, 20, 20)), 1)
        elif (capacity := agent.get_capacity("api")) is not None:
            assert 0 <= capacity.available <= 20
            assert 1 <= capacity.total <= 20
            assert capacity.in_flight >= 0


def test_a_resource_removed_during_a_release(clock):
    with MemoryLimiter(clock=clock) as limiter:
        limiter.set_capacity("api", 4, 3600)
        limiter.acquire("api")
        limiter._resources["api"].limiter.close()  # noqa: SLF001 - what another thread's set_capacity(…, 0, …) does last
        limiter.release("api")


async def test_a_resource_removed_during_an_async_release(clock):
    async with AsyncMemoryLimiter(clock=clock) as limiter:
        await limiter.set_capacity("api", 4, 3600)
        await limiter.acquire("api")
        await limiter._resources["api"].limiter.close()  # noqa: SLF001 - as above
        await limiter.release("api")


@pytest.mark.parametrize("seed", range(3))
def test_all_operations_concurrently(clock, hub, seed):
    """Two agents on a bus, each used by threads that take, return, reduce, set and remove; time passes meanwhile."""
    agents = [SwarmLimiter(hub(), agent_id=name, clock=clock) for name in "ab"]
    for agent in agents:
        agent.set_capacity("api", 20, 1)

    def work(number):
        rng = random.Random(seed * 100 + number)
        for _ in range(200):
            do_something(agents[number % 2], rng)

    threads, errors = in_threads(6, work)
    pause, rng = threading.Event(), random.Random(seed)
    while any(thread.is_alive() for thread in threads):
        clock.advance(rng.choice((0.01, 0.1, 1, 30)))
        pause.wait(0.001)
    join(threads)
    assert errors == []
    for agent in agents:
        agent.set_capacity("api", 20, 1)
    clock.advance(1000)
    for agent in agents:
        assert (agent.get_capacity("api").available, agent.get_capacity("api").total) == (20, 20)
        agent.close()


def test_threads_that_wait_are_all_served_through_reductions_and_recovery(clock, hub):
    agents = [SwarmLimiter(hub(), agent_id=name, clock=clock) for name in "ab"]
    for agent in agents:
        agent.set_capacity("api", 2, 10)
    served = threading.Semaphore(0)

    def work(number):
        agents[number % 2].acquire("api")
        served.release()

    threads, errors = in_threads(40, work)
    for _ in range(4):
        assert served.acquire(timeout=60)
    for count in range(36):
        if count % 9 == 0:
            agents[count % 2].announce_reduced("api", "429", retry_after=1)
        while not served.acquire(blocking=False):
            clock.advance(1)
            threading.Event().wait(0.0005)
    join(threads)
    assert errors == []
    for agent in agents:
        agent.close()


async def test_tasks_that_wait_are_all_served_or_cancelled(clock, hub):
    rng = random.Random(5)
    async with AsyncSwarmLimiter(hub(), agent_id="a", clock=clock) as limiter:
        await limiter.set_capacity("api", 5, 1)
        tasks = [asyncio.create_task(limiter.acquire("api", timeout=rng.choice((None, 3)))) for _ in range(300)]
        for _ in range(5000):
            await asyncio.sleep(0)
            clock.advance(0.1)
            rng.choice(tasks).cancel() if rng.random() < 0.02 else None
            if rng.random() < 0.01:
                await limiter.announce_reduced("api", "429")
            if all(task.done() for task in tasks):
                break
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        kinds = {type(outcome).__name__ for outcome in outcomes}
        assert kinds <= {"Decision", "Denied", "CancelledError"}
        got = sum(type(outcome).__name__ == "Decision" for outcome in outcomes)
        assert (await limiter.get_capacity("api")).in_flight == got
        assert got > 20


def test_close_during_concurrent_calls(hub):
    clock = WatchedClock()
    limiter = SwarmLimiter(hub(None), agent_id="a", clock=clock)
    limiter.set_capacity("api", 10, 3600)

    def work(_number):
        while True:
            limiter.acquire("api")

    threads, errors = in_threads(8, work)
    pause = threading.Event()
    while len(clock.waiting) < 8:
        pause.wait(0.001)
    limiter.close()
    join(threads)
    assert [type(error) for error in errors] == [Closed] * 8


def test_acquire_and_release_leak_no_memory(clock, hub):
    with SwarmLimiter(hub(), agent_id="a", clock=clock) as limiter:
        limiter.set_capacity("api", 100, 60)

        def pairs(count):
            for _ in range(count):
                assert limiter.try_acquire("api")
                limiter.release("api")
                clock.advance(0.001)

        pairs(1000)
        gc.collect()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            pairs(PAIRS // 5)  # tracing makes each a few times as slow
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert after - before < 20_000, "bytes that the pairs left behind"


def test_announcements_leak_no_memory(clock, hub):
    agents = [SwarmLimiter(hub(), agent_id=name, clock=clock) for name in "ab"]
    for agent in agents:
        agent.set_capacity("api", 100, 60)

    def announce(count):
        for number in range(count):
            agents[number % 2].announce_reduced("api", "429", retry_after=1)
            agents[number % 2].announce_reduced(f"stranger-{number}", "429")
            clock.advance(10)

    announce(100)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        announce(200)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 100_000, "bytes that announcements left behind"
    for agent in agents:
        agent.close()
