"""The memory store when it is full: groups of keys, the overflow bucket and batches."""

from hypothesis import given
from hypothesis import strategies as st

from tests.core.memory_calls import HOUR, HOURLY, NOW, SECOND, ask
from tidegate import Limit, Policy
from tidegate.stores import MemoryStore


def group_of(key):
    """Return the group of a key: the part before the dash."""
    return key.partition("-")[0] if "-" in key else None


def test_a_group_gets_half_of_the_store_and_only_its_overflow_shares_a_bucket(caplog):
    store = MemoryStore(max_entries=100, group_of=group_of)
    assert sum(ask(store, f"flood-{number}").allowed for number in range(1000)) == 50 + 1
    assert store.metrics() == {"entries": 51, "max_entries": 100, "overflowed": 950}
    for number in range(40):
        assert ask(store, f"client {number}")
        assert not ask(store, f"client {number}")
    assert not ask(store, "flood-1000")
    assert [record.getMessage() for record in caplog.records] == [
        (
            "memory store: 51 live keys; group flood is over its share of max_entries, its new keys share one bucket "
            "until some expire"
        )
    ]
    assert ask(store, "flood-1000", NOW + 2 * HOUR)


def test_the_overflow_of_a_group_is_denied_if_configured():
    store = MemoryStore(max_entries=100, overflow="deny", group_of=group_of)
    assert sum(ask(store, f"flood-{number}").allowed for number in range(1000)) == 50
    assert ask(store, "another")


def test_no_group_is_bounded_before_half_of_the_store_is_used():
    store = MemoryStore(max_entries=100, group_of=group_of)
    assert all(ask(store, f"all-{number}") for number in range(50))


def test_a_batch_of_one_group_is_charged_whole():
    store = MemoryStore(max_entries=10, group_of=group_of)
    keys = [f"flood-{number}" for number in range(9)]
    assert all(store.apply("acquire", [(HOURLY, key, (1,)) for key in keys[:2]], NOW))
    for pair in (keys[2:4], keys[4:6], keys[6:8]):
        for decision, key in zip(store.apply("acquire", [(HOURLY, key, (1,)) for key in pair], NOW), pair, strict=True):
            assert not (decision and ask(store, key))  # what was allowed was charged


def test_existing_keys_count_towards_their_group():
    store = MemoryStore(max_entries=100)
    for number in range(60):
        ask(store, f"flood-{number}")
    store.limit_groups(group_of)
    assert ask(store, "flood-60")  # in the bucket that its further keys share
    assert not ask(store, "flood-61")
    assert ask(store, "client")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a-{}", "b-{}", "c-{}", "{}"]),
            st.integers(0, 12),
            st.sampled_from(["acquire", "acquire", "acquire", "reset", "adjust", "peek"]),
            st.sampled_from([0, 0, 0, SECOND, HOUR, 3 * HOUR]),
        ),
        max_size=150,
    )
)
def test_groups_are_counted_correctly_in_any_history(calls):
    store = MemoryStore(max_entries=16, group_of=group_of)
    now = NOW
    for form, number, verb, gap in calls:
        now += gap
        key = form.format(number)
        entries = store.metrics()["entries"]
        free = ask(store, key, now, verb="peek").allowed
        ask(store, key, now, verb=verb, costs=(-1,) if verb == "adjust" else (1,))
        assert store.metrics()["entries"] <= 16
        if verb == "acquire" and free and entries < 8:
            assert not ask(store, key, now, verb="peek")  # before half of the store is used, every key is kept
    now += 10 * HOUR
    for _ in range(20):
        ask(store, "late", now, verb="peek")
    assert store.metrics()["entries"] == 0
    # Nothing that was removed counts towards its group: it gets its half, and one bucket for all other keys.
    assert sum(ask(store, f"a-{number}", now).allowed for number in range(30)) == 8 + 1
    assert store.metrics()["entries"] == 9


def test_policies_have_separate_overflow_buckets():
    store = MemoryStore(max_entries=1)
    other = Policy("other", (Limit(1, "1h"),))
    assert ask(store, "a")
    assert ask(store, "b")
    assert ask(store, "b", policy=other)
    assert not ask(store, "c")
    assert not ask(store, "c", policy=other)


def test_no_key_collides_with_the_overflow_key():
    """Found by reading: the key ("overflow", "") was the shared key of a full store."""
    store = MemoryStore(max_entries=1)
    assert ask(store, "a")
    assert ask(store, "b")
    assert not ask(store, "c")
    roomy = MemoryStore()
    for part in ("", "None", "overflow"):
        assert ask(roomy, ("overflow", part))


def test_a_batch_does_not_exceed_the_bound():
    """Found by reading: every new key of a batch used the same last free entry."""
    store = MemoryStore(max_entries=3)
    ask(store, "a")
    decisions = store.apply("acquire", [(HOURLY, key, (0 if key == "d" else 1,)) for key in "bcd"], NOW)
    assert all(decisions)
    assert store.metrics()["entries"] == 3
    ask(store, "e")
    assert store.metrics()["entries"] == 3


def test_two_keys_of_a_batch_in_the_overflow_are_both_charged():
    """Found by reading: both were charged to the same state, and the second overwrote the first."""
    policy = Policy("p", (Limit(3, "1h"),))
    store = MemoryStore(max_entries=1)
    ask(store, "a", policy=policy)
    first = store.apply("acquire", [(policy, "b", (1,)), (policy, "c", (1,))], NOW)
    assert [decision.remaining for decision in first] == [1, 1]
    second = store.apply("acquire", [(policy, "b", (1,)), (policy, "c", (1,))], NOW)
    assert [decision.allowed for decision in second] == [False, False]
    assert ask(store, "b", policy=policy).remaining == 0


def test_a_key_twice_in_a_batch_pays_both_costs():
    policy = Policy("p", (Limit(3, "1h"), Limit(9, "1h", "sliding_log", name="log")))
    store = MemoryStore()
    twice = [(policy, "k", (1, 2)), (policy, "k", (1, 3))]
    assert [decision.views[1][0] for decision in store.apply("acquire", twice, NOW)] == [4, 4]
    assert not any(store.apply("acquire", twice, NOW))
    assert ask(store, "k", policy=policy, costs=(1, 4)).remaining == 0
