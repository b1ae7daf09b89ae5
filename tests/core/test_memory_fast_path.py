"""The fast paths of the memory store return the results of the slow ones, and leave the same state."""
# ruff: noqa: SLF001 - what is kept, and how long, is what is tested

import sys
from contextlib import contextmanager
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tests.core.memory_calls import NOW, SECOND
from tests.core.strategies import gaps, limits
from tidegate import Closed, ConfigError, Limit, Limiter, Policy
from tidegate.core.algorithms import ALGORITHMS
from tidegate.core.bounds import MAX_INTEGER
from tidegate.core.codec import dump
from tidegate.limiter import usage_of
from tidegate.stores import MemoryStore
from tidegate.stores.memory import table
from tidegate.stores.memory.group_shares import GroupShares
from tidegate.testing import ManualClock
from tidegate.testing.reference import answer_of


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
        asked = data.draw(st.sampled_from([cost, {"requests": cost}]))
        first = short.apply_one(verb, policy, key, costs) if fast is None else fast(key, asked)
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


@cases("rules", MIXED_UNITS)
@cases("key", ["known", "new", ("a", "new"), ["a", "list"], 5])
@cases("cost", [0, 1, 3, 101, {"requests": 2}, {}, True, 2.5, -1, 2**53])
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


@pytest.mark.slow
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
