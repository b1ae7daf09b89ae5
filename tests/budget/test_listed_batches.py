"""Slots of open batches in a shared store: one batch at a time, also after a check that was cancelled or failed."""

import asyncio

import pytest

from tidegate import Limit, Policy, StoreUnavailable
from tidegate.budget.storage.listed_batches import FIRST_SLOTS
from tidegate.budget.storage.listing_store import ListingStore
from tidegate.budget.storage.owners import SLOTS
from tidegate.budget.storage.sqlite import POLICY_PREFIX
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

POLICY = Policy(f"{POLICY_PREFIX}b", [Limit(100, "1d", "fixed_window")])
LEASE = 60.0  # seconds: longer than the lease of an owner


class SharedStore(MemoryStore):
    """A store over a network: the next check is charged, but its reply is late, or lost with the connection."""

    instant = False
    reply = "prompt"
    refund = None

    async def apply_async(self, verb, asks, now=None, at=None):
        decisions = self.apply(verb, asks, now, at)
        if verb == "hold" and self.reply == "late":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:  # every store refunds such a charge when the reply arrives
                asks = [(policy, key, tuple(-cost for cost in costs)) for policy, key, costs in asks]
                self.refund = asks, decisions[0].at
                raise
        if verb == "hold" and self.reply == "lost":
            raise StoreUnavailable("the connection was reset")
        return decisions


async def check(listing, cost=2):
    [decision] = await listing.apply_async("hold", ((POLICY, "k", (cost,)),))
    return listing.batches.take_number(decision.at, (cost,))


@pytest.mark.parametrize("reply", ["late", "lost"])
async def test_a_batch_after_a_failed_check_is_settled_by_its_owner_or_returned_but_not_both(reply):
    clock = ManualClock(1_728_000_000)
    store = SharedStore(clock=clock)
    first, second = (ListingStore(store, "b", None) for _ in range(2))
    for _ in range(FIRST_SLOTS - 1):
        await check(first, 1)
    store.reply = reply
    task = asyncio.create_task(check(first))
    await asyncio.sleep(0)
    task.cancel()
    [error] = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(error, asyncio.CancelledError if reply == "late" else StoreUnavailable)
    store.reply = "prompt"
    clock.advance(1)
    number = await check(first)
    if store.refund is not None:
        store.apply("adjust", store.refund[0], None, store.refund[1])
    # The first process is suspended for longer than its lease: another returns its batches.
    clock.advance(LEASE)
    assert second.run(second.batches.return_ended_flow(POLICY, "k")) == FIRST_SLOTS + (reply == "lost")
    assert await first.run_async(first.batches.was_returned_flow(number))
    first.close()
    second.close()


async def test_the_slots_of_cancelled_checks_are_used_again_after_a_lease():
    clock = ManualClock(1_728_000_000)
    store = SharedStore(clock=clock)
    listing = ListingStore(store, "b", None)
    for _ in range(3):
        for _ in range(20):
            store.reply = "late"
            task = asyncio.create_task(check(listing))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            store.apply("adjust", store.refund[0], None, store.refund[1])
            store.reply = "prompt"
        clock.advance(LEASE)
        listing.heartbeat()
    owner = listing.batches.owner
    (slots,) = store.apply("peek", ((SLOTS, owner.key(), (0,)),))[0].used
    assert slots == 2 * FIRST_SLOTS
    listing.close()
