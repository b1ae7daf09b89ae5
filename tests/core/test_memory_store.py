"""The memory store: bounded, never drops live keys, sweeps expired ones at a constant cost; policies can change."""

import logging
import sys
import tracemalloc
from contextlib import contextmanager

import pytest

from tests.cases import cases
from tests.core.memory_calls import HOUR, NOW, SECOND, ask
from tidegate import ConfigError, Limit, Policy
from tidegate.stores import MemoryStore
from tidegate.stores._values import Collection
from tidegate.testing import ManualClock
from tidegate.testing._reference import answer_of


def count_calls(function):
    """Count the functions that a function calls, however deep: what it costs, without measuring time."""
    events = []
    before = sys.getprofile()
    sys.setprofile(lambda _frame, event, _arg: events.append(event) if event in {"call", "c_call"} else None)
    try:
        function()
    finally:
        sys.setprofile(before)
    return len(events)


@contextmanager
def bounded_memory(most):
    """Check that what the block leaves in memory is at most so many bytes."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[0] <= most
    finally:
        tracemalloc.stop()


# ---- bounded, and never forgetting -----------------------------------------------------------------------------------


def test_a_value_that_is_replaced_leaves_nothing_behind():
    store, collection = MemoryStore(), Collection("c")
    with bounded_memory(100_000):
        for number in range(5_000):
            store.put_value(collection, "a name", b"%d" % number, 86_400)
            store.put_value(collection, "another", b"1", 86_400)
            store.delete_value(collection, "another")
    assert [value.data for value in store.list_values(collection).values()] == [b"4999"]


def test_values_end_in_any_order_of_their_writes():
    store, collection = MemoryStore(clock=ManualClock(NOW // SECOND)), Collection("c")
    for number in range(300):
        store.put_value(collection, f"{number * 7 % 100}", b"", 1 + number * 13 % 100)
    found = store.list_values(collection)
    for seconds in range(1, 102):
        store.clock.advance(1)
        store.delete_value(collection, "no name")
        alive = {name: value for name, value in found.items() if value.ends > store.clock.ns() // 1000}
        assert store.list_values(collection) == alive
        assert len(store._values) == len(alive), seconds  # noqa: SLF001 - ended values are removed, not only hidden


@pytest.mark.parametrize("options", [{"max_entries": 0}, {"max_entries": "5"}, {"overflow": "drop"}])
def test_invalid_options_are_rejected(options):
    with pytest.raises(ConfigError):
        MemoryStore(**options)


@pytest.mark.parametrize("overflow", ["share", "deny"])
def test_a_live_limit_is_never_evicted(overflow):
    store = MemoryStore(max_entries=50, overflow=overflow)
    assert ask(store, "victim")
    for number in range(5000):
        ask(store, f"other-{number}", NOW + number)
        assert store.metrics()["entries"] <= 50
    assert not ask(store, "victim", NOW + 5000)
    assert ask(store, "victim", NOW + HOUR)


def test_expired_keys_are_removed_first():
    store = MemoryStore(max_entries=10)
    short = Policy("short", (Limit(1, "1s"),))
    for number in range(9):
        ask(store, f"short-{number}", policy=short)
    ask(store, "long")
    later = NOW + 10 * SECOND
    for number in range(9):
        assert ask(store, f"new-{number}", later)
    assert store.metrics() == {"entries": 10, "max_entries": 10, "overflowed": 0}
    assert not ask(store, "long", later)


def test_new_keys_share_a_bucket_when_all_others_are_live(caplog):
    policy = Policy("p", (Limit(3, "1h"),))
    store = MemoryStore(max_entries=2)
    with caplog.at_level(logging.WARNING):
        assert [ask(store, key, policy=policy).allowed for key in "ab"] == [True, True]
        assert [ask(store, key, policy=policy).allowed for key in "cdefg"] == [True, True, True, False, False]
        assert [ask(store, key, policy=policy).allowed for key in "ab"] == [True, True], "they keep their own"
    assert store.metrics() == {"entries": 2, "max_entries": 2, "overflowed": 5}
    assert [record.getMessage() for record in caplog.records] == [
        "memory store is full: 2 live keys (max_entries); new keys of a policy share one bucket until some expire"
    ]
    later = NOW + 2 * HOUR
    assert [ask(store, key, later, policy).remaining for key in "cd"] == [2, 2], "there is room again"


def test_new_keys_are_denied_if_configured(caplog):
    store = MemoryStore(max_entries=1, overflow="deny")
    with caplog.at_level(logging.WARNING):
        assert ask(store, "a")
        decision = ask(store, "b")
        assert not decision
        assert decision.remaining == 0
        assert decision.retry_after > 0
        assert not ask(store, "b", verb="peek")
        assert not ask(store, "b", verb="hold")
    assert store.metrics()["overflowed"] == 2
    assert len(caplog.records) == 1
    assert "are denied until" in caplog.records[0].getMessage()
    assert not ask(store, "b", NOW + decision.retry - 1)
    assert ask(store, "b", NOW + 2 * HOUR)


# ---- tidy at a constant price ----------------------------------------------------------------------------------------


def test_memory_returns_to_empty():
    store = MemoryStore()
    for number in range(2000):
        ask(store, f"k{number}", NOW + number)
    assert store.metrics()["entries"] == 2000
    later = NOW + 2 * HOUR
    for number in range(250):
        ask(store, "late", later + number)
    assert store.metrics()["entries"] == 1


def test_no_call_checks_more_than_a_few_keys():
    store = MemoryStore()
    for number in range(3000):
        ask(store, f"k{number}")
    usual = count_calls(lambda: ask(store, "k1"))
    for when in (NOW, NOW + HOUR // 2, NOW + 2 * HOUR, NOW + 2 * HOUR + 1):
        assert count_calls(lambda when=when: ask(store, "k1", when)) <= usual + 1000  # about 10 for each


def test_keys_in_use_are_checked_rarely():
    policy = Policy("busy", (Limit(10**6, "1m", "sliding_log"),))
    store = MemoryStore()

    def ask_all(calls):
        for number in calls:
            ask(store, f"k{number % 10}", NOW + number * SECOND // 100, policy)

    usual = min(count_calls(lambda call=call: ask_all([call])) for call in range(20))
    assert count_calls(lambda: ask_all(range(20, 20_000))) <= 20_000 * usual + 10_000, "one look a minute at each key"


@cases("length", ["10s", "61s", "1h", "30d"])
def test_keys_are_removed_no_later_than_a_32nd_of_their_lifetime(length):
    """Found by reading: it was a 16th."""
    policy = Policy("p", (Limit(1, length, "fixed_window"),))
    period = policy.limits[0].length
    for offset in range(0, 1000, 97):
        store, now = MemoryStore(), NOW + offset * SECOND
        ends = now + round(ask(store, "k", now, policy).reset_after * SECOND)
        for when, entries in ((ends - 1, 1), (ends + max(2**16, period // 32 + 1), 0)):
            ask(store, "other", when, verb="peek")
            assert store.metrics()["entries"] == entries


def test_keys_of_an_unused_policy_are_removed_too():
    """Found by reading: only the table of the called policy was swept."""
    old, new = Policy("old", (Limit(1, "1s"),)), Policy("new", (Limit(5, "1s", "sliding_log"),))
    store = MemoryStore()
    for number in range(500):
        ask(store, f"k{number}", policy=old)
    for number in range(200):
        ask(store, "k", NOW + HOUR + number * SECOND, new)
    assert store.metrics()["entries"] == 1


@pytest.mark.parametrize("verb", ["reset", "adjust"])
def test_keys_that_are_reset_at_once_leave_no_entries(verb):
    """Found by reading: each left an entry in the wheel until the end of its period."""
    slots = Policy("slots", (Limit(1, "1h", "concurrency"),))
    store = MemoryStore(max_entries=1000)
    with bounded_memory(150_000):  # of 5,000 keys, those of 500
        for number in range(5000):
            assert ask(store, f"k{number}", NOW + number, slots)
            ask(store, f"k{number}", NOW + number, slots, (-1,), verb)
    assert store.metrics()["entries"] == 0


def test_a_key_that_is_reset_repeatedly_is_kept_once():
    store = MemoryStore()
    with bounded_memory(20_000):
        for number in range(5000):
            assert ask(store, "k", NOW + number)
            ask(store, "k", NOW + number, costs=(0,), verb="reset")


def test_expired_keys_among_live_ones_are_found():
    store = MemoryStore()
    live = [f"live-{number}" for number in range(300)]
    for key in live:
        ask(store, key)
    with bounded_memory(300_000):
        for number in range(3000):
            ask(store, f"k{number}", NOW + number * SECOND // 10)
            ask(store, f"k{number}", NOW + number * SECOND // 10, costs=(0,), verb="reset")
    assert store.metrics()["entries"] == len(live)
    assert not any(ask(store, key, NOW + 300 * SECOND) for key in live)
    for number in range(50):
        ask(store, "late", NOW + 3 * HOUR + number)
    assert store.metrics()["entries"] == 1


def test_peeks_and_denials_store_nothing():
    store = MemoryStore()
    for number in range(100):
        ask(store, f"k{number}", verb="peek")
        ask(store, f"k{number}", costs=(2,))
        ask(store, f"k{number}", costs=(0,))
        ask(store, f"k{number}", costs=(-1,), verb="adjust")
    assert store.metrics()["entries"] == 0


def test_a_bucket_key_is_small():
    store = MemoryStore()
    with bounded_memory(10_000 * 320):
        for number in range(10_000):
            ask(store, f"key-{number}", NOW + number)


# ---- policies that share a store, and change -------------------------------------------------------------------------


def test_policies_with_different_names_are_separate():
    store = MemoryStore()
    one, two = (Policy(name, (Limit(1, "1h"),)) for name in ("one", "two"))
    assert ask(store, "k", policy=one)
    assert ask(store, "k", policy=two)
    assert not ask(store, "k", policy=one)


def test_a_policy_changes_under_its_name():
    hour, minute = Limit(5, "1h"), Limit(9, "1m", "sliding_log")
    versions = {
        "one": (hour,),
        "added": (hour, minute),
        "turned": (minute, hour),
        "renamed": (Limit(5, "1h", name="new"),),
        "other algorithm": (Limit(5, "1h", "fixed_window"),),
        "lowered": (Limit(2, "1h"),),
    }
    policies = {name: Policy("p", rules) for name, rules in versions.items()}
    store = MemoryStore()

    def left(name, costs):
        return [view[0] for view in ask(store, "k", policy=policies[name], costs=costs).views]

    assert left("one", (1,)) == [4]
    assert left("added", (1, 1)) == [3, 8]
    assert left("turned", (1, 1)) == [7, 2]
    assert left("renamed", (1,)) == [4], "another name starts afresh"
    assert left("other algorithm", (1,)) == [4], "another algorithm, too"
    assert left("lowered", (0,)) == [2], "and those that were left out are still known"
    assert left("lowered", (1,)) == [1]
    assert left("one", (0,)) == [1]
    assert left("turned", (1, 0)) == [6, 1]
    assert left("renamed", (0,)) == [4]


def test_reset_clears_limits_that_the_policy_no_longer_has():
    """Found by reading: their usage counted again when they came back."""
    both = Policy("p", (Limit(1, "1h"), Limit(1, "1d")))
    store = MemoryStore()
    ask(store, "k", policy=both, costs=(1, 1))
    ask(store, "k", policy=Policy("p", (Limit(1, "1h"),)), costs=(0,), verb="reset")
    assert ask(store, "k", policy=both, costs=(1, 1))


def test_keys_do_not_collide():
    store = MemoryStore()
    keys = [("a/b", "c"), ("a", "b/c"), ("a", "b", "c"), "a/b/c", ("a%2Fb", "c"), "", ("", "")]
    assert all(ask(store, key) for key in keys)
    assert not any(ask(store, key) for key in keys)


# ---- decisions are data ----------------------------------------------------------------------------------------------


@cases("algorithm", ["token_bucket", "fixed_window", "sliding_window", "sliding_log", "concurrency"])
@cases("verb", ["acquire", "peek", "hold"])
def test_a_decision_does_not_change_later(algorithm, verb):
    """Found by reading: the result of a peek at a log changed with the next call."""
    policy = Policy("p", (Limit(9, "1h", algorithm),))
    store = MemoryStore()
    ask(store, "k", policy=policy)
    decision = ask(store, "k", NOW + 1, policy, (2,), verb)
    refused = ask(store, "k", NOW + 1, policy, (9,))
    before, refusal = answer_of(decision), answer_of(refused)
    ask(store, "k", NOW + 2, policy, (4,))
    ask(store, "k", NOW + 3, policy, (-1,), "adjust")
    ask(store, "k", NOW + 3, policy, (-2,), "adjust", at=NOW)
    ask(store, "k", NOW + 4, policy, (1,))
    assert answer_of(decision) == before
    assert answer_of(refused) == refusal
