"""However an AsyncLimiter asks a memory store, it gets the decisions of `Store.apply`."""

import pytest

from tests.cases import cases
from tests.core.memory_calls import OnlyApply
from tidegate import AsyncLimiter, Closed, ConfigError, Limit, Policy
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

VERBS = ("try_acquire", "peek", "usage")
RULES = [
    "100/1h",
    "100/1h sliding_log",
    ["100/1h", "7/1m sliding_log name=log"],
    ["100/1h", Limit(1000, "1m", unit="tokens")],
    [Limit(100, "1h", unit="files"), Limit(1000, "1m", unit="tokens")],
]


def limiter_of(rules, kind=AsyncLimiter, store=None, **options):
    return kind(rules, store=store or MemoryStore(clock=ManualClock(1000)), **options)


async def outcome(call, *arguments):
    try:
        found = await call(*arguments)
    except ConfigError as error:
        return str(error)
    return found if isinstance(found, dict) else (found.allowed, found.at, found.views, found.policy_limits)


@cases("rules", RULES)
@cases("key", ["known", "new", ("a", "new"), ["a", "list"], 5])
@cases("cost", [0, 1, 3, 101, {"requests": 2}, {}, 2.5, -1, 2**53])
async def test_a_limiter_accepts_and_rejects_the_same_calls_as_one_on_any_store(rules, key, cost):
    limiters = limiter_of(rules), limiter_of(rules, store=OnlyApply(MemoryStore(clock=ManualClock(1000))))
    for limiter in limiters:
        await limiter.try_acquire("known", {limiter.policy.limits[0].unit: 2})
    for verb in VERBS:
        arguments = (key,) if verb == "usage" else (key, cost)
        first, second = [await outcome(getattr(limiter, verb), *arguments) for limiter in limiters]
        assert first == second


async def test_methods_that_were_kept_follow_the_current_rules_and_stop_with_the_limiter():
    limiter = limiter_of("5/1h")
    acquire, peek, usage = (getattr(limiter, verb) for verb in VERBS)
    assert await acquire("k", 2)
    limiter.update("9/1h")
    assert (await peek("k", 0)).limits[0].quota == 9
    assert (await usage("k"))["1h"].quota == 9
    assert (await acquire("k", 3)).limits[0].quota == 9
    await limiter.close()
    for call in (acquire, peek, usage):
        with pytest.raises(Closed):
            await call("k")


async def test_a_method_that_was_kept_follows_a_policy_that_became_shadow():
    """Found by reading: who had kept `limiter.try_acquire` was denied by a policy that denies nobody."""
    limiter = limiter_of("1/1h")
    acquire = limiter.try_acquire
    assert await acquire("k")
    limiter.update(Policy("default", limiter.policy.limits, "shadow"))
    assert await acquire("k")
    assert not (await acquire("k")).within_limits


async def test_observers_and_subclasses_are_called():
    seen = []

    class Counting(AsyncLimiter):
        async def peek(self, key, cost=1):
            seen.append("subclass")
            return await super().peek(key, cost)

    observed = limiter_of("5/1h", observer=lambda record: seen.append(record.verb))
    await observed.peek("k")
    await observed.usage("k")
    await limiter_of("5/1h", Counting).peek("k")
    assert seen == ["peek", "peek", "subclass"]
