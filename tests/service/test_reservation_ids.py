"""Reservation ids: each is settled only once, whatever fails and however many there are."""

import pytest

from tests.service.harness import START
from tidegate import StoreUnavailable
from tidegate.service.config.settings import load_settings
from tidegate.service.decisions import reservation_ids
from tidegate.service.decisions.decider import Decider, Subject
from tidegate.service.decisions.reservation_ids import AlreadySettledError, SettledIds
from tidegate.stores import MemoryStore
from tidegate.stores.outage import open_guarded
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


async def test_a_failed_settlement_is_not_repeated(shared_url):
    store = open_guarded(shared_url)
    decider = Decider(load_settings({"policies": {"api": "100/1h fixed_window"}}).policies, store)
    reservation_id = await decider._reservation_ids.read((await decider.reserve(K, 5)).id)  # noqa: SLF001 - a failure in between is not made otherwise
    settled = []

    async def settle():
        settled.append(reservation_id)
        raise StoreUnavailable("the store applied it, and its response was lost")

    with pytest.raises(StoreUnavailable):
        await decider._reservation_ids.settle(reservation_id, settle)  # noqa: SLF001 - as above
    for _ in range(2):
        with pytest.raises(AlreadySettledError):
            await decider._reservation_ids.settle(reservation_id, settle)  # noqa: SLF001 - as above
    assert settled == [reservation_id]
    await decider.close()


async def test_no_id_is_settled_twice_when_settled_ids_are_dropped(monkeypatch):
    clock = ManualClock(start=START)
    decider = Decider(load_settings({"policies": {"api": "100/1h fixed_window"}}).policies, MemoryStore(clock=clock))
    monkeypatch.setitem(reservation_ids.SETTLED_BY_STORE, decider.store, SettledIds(max_ids=20))
    decider._reservation_ids._settled = reservation_ids.SETTLED_BY_STORE[decider.store]  # noqa: SLF001 - fewer than 200,000 will do
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
