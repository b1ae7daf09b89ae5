"""Alternatives over a leased store: the first that a share or the store allows is charged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.core._decision import VERBS, Decision
from tidegate.stores._base import Alternatives
from tidegate.stores._lease.steps import StoreRequest, with_policy_limits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.stores._base import Ask
    from tidegate.stores._lease.manager import LeaseManager
    from tidegate.stores._lease.steps import LeaseFlow


def choose_flow(
    manager: LeaseManager, verb: str, alternatives: Alternatives, now: int | None, at: int | None
) -> LeaseFlow:
    """Decide alternatives in order: from shares and cached denials, or with one request for several in a row."""
    groups, start = alternatives.groups(), 0
    decisions: list[Decision] = []
    while start < len(groups):
        known = manager.decide_held(verb, groups[start], now)
        if known is not None:
            decisions.append(known)
            start += 1
        else:
            end = start + 1
            while end < len(groups) and not manager.may_hold(groups[end]):
                end += 1
            decisions += yield from ask_run_flow(manager, verb, groups[start:end], now, at)
            start = end
        if decisions[-1].within_limits:
            break
    return decisions


def ask_run_flow(
    manager: LeaseManager, verb: str, groups: Sequence[Sequence[Ask]], now: int | None, at: int | None
) -> LeaseFlow:
    """Ask the store for the first of several alternatives that is allowed, and remember its denials."""
    yield from manager.release_flow(verb, [ask for group in groups for ask in group])
    strict = [
        [(manager.find_policy_leases(policy).strict, key, costs) for policy, key, costs in group] for group in groups
    ]
    decisions = yield StoreRequest(verb, Alternatives.of(strict), now, at)
    asks = [ask for group in groups for ask in group]
    found = [with_policy_limits(policy, one) for (policy, _, _), one in zip(asks, decisions, strict=False)]
    traits = VERBS[verb]
    if not traits.charges or traits.marks or now is not None:
        return found
    end = 0
    for group, (decision, *_) in zip(groups, Alternatives.of(groups).split(decisions), strict=False):
        policy, key, costs = group[0]
        end += len(group)
        leases = manager.find_policy_leases(policy)
        if len(group) > 1 or not leases.length:
            continue
        if decision.within_limits:  # a key that is chosen repeatedly gets a share
            manager.schedule_requests([(leases, key, costs)], lambda: None)
        else:
            recorded = manager.record(leases, key, costs, decision, add=True)
            if isinstance(recorded, Decision):
                found[end - 1] = recorded
            else:
                yield from recorded
    return found
