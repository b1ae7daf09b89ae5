"""One decision about all limits of several decisions that were made together."""

from tidegate import Limit, Policy
from tidegate.core._decision import Decision, LocalDecision, join_decisions
from tidegate.stores import MemoryStore

NOW = 1_728_000_000_000_000
POLICIES = [
    Policy("a", (Limit(5, "1m"), Limit(9, "1h", algorithm="sliding_log"))),
    Policy("b", (Limit(2, "1m", algorithm="fixed_window"),)),
]


def decide(costs, now=NOW):
    asks = [(policy, "k", (cost,) * len(policy.limits)) for policy, cost in zip(POLICIES, costs, strict=True)]
    store = MemoryStore()
    store.apply("acquire", asks[:1], NOW - 1_000_000)
    return store.apply("acquire", asks, now)


def test_it_is_about_all_limits_and_allowed_if_all_are():
    for costs in ((1, 1), (1, 3), (4, 1)):
        decisions = decide(costs)
        joined = join_decisions(decisions)
        assert type(joined) is Decision
        assert joined.allowed == all(decisions) == (costs == (1, 1))
        assert list(joined.views) == [view for each in decisions for view in each.views]
        assert joined.policy_limits == (*POLICIES[0].limits, *POLICIES[1].limits)
        assert joined.remaining == min(max(0, view.remaining) for view in joined.views)
        assert joined.states == [state for each in decisions for state in each.states]  # views are computed when read


def test_decisions_of_several_instants_keep_their_views():
    first, later = decide((1, 1))[0], decide((1, 1), NOW + 7_000_000)[1]
    joined = join_decisions([first, later])
    assert joined.at == first.at
    assert list(joined.views) == [*first.views, *later.views]


def test_it_is_local_if_one_of_them_is():
    first, second = decide((1, 1))
    local = LocalDecision(tuple(second))
    assert type(join_decisions([first, local])) is LocalDecision
    assert list(join_decisions([first, local]).views) == [*first.views, *second.views]
    assert type(join_decisions([first, second.with_views()])) is Decision


def test_decisions_that_are_not_computed_when_read_are_joined_by_their_views():
    now, later = decide((1, 1)), decide((1, 1), NOW + 7_000_000)
    views = [each.with_views() for each in now]
    local = [LocalDecision(tuple(each)) for each in now]
    for decisions in (views, [views[0], now[1]], [now[0], views[1]], local, [local[0], now[1]], [later[0], now[1]]):
        joined = join_decisions(decisions)
        assert joined.states is None
        assert list(joined.views) == [view for each in decisions for view in each.views]
        assert isinstance(joined, LocalDecision) == any(isinstance(each, LocalDecision) for each in decisions)
