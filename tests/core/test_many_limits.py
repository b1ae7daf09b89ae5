"""Verbs over several limits at once."""

from tests.cases import cases
from tests.core.strategies import START
from tidegate import Limit
from tidegate.core._decision import Decision, acquire, adjust, hold, reset


@cases("count", [1, 2, 7, 8, 9, 10, 20])
@cases("verb", [acquire, hold, adjust, reset])
def test_every_verb_answers_for_each_of_many_limits(verb, count):
    """What is left open is a cost of nothing for each limit."""
    limits = tuple(Limit(5, "1h", name=f"limit {number}") for number in range(count))
    allowed, states, costs = verb(limits, [None] * count, [2] * count, START)
    assert allowed
    assert tuple(costs) == (0,) * count
    assert len(states) == count
    decision = Decision((allowed, START, limits, states, costs))
    assert [limit.remaining for limit in decision.limits] == [5 if verb is reset else 3] * count
    assert decision.retry == 0


def test_only_a_limit_that_was_charged_gets_a_mark():
    limits = Limit(5, "1h", name="one"), Limit(5, "2h", name="other")
    _, states, _ = acquire(limits, (None, None), (1, 1), START)
    _, held, _ = hold(limits, states, (1, 0), START + 1)
    assert held[0] != states[0]
    assert held[1] is states[1]
    _, held, _ = hold(limits, (None, None), (1, 0), START)
    assert held[1] is None
