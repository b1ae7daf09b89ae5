"""The limiters of `default_limits`: one for each route without limits of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate._limiter.limiter import Limiter
    from tidegate._policy import Policy
    from tidegate.inbound._rules.model import Category

MAX_LIMITERS: Final = 10_000  # a function may return any number of different limits


class RouteLimiters:
    """Makes the limiter of a route when its first request arrives; an application has a fixed number of routes."""

    __slots__ = ("_category", "_limiters", "_make")

    def __init__(self, category: Category | None, make: Callable[[Policy], Limiter]) -> None:
        """Use the limits of this category; None: there are no default limits."""
        self._category = category
        self._make = make
        self._limiters: dict[tuple[str, Policy], Limiter] = {}

    def __bool__(self) -> bool:
        """Return whether there are default limits."""
        return self._category is not None

    @property
    def limiters(self) -> tuple[Limiter, ...]:
        """The limiters of all routes so far."""
        return tuple(self._limiters.values())

    def at_route(self, policy: Policy, route: str) -> Limiter:
        """Return the limiter of a route, for the default limits or those that the options of a `limit(…)` chose."""
        cache_key = route, policy
        limiter = self._limiters.get(cache_key)
        if limiter is None:
            if len(self._limiters) >= MAX_LIMITERS:
                self._limiters.clear()
            limiter = self._limiters[cache_key] = self._make(replace(policy, name=f"{policy.name}:{route}"))
        return limiter
