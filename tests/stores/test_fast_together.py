"""The fast path of several policies in memory decides as `apply` does."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate import Limit, Policy
from tidegate.stores.memory.store import MemoryStore
from tidegate.testing import ManualClock

LIMITS = ("3/10s sliding_log", "5/1m sliding_log", "4/10s token_bucket", "3/7s fixed_window", "6/20s sliding_window")
KEYS = ("a", "b")

steps = st.lists(
    st.tuples(st.lists(st.sampled_from(KEYS), min_size=3, max_size=3), st.sampled_from([0, 0, 1, 3, 9.5, 61])),
    min_size=1,
    max_size=30,
)


def ask(store, acquire, policies, keys):
    """Decide by the fast path, otherwise as its callers do: by `apply`."""
    charged = acquire(keys) if acquire else None
    if charged is not None:
        return [(True, charged[0], (view,)) for view in charged[1]]
    decisions = store.apply("acquire", [(policy, key, (1,)) for policy, key in zip(policies, keys, strict=True)])
    return [(decision.allowed, decision.at, decision.views) for decision in decisions]


@settings(deadline=None)
@given(limits=st.lists(st.sampled_from(LIMITS), min_size=1, max_size=3), steps=steps)
def test_it_decides_as_apply_does(limits, steps):
    clock = ManualClock(start=1_728_000_000)
    policies = [Policy(f"policy {index}", Limit.parse(limit)) for index, limit in enumerate(limits)]
    fast, plain = MemoryStore(clock=clock), MemoryStore(clock=clock)
    acquire = fast.fast_together(policies)
    for keys, seconds in steps:
        clock.advance(seconds)
        chosen = keys[: len(policies)]
        assert list(map(list, ask(fast, acquire, policies, chosen))) == list(
            map(list, ask(plain, None, policies, chosen))
        )
    for policy in policies:
        peeks = [[store.apply("peek", [(policy, key, (1,))])[0].views for key in KEYS] for store in (fast, plain)]
        assert peeks[0] == peeks[1]


@pytest.mark.parametrize("limits", [("2/1m", "2/1m"), ("2/1m", "2/1m token_bucket")])
def test_it_charges_known_keys_at_once_and_none_if_one_denies(limits):
    store = MemoryStore(clock=ManualClock(start=1_728_000_000))
    first, second = (Policy(f"policy {index}", Limit.parse(limit)) for index, limit in enumerate(limits))
    acquire = store.fast_together((first, second))
    assert acquire(("a", "a")) is None  # new keys are left to `apply`
    assert all(store.apply("acquire", [(first, "a", (1,)), (second, "a", (1,))]))
    assert all(acquire(("a", "a")))
    assert acquire(("a", "a")) is None  # both are used up
    store.apply("reset", [(first, "a", (0,))])
    assert store.apply("acquire", [(first, "a", (1,))])[0]
    before = store.apply("peek", [(first, "a", (1,))])[0].views
    assert acquire(("a", "a")) is None  # the second denies
    assert store.apply("peek", [(first, "a", (1,))])[0].views == before
    assert acquire((["no key"], "a")) is None


def test_it_needs_one_limit_in_each_policy_and_different_names():
    store = MemoryStore()
    one, two = Policy("one", ["2/1m"]), Policy("two", ["2/1m", "3/1h"])
    assert store.fast_together((one, two)) is None
    assert store.fast_together((one, one)) is None
