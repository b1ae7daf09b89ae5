"""The limiters of `default_limits`: one for each route without limits of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.inbound.limiting.charges import RequestCharge
    from tidegate.inbound.rules.model import Category
    from tidegate.limiter import AsyncLimiter, Limiter
    from tidegate.policy import Policy

MAX_LIMITERS: Final = 10_000  # a function may return any number of different limits


class RouteLimiters:
    """Makes the limiter of a route when its first request arrives; an application has a fixed number of routes."""

    __slots__ = ("_category", "_limiters", "_make")

    def __init__(self, category: Category | None, make: Callable[[Policy], Limiter | AsyncLimiter]) -> None:
        """Use the limits of this category; None: there are no default limits."""
        self._category = category
        self._make = make
        self._limiters: dict[str | tuple[str, Policy], Limiter | AsyncLimiter] = {}

    def __bool__(self) -> bool:
        """Return whether there are default limits."""
        return self._category is not None

    @property
    def limiters(self) -> tuple[Limiter | AsyncLimiter, ...]:
        """The limiters of all routes so far."""
        return tuple(self._limiters.values())

    def has(self, charge: RequestCharge) -> bool:
        """Return whether a charge is that of the default limits."""
        category_limiter = charge.category_limiter
        return (
            self._category is not None
            and category_limiter is not None
            and category_limiter.category.name == self._category.name
        )

    def at_route(self, charge: RequestCharge, route: str) -> RequestCharge:
        """Return the charge of a request to a route."""
        category_limiter = charge.category_limiter
        cache_key: str | tuple[str, Policy] = route
        if category_limiter is not None and category_limiter.limiter is not charge.limiter:
            cache_key = (route, charge.policy)  # the options of a `limit(…)` have chosen the policy
        limiter = self._limiters.get(cache_key)
        if limiter is None:
            if len(self._limiters) >= MAX_LIMITERS:
                self._limiters.clear()
            policy = charge.policy
            limiter = self._limiters[cache_key] = self._make(replace(policy, name=f"{policy.name}:{route}"))
        return charge._replace(limiter=limiter)
