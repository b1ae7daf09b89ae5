"""Limits that bound what coarse timestamps allow.

A log with timestamps in whole seconds leaves open when, within its second, a request arrived. Two requests were up to
a second closer together or further apart than the log says. So the decisions lie between those of limits that count
for a second less, and of limits that count for a second more. For one limit and requests of equal cost, this is a
bound; for several limits with different costs, an estimate. Calendar windows need none: their ends are whole seconds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tidegate.core._bounds import ceil_div

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidegate._policy import Policy
    from tidegate.core._limit import Limit
    from tidegate.inbound._rules.model import Category, Rules


def shift_limit(limit: Limit, by: int) -> Limit:
    """Return a limit that counts for so many microseconds more, or less if it is negative."""
    if not by or limit.rules.by_calendar or limit.rules.holds_slots or limit.length + by < 1:
        return limit
    if limit.rules.refills:
        difference = ceil_div(abs(by) * limit.rate, limit.scale)
        return replace(limit, burst=max(1, limit.burst - difference if by > 0 else limit.burst + difference))
    return replace(limit, period=f"{limit.length - limit.margin + by}us")


def shift_limits(limits: Iterable[Limit], by: int) -> tuple[Limit, ...]:
    """Return several such limits."""
    return tuple(shift_limit(limit, by) for limit in limits)


def shift_policy(policy: Policy, by: int) -> Policy:
    """Return a policy with such limits."""
    return replace(policy, limits=shift_limits(policy.limits, by))


def shift_rules(rules: Rules, by: int) -> Rules:
    """Return the rules of a middleware with such limits."""
    changes: dict[str, Any] = {"categories": tuple(_shift_category(each, by) for each in rules.categories)}
    for name in ("unmatched", "application_limits", "default_limits"):
        category = getattr(rules, name)
        changes[name] = None if category is None else _shift_category(category, by)
    return replace(rules, **changes)


def _shift_category(category: Category, by: int) -> Category:
    plans = {name: shift_policy(policy, by) for name, policy in category.plans.items()}
    return replace(category, policy=shift_policy(category.policy, by), plans=plans)
