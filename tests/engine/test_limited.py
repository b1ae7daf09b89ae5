"""Limits for blocks and functions."""

import asyncio

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
