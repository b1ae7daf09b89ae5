"""Reservation ids: each is settled only once, whatever fails and however many there are."""

import pytest

from tests.servers.process import until
from tests.service.harness import START
from tidegate import StoreUnavailable
from tidegate.service._config.settings import load_settings
from tidegate.service._decisions import reservation_ids
from tidegate.service._decisions.decider import Decider, Subject
from tidegate.service._decisions.idempotency import KeyedCall
from tidegate.service._decisions.reservation_ids import AlreadySettledError, SettledIds
from tidegate.stores import DelegatingStore, MemoryStore
from tidegate.stores._outage import GuardedStore, open_guarded
from tidegate.testing import ManualClock

K = Subject("api", "k")


async def test_a_full_store_settles_each_reservation_once():
    store = MemoryStore(max_entries=20, clock=ManualClock(start=START))
    decider = Decider(load_settings({"policies": {"api": "100/1h fixed_window"}}).policies, store)
    reservations = [await decider.reserve(K) for _ in range(40)]
    for each in reservations:
        await decider.cancel(each.id)
    for each in reservations:
        with pytest.raises(AlreadySettledError):
            await decider.cancel(each.id)
    assert (await decider.usage(K))["1h"].used == 0
    await decider.close()


class LossyStore(DelegatingStore):
    """Loses calls, or answers to them, that write values."""

    lose = ""

    async def apply_async(self, verb, asks, now=None, at=None, writes=()):
        lost, self.lose = (self.lose, "") if writes else ("", self.lose)
        if lost == "call":
            raise StoreUnavailable("the call was lost")
        decisions = await super().apply_async(verb, asks, now, at, writes)
        if lost == "answer":
            raise StoreUnavailable("the store applied it, and its answer was lost")
        return decisions


@pytest.fixture
async def lossy(shared_url):
    store = LossyStore(open_guarded(shared_url).store)
    decider = Decider(load_settings({"policies": {"api": "100/1h fixed_window"}}).policies, store)
    yield decider
    await decider.close()
    await store.close_async()


def keyed(name="a key", verb="commit"):
    return KeyedCall.read(name.encode(), verb, b"{}")


@pytest.mark.parametrize("lost", ["call", "answer"])
async def test_a_settlement_that_fails_is_made_once_by_its_repetition(lossy, lost):
    """Found in a review: the repetition was answered with success, and nothing was corrected."""
    reserved = await lossy.reserve(K, 5)
    lossy.store.lose = lost
    with pytest.raises(StoreUnavailable):
        await lossy.commit(reserved.id, 8, keyed())
    assert (await lossy.usage(K))["1h"].used == (5 if lost == "call" else 8)
    for _ in range(2):
        await lossy.commit(reserved.id, 8, keyed())
        assert (await lossy.usage(K))["1h"].used == 8
    for other in (keyed("another"), None):
        with pytest.raises(AlreadySettledError):
            await lossy.commit(reserved.id, 9, other)


async def test_a_settlement_without_a_key_whose_call_was_lost_can_be_repeated(lossy):
    reserved = await lossy.reserve(K, 5)
    lossy.store.lose = "call"
    with pytest.raises(StoreUnavailable):
        await lossy.cancel(reserved.id)
    await lossy.cancel(reserved.id)
    assert (await lossy.usage(K))["1h"].used == 0
    with pytest.raises(AlreadySettledError):
        await lossy.cancel(reserved.id)


@pytest.mark.parametrize("lost", ["call", "answer"])
async def test_a_refund_that_fails_is_made_once_by_its_repetition(lossy, lost):
    await lossy.acquire(K, 8)
    lossy.store.lose = lost
    with pytest.raises(StoreUnavailable):
        await lossy.refund(K, 2, keyed(verb="refund"))
    for _ in range(2):
        await lossy.refund(K, 2, keyed(verb="refund"))
        assert (await lossy.usage(K))["1h"].used == 6


async def test_a_refund_with_a_key_during_an_outage_is_refused(shared_url):
    """Found in a review: it was queued, and made again by its repetition after the outage."""
    link = LossyStore(open_guarded(shared_url).store)
    store = GuardedStore(link, background=False)
    decider = Decider(load_settings({"policies": {"api": "100/1h fixed_window"}}).policies, store)
    await decider.acquire(K, 8)
    link.lose = "call"
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await decider.refund(K, 2, keyed(verb="refund"))
    assert store.unavailable
    await decider.refund(K, 1)
    until(lambda: store.maintain() is None, "the outage ends")
    for _ in range(2):
        await decider.refund(K, 2, keyed(verb="refund"))
    assert (await decider.usage(K))["1h"].used == 5
    await decider.close()
    await store.close_async()


async def test_no_id_is_settled_twice_when_settled_ids_are_dropped(monkeypatch):
    clock = ManualClock(start=START)
    store = MemoryStore(clock=clock)
    monkeypatch.setitem(reservation_ids.SETTLED_BY_STORE, store, SettledIds(max_ids=20))  # not 200,000
    decider = Decider(load_settings({"policies": {"api": "100/1h fixed_window"}}).policies, store)
    victim = await decider.reserve(K, 50)
    await decider.cancel(victim.id)
    for _ in range(40):  # they expire later, so that the first id is dropped
        clock.advance(0.01)
        await decider.cancel((await decider.reserve(K, 1, ttl=600)).id)
    assert (await decider.acquire(K, 100)).allowed
    with pytest.raises(AlreadySettledError):
        await decider.cancel(victim.id)
    assert (await decider.usage(K))["1h"].used == 100
    await decider.close()


def test_settled_ids_expire_and_are_bounded():
    settled = SettledIds(max_ids=3)
    assert [settled.add(number, end, 0) for number, end in (("a", 30), ("b", 10), ("c", 20), ("a", 30))] == [
        True, True, True, False,
    ]  # fmt: skip
    assert settled.add("d", 40, 0)  # b, the first to end, makes room
    assert not any(settled.add(number, 50, 0) for number in "acd")
    assert settled.add("e", 50, 31)  # a and c have ended
    assert len(settled._ends) == len(settled._settled) == 2  # noqa: SLF001 - no public attribute shows it
