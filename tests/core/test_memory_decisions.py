"""However a limiter asks a memory store, it gets the decisions of `Store.apply`, and the store keeps the same."""

from contextlib import suppress
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tests.core.memory_calls import NOW, SECOND, OnlyApply
from tests.core.strategies import gaps, limits
from tests.interrupts import Interrupted, interrupted_at, quiet_finalizers
from tidegate import Closed, ConfigError, Limit, Limiter, Policy
from tidegate._limiter.limiter import usage_of
from tidegate.core._algorithms import ALGORITHMS
from tidegate.core._bounds import MAX_INTEGER
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock
from tidegate.testing._reference import answer_of


@given(data=st.data())
def test_a_limiter_gets_the_decisions_of_apply(data):
    """One schedule on three stores: through a Limiter, `apply_one` and `apply`."""
    rules = tuple(data.draw(limits(name=f"l{n}")) for n in range(data.draw(st.integers(1, 3))))
    policy = Policy("p", rules)
    clock = ManualClock(NOW / SECOND)
    short, long, longest = (MemoryStore(clock=clock) for _ in range(3))
    limiter = Limiter(policy, store=short)
    for _ in range(data.draw(st.integers(1, 25))):
        gap = data.draw(st.one_of(st.just(0), gaps(data.draw(st.sampled_from(rules)).length)))
        clock.advance(gap / SECOND)
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
        assert seen(short, policy) == seen(long, policy) == seen(longest, policy)
        assert short.metrics() == long.metrics()
    for part in (2, 3, 1):  # what is left, on the way to its end
        clock.advance(max(rule.length for rule in rules) / part / SECOND)
        assert seen(short, policy) == seen(long, policy) == seen(longest, policy)


def seen(store, policy):
    """Return what peeks show of the keys, at the store's time."""
    costs = [tuple(cost for _ in policy.limits) for cost in (0, 1)]
    peeks = [store.apply("peek", [(policy, key, each)])[0] for key in ("a", "b", ("a", "b")) for each in costs]
    return [answer_of(peek) for peek in peeks]


def assert_reads_are_views(decision):
    """Check the numbers that a Decision computes one by one against its views."""
    waits = [view[1] for view in decision.views]
    retry = -1 if -1 in waits else max(waits)
    assert decision.remaining == max(0, min(view.remaining for view in decision.views))
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
def test_a_limiter_accepts_and_rejects_the_same_calls_as_one_on_any_store(rules, key, cost):
    limiters = [Limiter(rules, store=wrap(MemoryStore(clock=ManualClock(1000)))) for wrap in (lambda it: it, OnlyApply)]
    for verb in ("peek", "usage", "try_acquire"):
        outcomes = []
        for limiter in limiters:
            limiter.try_acquire("known", {limiter.policy.limits[0].unit: 2})
            try:
                found = getattr(limiter, verb)(*((key,) if verb == "usage" else (key, cost)))
            except ConfigError as error:
                found = str(error)
            outcomes.append(found if isinstance(found, (str, dict)) else answer_of(found)[2])
        assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_cost_of_0_changes_nothing_and_is_never_denied(algorithm):
    clock = ManualClock(NOW / SECOND)
    policy = Policy("p", (Limit(5, "hour" if algorithm == "calendar_window" else "1h", algorithm),))
    limiter = Limiter(policy, store=MemoryStore(clock=clock))
    assert limiter.try_acquire("k", 3)
    limiter.store.apply_one("adjust", policy, "k", (4,))  # beyond the limit
    clock.advance(1)
    before = limiter.usage("k")
    for decision in (limiter.try_acquire("k", 0), limiter.peek("k", 0)):
        assert decision.allowed
        assert decision.remaining == 0
    assert limiter.usage("k") == before


@pytest.mark.parametrize("overflow", ["share", "deny"])
def test_peeks_see_a_full_store_as_apply_does(overflow):
    clock = ManualClock(1000)
    store = MemoryStore(max_entries=1, overflow=overflow, clock=clock)
    limiter, applied = Limiter("5/1h", store=store), Limiter("5/1h", store=OnlyApply(store))
    limiter.try_acquire("a", 2)
    limiter.try_acquire("b", 4)
    for key in ("a", "b", "new"):
        for cost in (0, 1, 5):
            assert answer_of(limiter.peek(key, cost)) == answer_of(applied.peek(key, cost))
        assert limiter.usage(key) == applied.usage(key)
    assert store.metrics()["overflowed"] == 1


def test_methods_that_were_kept_follow_the_current_rules_and_stop_with_the_limiter():
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


@pytest.mark.parametrize("rule", ["5/1h", "5/1h sliding_log", "5/1h fixed_window"])
def test_keys_are_accepted_in_every_form(rule):
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


MOST = 440  # keys; half of them for one group

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
def test_an_exception_of_a_signal_handler_leaves_a_store_that_works_and_empties(call):
    for step in count(1, 30 if call == "due" else 2):  # this one drops many keys
        clock = ManualClock(1_000_000)
        limiter = Limiter(["2/10s"], store=MemoryStore(max_entries=MOST, clock=clock, group_of=lambda _: "all"))
        call_all(limiter, "try_acquire", 200)
        if call == "remove_stale":
            call_all(limiter, "reset", 190)
        if call == "due":
            clock.advance(4)
            call_all(limiter, "try_acquire", 195)
            clock.advance(7)
        with quiet_finalizers(), suppress(Interrupted), interrupted_at(step) as countdown:
            INTERRUPTED[call](limiter)
        if countdown.left > 0:
            break
        INTERRUPTED[call](limiter)
        call_all(limiter, "try_acquire", 200)
        clock.advance(100)
        call_all(limiter, "peek", 60)
        assert limiter.store.metrics()["entries"] == 0
        # Nothing that was removed counts towards its group, or is waited for.
        assert sum(limiter.try_acquire(f"b{number}").allowed for number in range(300)) == MOST // 2 + 2
    assert step > 3
