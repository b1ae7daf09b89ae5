"""Limits by plan: replaces the limiter of a category with that of the plan that the application returns."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tidegate.errors import ConfigError
from tidegate.inbound._client.request import Request
from tidegate.observe.logs import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidegate._policy import Cost
    from tidegate.inbound._limiting.category_limiter import CategoryLimiter
    from tidegate.inbound._rules.model import Category, Rules

    Categories = tuple[tuple[CategoryLimiter, Cost], ...]

log: logging.Logger = logging.getLogger("tidegate.inbound")

PlanOf = Callable[[Request], str | None]  # None: the category's own limits
MAX_REPORTED: Final = 100  # unknown plans that are logged


class PlanLimiters:
    """The limiters of all plans, by category and plan."""

    def __init__(self, plan_of: PlanOf | None) -> None:
        """Use this function to find the plan of a request."""
        self._plan_of = plan_of
        self._limiters: dict[str, dict[str, CategoryLimiter]] = {}
        self._reported: set[tuple[str, str]] = set()

    def __bool__(self) -> bool:
        """Return whether a category has plans."""
        return bool(self._limiters)

    def check(self, rules: Rules) -> None:
        """Raise ConfigError if the rules have plans and there is no function to find them."""
        if self._plan_of is not None:
            return
        for category in rules.categories:
            if category.plans:
                raise ConfigError(
                    f"category {category.name!r} has plans: expected a function that returns the plan of a request",
                    field="plan",
                )

    def update(
        self, category_limiters: Mapping[str, CategoryLimiter], make: Callable[[Category], CategoryLimiter]
    ) -> None:
        """Use the plans of these categories from now on. All plans of a category share its recently seen clients."""
        found: dict[str, dict[str, CategoryLimiter]] = {}
        for name, base in category_limiters.items():
            earlier = self._limiters.get(name, {})
            for plan, policy in base.category.plans.items():
                category = replace(base.category, policy=policy, plans={})
                limiter = make(category)
                if plan in earlier:
                    limiter.replace(earlier[plan])
                limiter.share_clients(base)
                found.setdefault(name, {})[plan] = limiter
        self._limiters = found

    def of(self, category: str) -> tuple[CategoryLimiter, ...]:
        """Return the limiters of all plans of a category."""
        return tuple(self._limiters.get(category, {}).values())

    def find_plan(self, request: Request, categories: Categories) -> str | None:
        """Return the plan of a request; None if none of its categories has plans, or if no category knows this one."""
        if self._plan_of is None or not any(each.category.name in self._limiters for each, _ in categories):
            return None
        plan = self._plan_of(request)
        if plan is None or (isinstance(plan, str) and any(plan in plans for plans in self._limiters.values())):
            return plan
        for each, _ in categories:
            self._find(each, plan)  # reports it
        return None

    def replace(self, categories: Categories, plan: str | None) -> Categories:
        """Replace the categories of a request with those of its plan."""
        return categories if plan is None else tuple([(self._find(each, plan), cost) for each, cost in categories])

    def choose(self, request: Request, categories: Categories) -> Categories:
        """Replace the categories of a request with those of the plan that the application's function returns."""
        return self.replace(categories, self.find_plan(request, categories))

    def _find(self, base: CategoryLimiter, plan: object) -> CategoryLimiter:
        name = base.category.name
        plans = self._limiters.get(name)
        if plans is None:
            return base
        found = plans.get(plan) if isinstance(plan, str) else None
        if found is None:
            self._report(name, str(plan))
        return found or base

    def _report(self, category: str, plan: str) -> None:
        if len(self._reported) < MAX_REPORTED and (category, plan) not in self._reported:
            self._reported.add((category, plan))
            log.warning("category %s has no plan %s: its own limits apply", category, shown(plan))
