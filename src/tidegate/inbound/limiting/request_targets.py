"""Finds what a request is charged to, by its method and path, and caches it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from tidegate.inbound.rules.model import ADMIN_PATH, DEFAULT_LIMITS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tidegate.inbound.client.request import Request
    from tidegate.inbound.limiting.category_limiter import CategoryLimiter
    from tidegate.inbound.limiting.plan_limiters import PlanLimiters
    from tidegate.inbound.rules.model import Match, Rules
    from tidegate.inbound.rules.path_readings import Route
    from tidegate.policy import Cost

MAX_CACHED_TARGETS: Final = 4096  # the cache is cleared when it is full
MAX_CACHED_PATH_LENGTH: Final = 256  # targets of longer paths are not cached
METHOD_AND_PATH: Final = 2  # the length of the cache key of most requests
MISSING: Final[Any] = object()


@dataclass(frozen=True, slots=True)
class RequestTarget:
    """The categories and costs that a request is charged to, and whether it is for the admin endpoint."""

    category_limiter: CategoryLimiter | None
    cost: Cost
    special: bool = False  # needs the slow path: charged by its response, several categories, or admin
    admin: bool = False
    more: tuple[tuple[CategoryLimiter, Cost], ...] = ()

    @property
    def charges(self) -> tuple[tuple[CategoryLimiter, Cost], ...]:
        """All categories and costs."""
        return self.more if self.category_limiter is None else ((self.category_limiter, self.cost), *self.more)


class RequestTargets:
    """The targets of requests by the current rules; new rules need a new one."""

    def __init__(self, rules: Rules, category_limiters: Mapping[str, CategoryLimiter], admin_path: str | None) -> None:
        """Find targets by these rules."""
        self._rules = rules
        self._category_limiters = category_limiters
        self._admin_path = admin_path
        self.cached: dict[object, RequestTarget | None] = {}  # None: the request is not limited
        # Those of requests that need nothing special, by method and path.
        self.plain: dict[tuple[str | None, ...], RequestTarget] = {}

    def find(
        self, cache_key: tuple[str | None, ...], methods: tuple[str, ...], routes: Sequence[Route], template: str | None
    ) -> RequestTarget | None:
        """Find the target of a request and cache it under `cache_key`; None if the request is not limited."""
        found = self._match_target(methods, routes, template)
        if sum(map(len, filter(None, cache_key))) <= MAX_CACHED_PATH_LENGTH:
            if len(self.cached) >= MAX_CACHED_TARGETS:
                self.cached.clear()
                self.plain.clear()
            self.cached[cache_key] = found
            is_plain = found is not None and not found.special and not self._rules.by_method
            if found is not None and is_plain and len(cache_key) == METHOD_AND_PATH:
                self.plain[cache_key] = found
        return found

    def _match_target(
        self, methods: tuple[str, ...], routes: Sequence[Route], template: str | None
    ) -> RequestTarget | None:
        target = self._make_target(self._rules.matches(routes, methods, template))
        path, prefixes, _ = routes[0]
        if self._admin_path is None or self._admin_path not in (path, *(prefix + path for prefix in prefixes)):
            return target
        # The admin endpoint is limited only if the rules name its default path; at another path it never is.
        if target is None or self._admin_path != ADMIN_PATH:
            return RequestTarget(None, 0, special=True, admin=True)
        return replace(target, special=True, admin=True)

    def find_for_messages(self, routes: Sequence[Route]) -> RequestTarget | None:
        """Find the target of the messages of a websocket; None if they are not limited."""
        return self._make_target(self._rules.message_matches(routes))

    def _make_target(self, matches: tuple[Match, ...]) -> RequestTarget | None:
        if not matches:
            return None
        (category_limiter, cost), *more = [
            (self._category_limiters[match.category.name], match.cost) for match in matches
        ]
        by_route = category_limiter.category.name == DEFAULT_LIMITS  # its count is not known yet
        special = category_limiter.reserves or by_route or bool(more)
        return RequestTarget(category_limiter, cost, special=special, more=tuple(more))


class MessageTarget:
    """The target of the messages of one websocket, by the current rules."""

    __slots__ = ("_request", "_routes", "_target", "_targets")

    def __init__(self, request: Request, routes: Sequence[Route]) -> None:
        """Find it for this request, and these readings of its path."""
        self._request = request
        self._routes = routes
        self._targets: RequestTargets | None = None
        self._target: RequestTarget | None = None

    def find(self, targets: RequestTargets, plan_limiters: PlanLimiters) -> RequestTarget | None:
        """Return the target; None if the messages are not limited."""
        if targets is not self._targets:  # a reload replaces them
            found = targets.find_for_messages(self._routes)
            self._target = None if found is None else plan_limiters.choose(self._request, found)
            self._targets = targets
        return self._target
