"""The limiter of a category, and its recently seen clients; the limiters of default limits, one for each route."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tidegate.inbound._client.recent import RecentClients
from tidegate.inbound._client.request import Request
from tidegate.inbound._limiting.charges import holds_slots

if TYPE_CHECKING:
    from tidegate._limiter.limiter import Limiter
    from tidegate._policy import Cost, Key, Policy
    from tidegate.core import Limit
    from tidegate.core._decision import Decision
    from tidegate.inbound._rules.charging import Charging
    from tidegate.inbound._rules.model import Category

MAX_LIMITERS: Final = 10_000  # a function may return any number of different limits
Counts = Callable[[Request, int], bool]  # whether a response with this status counts


class CategoryLimiter:
    """An active category: its limiter and its recently seen clients.

    New rules replace it, and never change it: a request uses the same rules from its decision to its response.
    """

    __slots__ = (
        "_count",
        "_make",
        "_observing",
        "allowed",
        "category",
        "charging",
        "denied_requests",
        "last_decisions",
        "limiter",
        "limits",
        "policy",
        "recent_clients",
        "reserves",
    )

    limits_routes = False
    denied = None  # the middleware has the function that chooses the response
    on_denied = None

    def __init__(
        self,
        category: Category,
        make: Callable[[Policy], Limiter],
        count: Counts | None = None,
        max_clients: int = 10_000,
    ) -> None:
        """Make its limiter; `count` returns whether a response counts; keep at most `max_clients` recent clients."""
        self.category: Category = category
        self.limiter: Limiter = make(category.policy)
        self._make = make
        self._observing: Limiter | None = None
        self.recent_clients: RecentClients = RecentClients(max_clients)
        self.last_decisions: dict[Key, Decision] = self.recent_clients.last_decisions
        self._count = count
        self.allowed: int = 0
        self.denied_requests: int = 0
        self.policy: Policy = category.policy
        self.limits: tuple[Limit, ...] = self.policy.limits
        self.charging: Charging | None = category.charging
        self.reserves: bool = holds_slots(self.limits) or self.charging is not None or count is not None

    @property
    def observing(self) -> Limiter:
        """The limiter of clients that are counted and never denied."""
        if self._observing is None:
            self._observing = self._make(replace(self.policy, mode="shadow"))
        return self._observing

    def replace(self, earlier: CategoryLimiter) -> None:
        """Continue the statistics of the limiter that this one replaces."""
        self.allowed, self.denied_requests = earlier.allowed, earlier.denied_requests
        max_clients = self.recent_clients.max_clients
        self.share_clients(earlier)
        self.recent_clients.resize(max_clients)

    def share_clients(self, other: CategoryLimiter) -> None:
        """Use the recently seen clients of another limiter."""
        self.recent_clients, self.last_decisions = other.recent_clients, other.last_decisions

    def record(self, key: Key, decision: Decision) -> None:
        """Count a decision, and keep it as the last one about its client."""
        self.recent_clients.record(key, decision)
        if decision.allowed:
            self.allowed += 1
        else:
            self.denied_requests += 1

    def correct(self, key: Key, decision: Decision) -> None:
        """Replace the last decision about a client, whose charge was corrected."""
        self.recent_clients.record(key, decision)

    def final_cost(self, request: Request, status: int, cost: Cost) -> Cost | None:
        """Return the final cost of a request, given the status of its response; None: the estimated cost."""
        counts = self._count is None or self._count(request, status)
        if self.charging is None:
            return None if counts else 0
        if isinstance(cost, int):
            return self.charging.cost(status, cost if counts else 0)
        return None if self.charging.cost(status, int(counts)) else 0  # several units: the full cost or none


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
