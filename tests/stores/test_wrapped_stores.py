"""A store that wraps another has the traits of the one that it wraps."""

import pytest

from tests.outage.simulation import START, Link
from tidegate import Policy, StoreUnavailable
from tidegate.adaptive._gated_store import GatedStore
from tidegate.stores import MemoryStore
from tidegate.stores._lease import LeasedStore
from tidegate.stores._outage import GuardedStore
from tidegate.testing import ManualClock

POLICY = Policy("p", ("100/1h",), on_store_error="allow")


@pytest.fixture(params=[LeasedStore, GatedStore], ids=["leased", "gated"])
def wrap(request):
    return request.param


@pytest.fixture
def link():
    return Link(MemoryStore(clock=ManualClock(START)))


@pytest.fixture
def lost(wrap, link):
    """Return a wrapped store during an outage."""
    guarded = GuardedStore(link, clock=link.clock, background=False)
    store = wrap(guarded)
    store.apply_one("acquire", POLICY, "k", (1,))
    link.state = "lost"
    guarded.apply_one("peek", POLICY, "other", (1,))
    assert guarded.unavailable
    return store


def test_an_outage_of_the_wrapped_store_is_visible(lost):
    assert lost.unavailable


def test_a_wrapper_tells_that_the_store_has_a_fallback(lost):
    assert lost.has_fallback


def test_a_question_to_the_store_itself_is_not_answered_without_it(lost):
    with pytest.raises(StoreUnavailable):
        lost.ask_store("acquire", ((POLICY, "other", (1,)),))


async def test_a_question_of_a_task_to_the_store_itself_is_not_answered_without_it(lost):
    with pytest.raises(StoreUnavailable):
        await lost.ask_store_async("acquire", ((POLICY, "other", (1,)),))


def test_outages_of_the_wrapped_store_are_reported(wrap, link):
    reports = []
    store = wrap(GuardedStore(link, clock=link.clock, background=False))
    store.report_outages(reports.append)
    store.apply_one("acquire", POLICY, "k", (1,))
    link.state = "lost"
    store.apply("peek", ((POLICY, "other", (1,)),))
    assert reports


def test_a_wrapped_store_is_cleared(wrap):
    store = wrap(MemoryStore(clock=ManualClock(START)))
    unused = store.apply_one("peek", POLICY, "other", (0,)).remaining
    store.apply_one("acquire", POLICY, "k", (60,))
    assert store.clear()
    assert store.apply_one("peek", POLICY, "k", (0,)).remaining == unused


def test_the_number_of_keys_of_a_wrapped_store_is_bounded(wrap):
    store = wrap(MemoryStore(clock=ManualClock(START)))
    store.limit_entries(3)
    assert store.metrics()["max_entries"] == 3
