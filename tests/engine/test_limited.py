"""Limits for blocks and functions."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from tidegate import AsyncLimiter, ConfigError, Denied, Limit, Limiter
from tidegate.testing import ManualClock

START = 1_728_000_000


@pytest.fixture
def clock():
    return ManualClock(START)


def test_a_block_waits_for_its_permit(clock):
    limiter = Limiter("1/10s", clock=clock)
    with limiter.limited("k"):
        pass
    with limiter.limited("k") as decision:
        assert decision.allowed
    assert clock.now() == START + 10


def test_a_decorated_function_keeps_its_name_arguments_and_result(clock):
    limiter = Limiter("1/10s", clock=clock)

    @limiter.limited("k", timeout=1)
    def double(x, *, y=1):
        """Twice."""
        return 2 * x + y

    assert double.__name__ == "double"
    assert double.__doc__ == "Twice."
    assert double(3, y=4) == 10
    with pytest.raises(Denied):
        double(3)


def test_key_and_cost_may_be_functions_of_the_arguments(clock):
    limiter = Limiter("3/1h", clock=clock)

    @limiter.limited(lambda user, n: ("user", user), cost=lambda user, n: n, timeout=0)
    def fetch(user, n):
        return n

    assert fetch("ann", 3) == 3
    assert fetch("bob", 2) == 2
    with pytest.raises(Denied):
        fetch("bob", n=2)
    with pytest.raises(ConfigError, match="as a decorator"), limiter.limited(lambda: "k"):
        pass


def test_slots_are_held_for_the_block_and_released_after_an_error(clock):
    limiter = Limiter([Limit(1, "1h", "concurrency", name="slots"), "100/1h"], clock=clock)
    with limiter.limited("k"):
        assert not limiter.try_acquire("k")
    with pytest.raises(ZeroDivisionError), limiter.limited("k"):
        raise ZeroDivisionError
    assert limiter.try_acquire("k")
    assert limiter.usage("k")["1h"].used == 3


def test_threads_that_share_a_block_release_their_own_slots(clock):
    limiter = Limiter(Limit(2, "1m", "concurrency", name="slots"), clock=clock)
    block = limiter.limited("k")
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        first.submit(block.__enter__).result()
        clock.advance(30)
        second.submit(block.__enter__).result()
        first.submit(block.__exit__, None, None, None).result()
        clock.advance(31)  # the slot of the first block would have expired by now
        assert limiter.usage("k")["slots"].used == 1, "the second block is still running"
        second.submit(block.__exit__, None, None, None).result()
    assert limiter.usage("k")["slots"].used == 0


def test_nested_blocks_of_one_object_release_their_own_slots(clock):
    limiter = Limiter(Limit(2, "1m", "concurrency", name="slots"), clock=clock)
    block = limiter.limited("k")
    with block:
        clock.advance(30)
        with block:
            pass
        clock.advance(29)
        assert limiter.usage("k")["slots"].used == 1
        clock.advance(1)
        assert limiter.usage("k")["slots"].used == 0, "the lease of the outer block has ended"


async def enter_in_tasks(block, steps):
    """Enter a block in two tasks, and leave it in the first; call `between` and `after` around that."""
    between, after = steps
    entered, leave = asyncio.Event(), asyncio.Event()

    async def first():
        async with block:
            entered.set()
            await leave.wait()

    task = asyncio.create_task(first())
    await entered.wait()
    between()
    async with block:
        leave.set()
        await task
        await after()


async def test_tasks_that_share_a_block_release_their_own_slots(clock):
    limiter = AsyncLimiter(Limit(2, "1m", "concurrency", name="slots"), clock=clock)

    async def after():
        clock.advance(31)
        assert (await limiter.usage("k"))["slots"].used == 1, "the second block is still running"

    await enter_in_tasks(limiter.limited("k"), (lambda: clock.advance(30), after))
    assert (await limiter.usage("k"))["slots"].used == 0


async def test_tasks_that_share_a_reservation_to_be_made_settle_their_own(clock):
    limiter = AsyncLimiter(Limit(2, "1m", "concurrency", name="slots"), clock=clock)

    async def after():
        clock.advance(31)
        assert (await limiter.usage("k"))["slots"].used == 1, "the second reservation is still open"

    await enter_in_tasks(limiter.reserve("k", ttl=300), (lambda: clock.advance(30), after))
    assert (await limiter.usage("k"))["slots"].used == 0


async def test_a_block_may_be_left_by_another_task_than_the_one_that_entered_it(clock):
    limiter = AsyncLimiter(Limit(2, "1m", "concurrency", name="slots"), clock=clock)
    block = limiter.limited("k")
    await asyncio.create_task(block.__aenter__())
    await asyncio.create_task(block.__aexit__(None, None, None))
    assert (await limiter.usage("k"))["slots"].used == 0


async def test_coroutine_functions_and_async_blocks(clock):
    limiter = AsyncLimiter([Limit(1, "1h", "concurrency", name="slots"), "100/1h"], clock=clock)
    running = []

    @limiter.limited(lambda who: who)
    async def work(who):
        running.append(who)
        assert running.count(who) == 1
        await asyncio.sleep(0)
        running.remove(who)
        return who

    assert await asyncio.gather(*(work(who) for who in "aabbab")) == list("aabbab")
    async with limiter.limited("k"):
        assert not await limiter.try_acquire("k")
    assert await limiter.try_acquire("k")
    assert asyncio.iscoroutinefunction(work)


def test_sync_and_async_functions_need_the_matching_limiter():
    async def coroutine():
        pass

    def function():
        pass

    with pytest.raises(ConfigError, match="limit it with an AsyncLimiter"):
        Limiter("1/1s").limited("k")(coroutine)
    with pytest.raises(ConfigError, match="limit it with a Limiter"):
        AsyncLimiter("1/1s").limited("k")(function)
