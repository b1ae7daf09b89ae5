"""The memory store: bounded, never forgetting what is live, tidy at a constant price, and the same by every way in."""
# ruff: noqa: SLF001 - what is kept, and how long, is what is tested

import logging
import sys
from collections import Counter
from contextlib import contextmanager
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import gaps, limits
from tidegate import Closed, ConfigError, Limit, Limiter, Policy
from tidegate.core.algorithms import ALGORITHMS
from tidegate.core.bounds import MAX_INTEGER
from tidegate.core.codec import dump
from tidegate.limiter import usage_of
from tidegate.stores import MemoryStore
from tidegate.stores.memory import table
from tidegate.stores.memory.group_shares import GroupShares
from tidegate.stores.memory.store import OVERFLOW_KEY
from tidegate.testing import ManualClock
from tidegate.testing.reference import answer_of

NOW = 1_750_000_000 * 1_000_000
SECOND = 1_000_000
HOUR = 3600 * SECOND
HOURLY = Policy("hourly", (Limit(1, "1h"),))


def ask(store, key, now=NOW, policy=HOURLY, costs=(1,), verb="acquire", at=None):
    return store.apply_one(verb, policy, key, costs, now, at)


@contextmanager
def counted_checks():
    """Count the keys that sweeps check."""
    plain, looks = table.expires, []

    def expires(entry):
        looks.append(entry)
        return plain(entry)

    table.expires = expires
    try:
        yield looks
    finally:
        table.expires = plain


# ---- bounded, and never forgetting -----------------------------------------------------------------------------------


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


# ---- groups of keys --------------------------------------------------------------------------------------------------


def group_of(key):
    """Return the group of a key: the part before the dash."""
    return key.partition("-")[0] if "-" in key else None


def counts(store):
    """Count the keys that the store keeps, by group."""
    keys = [key for table in store._tables.values() for queue in table.wheel.values() for key in queue]
    return Counter(group for group in (group_of(key) for key in keys if isinstance(key, str)) if group)


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
        known = key in store._tables.get("hourly", table.Table()).entries
        ask(store, key, now, verb=verb, costs=(-1,) if verb == "adjust" else (1,))
        assert store._shares._counts == counts(store)
        assert store.metrics()["entries"] <= 16
        if verb == "acquire" and not known and entries < 8:
            assert key in store._tables["hourly"].entries  # before half of the store is used, every key is kept


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
    assert not any(isinstance(part, str) for part in OVERFLOW_KEY[1:])


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


# ---- tidy at a constant price ----------------------------------------------------------------------------------------


def test_memory_returns_to_empty():
    store = MemoryStore()
    for number in range(2000):
        ask(store, f"k{number}", NOW + number)
    assert store.metrics()["entries"] == 2000
    later = NOW + 2 * HOUR
    for number in range(2000 // table.SWEEP_PER_CALL + 3):
        ask(store, "late", later + number)
    assert store.metrics()["entries"] == 1
    keys = store._tables["hourly"]
    assert list(keys.entries) == ["late"]
    assert sum(map(len, keys.wheel.values())) == 1


def test_no_call_checks_more_than_a_few_keys():
    store = MemoryStore()
    for number in range(3000):
        ask(store, f"k{number}")
    for when in (NOW, NOW + HOUR // 2, NOW + 2 * HOUR, NOW + 2 * HOUR + 1):
        with counted_checks() as looks:
            ask(store, "k1", when)
            assert len(looks) <= 2 * table.SWEEP_PER_CALL + 2


def test_keys_in_use_are_checked_rarely():
    policy = Policy("busy", (Limit(10**6, "1m", "sliding_log"),))
    store = MemoryStore()
    with counted_checks() as looks:
        for number in range(20_000):
            ask(store, f"k{number % 10}", NOW + number * SECOND // 100, policy)
    assert len(looks) < 100, "ten keys, three to four minutes, one look a minute at each"


def test_sweeps_come_no_later_than_a_32nd_of_a_lifetime():
    """Found by reading: it was a 16th."""
    for length in (10 * SECOND, 61 * SECOND, HOUR, 30 * 24 * HOUR):
        keys = table.Table()
        for offset in range(0, 1000, 7):
            now = NOW + offset * SECOND
            keys.register(f"k{offset}", now + length, now)
            last = max(keys.wheel)
            assert now + length < last <= now + length + max(2**16, length // 32 + 1)


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
    for number in range(20_000):
        assert ask(store, f"k{number}", NOW + number, slots)
        ask(store, f"k{number}", NOW + number, slots, (-1,), verb)
        keys = store._tables["slots"]
        assert sum(map(len, keys.wheel.values())) < 500
        assert len(keys.stale) < 500
    assert store.metrics()["entries"] == 0


def test_a_key_that_is_reset_repeatedly_is_in_the_wheel_once():
    store = MemoryStore()
    for number in range(1000):
        assert ask(store, "k", NOW + number)
        ask(store, "k", NOW + number, costs=(0,), verb="reset")
    keys = store._tables["hourly"]
    assert sum(map(len, keys.wheel.values())) == 1
    assert len(keys.stale) == 1


def test_expired_keys_among_live_ones_are_found():
    store = MemoryStore()
    live = [f"live-{number}" for number in range(300)]
    for key in live:
        ask(store, key)
    for number in range(3000):
        ask(store, f"k{number}", NOW + number * SECOND // 10)
        ask(store, f"k{number}", NOW + number * SECOND // 10, costs=(0,), verb="reset")
    keys = store._tables["hourly"]
    assert sum(map(len, keys.wheel.values())) < 1500
    assert set(keys.entries) == set(live)
    assert set(live) <= {key for queue in keys.wheel.values() for key in queue}
    for number in range(20):
        ask(store, "late", NOW + 3 * HOUR + number)
    assert set(keys.entries) == {"late"}


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
    for number in range(10_000):
        ask(store, f"key-{number}", NOW + number)
    entries = store._tables["hourly"].entries
    state = entries["key-7"]
    own = sys.getsizeof(state) + sum(map(sys.getsizeof, state[1:])) + sys.getsizeof(entries) / 10_000 + 8
    assert own < 200


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
    later = NOW + 2 * HOUR
    ask(store, "k", later, policies["one"])
    assert len(table.states_of(store._tables["p"].entries["k"])) == 1, "what has ended is not carried on"


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


@pytest.mark.parametrize("algorithm", ["token_bucket", "fixed_window", "sliding_window", "sliding_log", "concurrency"])
@pytest.mark.parametrize("verb", ["acquire", "peek", "hold"])
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


# ---- the short way is the long way -----------------------------------------------------------------------------------


@given(data=st.data())
def test_the_fast_path_answers_like_the_slow_path(data):
    """A Limiter uses fast paths, `apply_one` and `apply` are the slow ones: one schedule, three stores."""
    rules = tuple(data.draw(limits(name=f"l{n}")) for n in range(data.draw(st.integers(1, 3))))
    policy = Policy("p", rules)
    clock = ManualClock(NOW / SECOND)
    short, long, longest = (MemoryStore(clock=clock) for _ in range(3))
    limiter = Limiter(policy, store=short)
    for _ in range(data.draw(st.integers(1, 25))):
        gap = data.draw(st.one_of(st.just(0), gaps(data.draw(st.sampled_from(rules)).length)))
        clock._move(max(NOW, clock.steady() + gap))
        key = data.draw(st.sampled_from(["a", "b", ("a", "b")]))
        verb = data.draw(st.sampled_from(["acquire"] * 8 + ["peek"] * 4 + ["hold", "adjust", "reset"]))
        most = max(rule.burst for rule in rules)
        cost = data.draw(st.one_of(st.just(1), st.integers(0, 5), st.integers(0, most + 1), st.just(MAX_INTEGER)))
        costs = tuple(-1 if verb == "adjust" else cost for _ in rules)
        fast = {"acquire": limiter.try_acquire, "peek": limiter.peek}.get(verb)
        first = short.apply_one(verb, policy, key, costs) if fast is None else fast(key, cost)
        second = long.apply_one(verb, policy, key, costs)
        third = longest.apply(verb, [(policy, key, costs)])[0]
        assert answer_of(first) == answer_of(second) == answer_of(third)
        assert_reads_are_views(first)
        assert limiter.usage(key) == usage_of(long.apply_one("peek", policy, key, tuple(0 for _ in rules)))
        assert kept(short, key) == kept(long, key) == kept(longest, key)
        assert short.metrics() == long.metrics()


def assert_reads_are_views(decision):
    """Check the numbers that a Decision computes one by one against its views."""
    waits = [view[1] for view in decision.views]
    retry = -1 if -1 in waits else max(waits)
    assert decision.remaining == min(view[0] for view in decision.views)
    assert decision.retry == retry
    assert decision.retry_after == (0.0 if decision.allowed else None if retry < 0 else retry / SECOND)
    assert decision.allowed == decision.within_limits == (not any(waits))


MIXED_UNITS = [
    "100/1h",
    ["100/1h", "7/1m sliding_log name=log"],
    ["100/1h", Limit(1000, "1m", unit="tokens")],
    [Limit(100, "1h", unit="files"), Limit(1000, "1m", unit="tokens")],
]


@pytest.mark.parametrize("rules", MIXED_UNITS)
@pytest.mark.parametrize("key", ["known", "new", ("a", "new"), ["a", "list"], 5])
@pytest.mark.parametrize("cost", [0, 1, 3, 101, {"requests": 2}, {}, True, 2.5, -1, 2**53])
def test_fast_paths_accept_and_reject_the_same_calls(rules, key, cost):
    """Every call of a fast path has the result or the error of the method that it replaces."""
    plain = [Limiter(rules, clock=ManualClock(1000)) for _ in range(2)]
    for verb in ("peek", "usage", *(() if cost is True else ("try_acquire",))):
        outcomes = []
        for limiter, replaced in zip(plain, (limiter_method, getattr), strict=True):
            limiter.try_acquire("known", {limiter.policy.limits[0].unit: 2})
            try:
                found = replaced(limiter, verb)(*((key,) if verb == "usage" else (key, cost)))
            except ConfigError as error:
                found = str(error)
            outcomes.append(found if isinstance(found, (str, dict)) else answer_of(found)[2])
        assert outcomes[0] == outcomes[1]


def limiter_method(limiter, verb):
    return getattr(Limiter, verb).__get__(limiter)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_fast_cost_of_0_changes_nothing_and_is_never_denied(algorithm):
    clock = ManualClock(NOW / SECOND)
    policy = Policy("p", (Limit(5, "hour" if algorithm == "calendar_window" else "1h", algorithm),))
    limiter = Limiter(policy, store=MemoryStore(clock=clock))
    assert limiter.try_acquire("k", 3)
    limiter.store.apply_one("adjust", policy, "k", (4,))  # beyond the limit
    before = kept(limiter.store, "k")
    clock.advance(1)
    for decision in (limiter.try_acquire("k", 0), limiter.peek("k", 0)):
        assert decision.allowed
        assert decision.remaining == 0
    assert kept(limiter.store, "k") == before


@pytest.mark.parametrize("overflow", ["share", "deny"])
def test_fast_peeks_see_a_full_store_as_slow_ones_do(overflow):
    clock = ManualClock(1000)
    store = MemoryStore(max_entries=1, overflow=overflow, clock=clock)
    limiter = Limiter("5/1h", store=store)
    limiter.try_acquire("a", 2)
    limiter.try_acquire("b", 4)
    for key in ("a", "b", "new"):
        for cost in (0, 1, 5):
            slow = limiter_method(limiter, "peek")(key, cost)
            assert answer_of(limiter.peek(key, cost)) == answer_of(slow)
        assert limiter.usage(key) == limiter_method(limiter, "usage")(key)
    assert store.metrics()["overflowed"] == 1


def test_replaced_fast_paths_follow_the_current_rules_and_stop_with_the_limiter():
    limiter = Limiter("5/1h", clock=ManualClock(1000))
    acquire, peek, usage = limiter.try_acquire, limiter.peek, limiter.usage
    assert acquire("k", 2)
    limiter.update("9/1h")
    assert peek("k", 0).limits[0].quota == 9
    assert usage("k")["1h"].quota == 9
    assert acquire("k", 3).limits[0].quota == 9
    limiter.close()
    for call in (acquire, peek):
        for cost in (1, 3):
            with pytest.raises(Closed):
                call("k", cost)
    with pytest.raises(Closed):
        usage("k")


def kept(store, key):
    entry = store._tables["p"].entries.get(key)
    return None if entry is None else [dump(state) for state in table.states_of(entry)]


@pytest.mark.parametrize("rule", ["5/1h", "5/1h sliding_log", "5/1h fixed_window"])
def test_the_fast_path_accepts_keys_in_every_form(rule):
    """Found by reading: a list as a key raised TypeError (unhashable) for limits other than buckets."""
    limiter = Limiter(rule, clock=ManualClock(1000))
    for _ in range(2):
        assert limiter.try_acquire("k")
        assert limiter.try_acquire(("a", "b"))
        assert limiter.try_acquire(["a", "b"])
    assert limiter.peek(("a", "b"), 0).remaining == 1
    with pytest.raises(ConfigError):
        limiter.try_acquire(5)
    with pytest.raises(ConfigError):
        limiter.try_acquire({"no": "key"})


def test_the_wait_is_exact_after_the_clock_stepped_back():
    """Found by reading: the wait was counted from the latest instant of the key, not from now."""
    for rule in ("1/10s", "1/10s sliding_log", "1/10s fixed_window", "1/10s concurrency"):
        clock = ManualClock(1000)
        limiter = Limiter(rule, clock=clock)
        assert limiter.try_acquire("k")
        clock.advance(-5)
        decision = limiter.try_acquire("k")
        assert decision.retry_after == 15
        assert decision.reset_after == 15
        clock.advance(14.999_999)
        assert not limiter.try_acquire("k")
        clock.advance(0.000_001)
        assert limiter.try_acquire("k")


class Interrupted(Exception):  # noqa: N818 - what a signal handler may raise
    pass


@contextmanager
def interrupted_at(step):
    """Raise before the given line of the store's code, as a signal handler may."""
    codes = {
        method.__code__
        for owner, names in (
            (table.Table, ("register", "sweep", "forget", "remove_stale")),
            (MemoryStore, ("_decide", "_slot", "_write", "_insert", "_add", "_forget")),
            (GroupShares, ("add", "remove")),
        )
        for method in (getattr(owner, name) for name in names)
    }
    steps = count(1)

    def trace(frame, event, _arg):
        if frame.f_code not in codes:
            return None
        if event == "line" and next(steps) == step:
            sys.settrace(None)
            raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


INTERRUPTED = {
    "new": lambda limiter: limiter.store.apply("acquire", [(limiter.policy, ("new",), (1,))]),
    "short": lambda limiter: limiter.try_acquire("new"),
    "short, another cost": lambda limiter: limiter.try_acquire("new", 2),
    "due": lambda limiter: limiter.try_acquire("due"),
    "forget": lambda limiter: limiter.reset("a5"),
    "remove_stale": lambda limiter: limiter.reset("a199"),
}


def call_all(limiter, verb, numbers):
    for number in range(numbers):
        getattr(limiter, verb)(f"a{number}")


@pytest.mark.parametrize("call", INTERRUPTED)
def test_an_exception_between_any_two_steps_leaves_a_store_that_works_and_empties(call):
    for step in count(1):
        clock = ManualClock(1_000_000)
        limiter = Limiter(["2/10s"], store=MemoryStore(clock=clock, group_of=lambda _: "all"))
        call_all(limiter, "try_acquire", 200)
        if call == "remove_stale":
            call_all(limiter, "reset", 190)
        if call == "due":
            clock.advance(4)
            call_all(limiter, "try_acquire", 195)
            clock.advance(7)
        try:
            with interrupted_at(step):
                INTERRUPTED[call](limiter)
        except Interrupted:
            pass
        else:
            break
        places = limiter.store._tables[limiter.policy.name]
        assert limiter.store.metrics()["entries"] == len(places.entries)
        INTERRUPTED[call](limiter)
        call_all(limiter, "try_acquire", 200)
        assert set(places.entries) <= {key for keys in places.wheel.values() for key in keys}
        clock.advance(100)
        call_all(limiter, "peek", 60)
        assert (places.entries, places.wheel, places.dues, places.stale) == ({}, {}, [], set())
        assert limiter.store.metrics()["entries"] == 0
        assert not limiter.store._shares._counts
    assert step > 3
