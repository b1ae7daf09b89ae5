"""Asks at double cost, and decisions about them: how a store grants half of a limit without changing the limit.

`peers` explains when calls cost double.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.core.algorithms import NEVER
from tidegate.core.bounds import MAX_INTEGER
from tidegate.core.decision import Decision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.policy import Policy
    from tidegate.stores.base import Ask


def doubled(policy: Policy, costs: tuple[int, ...]) -> tuple[int, ...]:
    """Double the costs, except for limits without local shares."""
    pairs = zip(policy.limits, costs, strict=True)
    return tuple(cost if limit.rules.holds_slots else min(2 * cost, MAX_INTEGER) for limit, cost in pairs)


def original_decisions(
    asks: Sequence[Ask], sent: Sequence[Ask], decisions: Sequence[Decision], wait: int
) -> list[Decision]:
    """Return the decisions for the original costs, if some asks were sent at double cost.

    A call whose original cost fits the limit may retry after `wait`, even if its double cost never fits.
    """
    triples = zip(asks, sent, decisions, strict=False)  # not all alternatives are decided
    return [
        decision if costs == sent_costs else _halve(decision, costs, wait)
        for (_, _, costs), (_, _, sent_costs), decision in triples
    ]


def _halve(decision: Decision, costs: tuple[int, ...], wait: int) -> Decision:
    """Return the decision for the original costs of an ask at double cost."""
    limits, views = decision.policy_limits, []
    for limit, cost, used, (_, retry, reset) in zip(limits, costs, decision.used, decision.views, strict=True):
        left = limit.burst - used
        left = left if limit.rules.holds_slots else left // 2
        views.append((left, wait if retry == NEVER and cost <= limit.burst else retry, reset))
    return Decision.of_signed_views(decision.at, limits, views, within_limits=decision.within_limits)
