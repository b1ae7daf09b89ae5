"""A client disconnects and its task is cancelled at any step of the event loop: only answered calls stay charged."""

import asyncio
import random
from contextlib import suppress
from functools import partial

import pytest

from tidegate.service._config.settings import load_settings
from tidegate.service._decisions import blocks
from tidegate.service._decisions.decider import Decider, Subject
from tidegate.service._decisions.reservation_ids import AlreadySettledError
from tidegate.stores import MemoryStore
from tidegate.stores._cancellation import refund_if_cancelled
from tidegate.stores._outage import GuardedStore

POLICIES = {
    "api": "1000000/52w fixed_window",
    "slots": "1000000/1h concurrency",
    "shadow": {"limits": "1000000/52w fixed_window", "mode": "shadow"},
    "one": "1/1h concurrency",
}


class DelayedStore(MemoryStore):
    """A store that decides after a few iterations of the event loop, like a store over a network."""

    instant = False

    async def apply_async(self, verb, asks, now=None, at=None, writes=()):
        call = self._apply_later(verb, asks, now, at, writes)
        return await refund_if_cancelled(self, call, verb, asks, now, writes)

    async def _apply_later(self, verb, asks, now, at, writes):
        for _ in range(2):
            await asyncio.sleep(0)
        decisions = self.apply(verb, asks, now, at, writes)
        for _ in range(2):
            await asyncio.sleep(0)
        return decisions

    async def get_value_async(self, collection, name, now=None):
        for _ in range(4):
            await asyncio.sleep(0)
        return self.get_value(collection, name, now)


@pytest.fixture
async def decider():
    decider = Decider(load_settings({"policies": POLICIES}).policies, GuardedStore(DelayedStore()), secrets=("s" * 16,))
    await decider.probe()
    yield decider
    await decider.close()


async def used(decider, policy, key="k"):
    return sum(each.used for each in (await decider.usage(Subject(policy, key))).values())


async def wait_until_charged(decider, policy, answered, key="k"):
    """Wait until what was charged is what was answered; return both."""
    for _ in range(2000):
        charged = await used(decider, policy, key)
        if charged == answered:
            break
    return charged, answered


async def cancelled_after(steps, call):
    """Start a call and cancel it after so many iterations of the event loop; return its result, or None."""
    task = asyncio.ensure_future(call)
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    [result] = await asyncio.gather(task, return_exceptions=True)
    assert not isinstance(result, Exception), result
    return None if isinstance(result, asyncio.CancelledError) else result


@pytest.mark.parametrize("policy", ["api", "slots"])
async def test_cancelled_acquires_and_batches_are_refunded(decider, policy):
    rng, answered = random.Random(1), 0
    asks = [(Subject(policy, "k"), 1 + number % 3) for number in range(10)]
    for number in range(200):
        if number % 2:
            decision = await cancelled_after(rng.randrange(14), decider.acquire(Subject(policy, "k"), 2))
            answered += 2 * bool(decision)
        else:
            decisions = await cancelled_after(rng.randrange(20), decider.batch(asks))
            answered += sum(cost for (_, cost), decision in zip(asks, decisions or [], strict=False) if decision)
    charged, answered = await wait_until_charged(decider, policy, answered)
    assert charged == answered > 0


async def test_cancelled_acquire_together_is_refunded(decider):
    """A request to Envoy's rate limit service: the enforced policies together, then each policy in shadow mode."""
    policies = {name: decider.policies.entries[name].policy for name in POLICIES}
    asks = [(policies["api"], "k", 1), (policies["shadow"], "k", 1), (policies["shadow"], "other", 2)]
    answered = 0
    for number in range(120):
        answered += bool(await cancelled_after(number % 24, decider.acquire_together(asks)))
    assert await wait_until_charged(decider, "api", answered) == (answered, answered)
    assert await wait_until_charged(decider, "shadow", answered) == (answered, answered)
    assert await wait_until_charged(decider, "shadow", 2 * answered, "other") == (2 * answered, 2 * answered)
    assert answered > 0


@pytest.mark.parametrize("verb", ["acquire", "reserve"])
async def test_cancelled_waits_are_refunded_while_a_block_exists(decider, monkeypatch, verb):
    """After a wait, the decider asks the store whether the key was blocked meanwhile."""
    monkeypatch.setattr(blocks, "CACHE_TTL", 0)  # so that each call asks the store
    await decider.block(Subject("api", "somebody else"), 3600)
    answered = 0
    for number in range(120):
        result = await cancelled_after(number % 30, getattr(decider, verb)(Subject("api", "k"), timeout=5))
        answered += bool(result)
    charged, answered = await wait_until_charged(decider, "api", answered)
    assert charged == answered > 0


async def test_cancelled_leases_are_refunded(decider):
    answered = 0
    for number in range(60):
        lease = await cancelled_after(number % 14, decider.lease(Subject("api", "k"), 1, 5))
        answered += lease.permits if lease else 0
    charged, answered = await wait_until_charged(decider, "api", answered)
    assert charged == answered > 0


@pytest.mark.parametrize("verb", ["commit", "cancel"])
async def test_a_cancelled_settlement_is_applied_once(decider, verb):
    """A cancelled settlement is applied, or was not begun and can be repeated; it is never applied twice."""
    for steps in range(24):
        await decider.reset(Subject("api", "k"))
        await decider.acquire(Subject("api", "k"), 50)
        reservation = await decider.reserve(Subject("api", "k"), 10)
        settle = partial(decider.commit, actual=4) if verb == "commit" else decider.cancel
        await cancelled_after(steps, settle(reservation.id))
        with suppress(AlreadySettledError):
            await settle(reservation.id)
        expected = 54 if verb == "commit" else 50
        assert await wait_until_charged(decider, "api", expected) == (expected, expected)
        with pytest.raises(AlreadySettledError):
            await settle(reservation.id)


async def test_ten_cancelled_calls_hold_no_slots(decider):
    for number in range(10):
        await cancelled_after(3 + number % 3, decider.acquire(Subject("one", "k")))
    assert await wait_until_charged(decider, "one", 0) == (0, 0)
    assert await decider.acquire(Subject("one", "k"))
