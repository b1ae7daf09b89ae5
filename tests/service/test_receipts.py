"""Receipts over a store in memory: what was settled takes no entry of the store, and is remembered all the same."""

import pytest

from tests.service.harness import START
from tidegate.service.desk import Desk, Subject
from tidegate.service.receipts import AlreadySettledError, Marks
from tidegate.service.settings import load_settings
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

K = Subject("api", "k")


async def test_a_full_store_settles_each_reservation_once():
    store = MemoryStore(max_entries=20, clock=ManualClock(start=START))
    desk = Desk(load_settings({"policies": {"api": "100/1h fixed_window"}}).rules, store)
    held = [await desk.reserve(K) for _ in range(40)]
    for each in held:
        await desk.cancel(each.id)
    for each in held:
        with pytest.raises(AlreadySettledError):
            await desk.cancel(each.id)
    assert (await desk.usage(K))["1h"].used == 0
    await desk.close()


async def test_what_could_not_be_settled_can_be_tried_again():
    store = MemoryStore(clock=ManualClock(start=START))
    desk = Desk(load_settings({"policies": {"api": "100/1h fixed_window"}}).rules, store)
    receipt = desk._receipts.read((await desk.reserve(K)).id)  # noqa: SLF001 - a failure in between is not made otherwise

    async def fail():
        raise OSError

    async def settle():
        settled.append(receipt)

    settled = []
    with pytest.raises(OSError, match=r"^$"):
        await desk._receipts.settle(receipt, fail)  # noqa: SLF001 - as above
    await desk._receipts.settle(receipt, settle)  # noqa: SLF001 - as above
    with pytest.raises(AlreadySettledError):
        await desk._receipts.settle(receipt, settle)  # noqa: SLF001 - as above
    assert settled == [receipt]
    await desk.close()


def test_marks_end_and_are_bounded():
    marks = Marks(most=3)
    assert [marks.take(number, end, 0) for number, end in (("a", 30), ("b", 10), ("c", 20), ("a", 30))] == [
        True, True, True, False,
    ]  # fmt: skip
    assert marks.take("d", 40, 0)  # b, the first to end, makes room
    assert not any(marks.take(number, 50, 0) for number in "acd")
    assert marks.take("e", 50, 31)  # a and c have ended
    assert len(marks._ends) == len(marks._settled) == 2  # noqa: SLF001 - nothing else tells
