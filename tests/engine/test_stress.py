"""Threads and tasks at once on one key: exactly the limit is admitted, round after round."""

import asyncio
import sys
import threading

import pytest

from tidegate import AsyncLimiter, Limit, Limiter
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

ROUNDS = 1_000
THREADS = 8
TASKS = 200


@pytest.fixture(autouse=True)
def switching_often():
    """Make the interpreter switch threads as often as possible."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def in_threads(work):
    barrier = threading.Barrier(THREADS)
    counts = [0] * THREADS
    failures = []

    def run(number):
        try:
            barrier.wait()
            counts[number] = work()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    return sum(counts)


@pytest.mark.parametrize(
    "rule", ["50/1h", "50/1h sliding_log", ["50/1h", "80/1d fixed_window", "60/1w sliding_window"]]
)
def test_threads_admit_exactly_the_limit(rule):
    clock = ManualClock(1_728_000_000)
    limiter = Limiter(rule, clock=clock)

    def work():
        return sum(limiter.try_acquire(f"k{turn}").allowed for turn in range(ROUNDS // 10) for _ in range(10))

    assert in_threads(work) == 50 * (ROUNDS // 10)


def test_a_thousand_rounds_on_one_key():
    limiter = Limiter("20/1h", clock=ManualClock(1_728_000_000))
    barrier = threading.Barrier(THREADS, action=lambda: limiter.reset("k"))

    def work():
        admitted = 0
        for _ in range(ROUNDS):
            barrier.wait()
            admitted += sum(limiter.try_acquire("k").allowed for _ in range(4))
        return admitted

    assert in_threads(work) == 20 * ROUNDS


def test_tasks_admit_exactly_the_limit_a_thousand_times():
    async def main():
        limiter = AsyncLimiter("50/1h", clock=ManualClock(1_728_000_000))

        async def one():
            await asyncio.sleep(0)
            return (await limiter.try_acquire("k")).allowed

        for _ in range(ROUNDS):
            assert sum(await asyncio.gather(*(one() for _ in range(TASKS)))) == 50
            await limiter.reset("k")

    asyncio.run(main())


def test_threads_and_event_loops_share_one_store():
    store = MemoryStore(clock=ManualClock(1_728_000_000))
    limiter = Limiter("300/1h", store=store)

    def work():
        async def tasks():
            shared = AsyncLimiter("300/1h", store=store)
            return sum([bool(await shared.try_acquire("k")) for _ in range(50)])

        return sum(limiter.try_acquire("k").allowed for _ in range(50)) + asyncio.run(tasks())

    assert in_threads(work) == 300


def test_all_waiting_threads_are_served():
    limiter = Limiter("500/1s", ageing=1)

    def work():
        for _ in range(100):
            limiter.acquire("k", timeout=30)
        return 100

    assert in_threads(work) == 800
    assert limiter.waiting == 0


def test_slots_are_never_held_twice():
    limiter = Limiter(Limit(3, "1h", "concurrency"))
    inside, most, lock = 0, 0, threading.Lock()

    def work():
        nonlocal inside, most
        for _ in range(50):
            with limiter.limited("k"):
                with lock:
                    inside += 1
                    most = max(most, inside)
                with lock:
                    inside -= 1
        return 50

    assert in_threads(work) == 400
    assert most <= 3
    assert limiter.usage("k")["1h"].used == 0
