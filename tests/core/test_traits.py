"""The traits of each algorithm, and what its port in Lua needs to know of it."""

from itertools import product

import pytest

from tests.core.strategies import START
from tidegate import ConfigError, Limit
from tidegate.core._algorithms import ALGORITHMS, Algorithm, View
from tidegate.core._bounds import MAX_DURATION
from tidegate.core._decision import Decision

TRAITS = {
    "token_bucket": {"refills", "leasable"},
    "fixed_window": {"windowed", "leasable", "movable"},
    "calendar_window": {"windowed", "by_calendar", "leasable", "movable"},
    "sliding_window": {"weighted", "leasable"},
    "sliding_log": {"logged", "leasable", "rolling", "movable"},
    "concurrency": {"logged", "holds_slots"},
}
EVERY_TRAIT = set().union(*TRAITS.values())
# the number, how many numbers a state has, and the cost as a multiple of that of a bucket: what core.lua is built for
PORTS = {
    "token_bucket": (1, 5, 1),
    "fixed_window": (2, 2, 3),
    "calendar_window": (3, 2, 3),
    "sliding_window": (4, 4, 3),
    "sliding_log": (5, 6, 5),
    "concurrency": (6, 6, 5),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_algorithm_has_its_traits_and_no_others(name):
    rules = ALGORITHMS[name]
    assert {trait for trait in EVERY_TRAIT if getattr(rules, trait) is True} == TRAITS[name]
    assert {trait for trait in EVERY_TRAIT if getattr(rules, trait) is not True} == {
        trait for trait in EVERY_TRAIT if getattr(rules, trait) is False
    }


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_algorithm_tells_its_port(name):
    rules = ALGORITHMS[name]
    assert (rules.port_number, rules.port_size, rules.port_cost) == PORTS[name]


def test_a_new_algorithm_has_no_trait_and_no_port():
    rules = Algorithm(*ALGORITHMS["fixed_window"][:4])
    assert not any(getattr(rules, trait) for trait in EVERY_TRAIT)
    assert (rules.port_number, rules.port_size, rules.port_cost) == (0, 0, 3)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_remains_is_negative_in_debt_but_not_for_a_caller(name):
    limit = Limit(5, "day" if name == "calendar_window" else "1m", name)
    state = limit.rules.adjust(limit.charge(None, limit, 2, START), limit, 6, START, START)
    assert limit.rules.view(state, limit, 1, START).remaining == -3
    decision = Decision.of_states(START, (limit,), (state,), (1,), within_limits=False)
    for seen in (decision, decision.with_views()):
        assert (seen.used, seen.remaining, seen.limits[0].remaining) == ([8], 0, 0)


def test_one_number_of_the_view_is_the_same_for_changed_and_marked_buckets():
    old, new = Limit(10, "10s"), Limit(4, "60s")
    charged = old.charge(None, old, 9, START)
    assert charged is not None
    for state in (None, charged, old.rules.mark(charged)):
        for limit, cost, seconds in product((old, new), (0, 1, 3, 4, 10, 11), (-1, 0, 1, 8, 9, 10, 11, 30)):
            now = START + seconds * 1_000_000
            remaining, retry, _ = limit.rules.view(state, limit, cost, now)
            assert limit.rules.remaining(state, limit, now) == remaining
            assert limit.rules.retry(state, limit, cost, now) == retry


@pytest.mark.parametrize("rule", ["10/10s", "7/3s", "3/7s", "1000000/1s", "1000003/1s", "2/1h"])
def test_one_number_of_the_view_is_the_same_around_every_change(rule):
    """At, just before and just after each instant at which a number of the view changes; also a bucket in debt."""
    limit = Limit.parse(rule)
    quota = limit.quota
    charged = limit.charge(None, limit, quota - 1, START)
    assert charged is not None
    states = [charged, limit.charge(None, limit, quota, START), limit.rules.adjust(charged, limit, quota, START, None)]
    for state in states:
        _, level, seen, _ = state
        changes = {seen, seen + (limit.capacity - level) // limit.rate}
        changes |= {seen + (permits * limit.scale - level) // limit.rate for permits in (0, 1, 2, quota - 1, quota)}
        for cost, change, step in product((0, 1, 2, quota, quota + 1), changes, (-1, 0, 1, 2)):
            now = change + step
            remaining, retry, _ = limit.rules.view(state, limit, cost, now)
            assert limit.rules.remaining(state, limit, now) == remaining
            assert limit.rules.retry(state, limit, cost, now) == retry


def test_a_decision_that_has_views_is_returned_unchanged():
    limit = Limit(5, "1m")
    decision = Decision.of_views(START, (limit,), [View((5, 0, 0))], within_limits=True)
    assert decision.with_views() is decision


def test_a_decision_has_the_states_that_it_was_made_from():
    limit = Limit(5, "1m")
    states = (limit.charge(None, limit, 1, START),)
    decision = Decision.of_states(START, (limit,), states, (0,), within_limits=True)
    assert decision.states is states
    assert decision.with_views().states is None


def test_a_margin_is_bounded_by_the_longest_period():
    most = MAX_DURATION - 1_000_000
    assert Limit(5, "1s", "sliding_log", margin=most).length == MAX_DURATION
    with pytest.raises(ConfigError, match="margin"):
        Limit(5, "1s", "sliding_log", margin=most + 1)
