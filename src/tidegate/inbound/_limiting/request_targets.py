"""What requests with the same method and path are charged: categories and limits of the route; cached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate.inbound._rules.model import ADMIN_PATH, DEFAULT_LIMITS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tidegate._policy import Cost
    from tidegate.inbound._client.request import Request
    from tidegate.inbound._limiting.category_limiter import CategoryLimiter, RouteLimiters
    from tidegate.inbound._limiting.decide import ChargeSet
    from tidegate.inbound._limiting.matched_route import MatchedRoute
    from tidegate.inbound._limiting.plan_limiters import PlanLimiters
    from tidegate.inbound._rules.model import Match, Rules
    from tidegate.inbound._rules.path_readings import Route

    Categories = tuple[tuple[CategoryLimiter, Cost], ...]

MAX_CACHED_TARGETS: Final = 4096  # the cache is cleared when it is full
MAX_CACHED_PATH_LENGTH: Final = 256  # targets of longer paths are not cached
MISSING: Final[Any] = object()


class RequestTarget:
    """The categories and the route of a request, and whether it is for the admin endpoint."""

    __slots__ = ("admin", "categories", "dropped", "needs_request", "prepared", "route", "unplanned")

    def __init__(
        self,
        categories: Categories,
        route: MatchedRoute | None = None,
        *,
        admin: bool = False,
        dropped: Categories = (),
    ) -> None:
        """Take what a request is charged; `dropped`: the categories that it would be charged, were it not exempt."""
        self.categories: Categories = categories
        self.route: MatchedRoute | None = route
        self.admin: bool = admin
        self.dropped: Categories = dropped
        # Whether a limit of the route reads the headers to choose its key.
        self.needs_request: bool = route is not None and any(use.limit.has_key for use in route.uses)
        # What its requests are charged, by plan (None: no plan); None: it cannot be prepared.
        self.prepared: dict[str | None, ChargeSet | None] = {}
        self.unplanned: ChargeSet | None = None  # the same without a plan, if the key of the client is all it needs

    @property
    def has_limits(self) -> bool:
        """Whether a request is limited at all: it or its route is charged, or blocked clients are denied."""
        return bool(self.categories or self.dropped) or (self.route is not None and self.route.is_limited)


class RequestTargets:
    """The targets of requests by the current rules and routes; new rules need a new one."""

    def __init__(
        self,
        rules: Rules,
        category_limiters: Mapping[str, CategoryLimiter],
        route_limiters: RouteLimiters,
        admin_path: str | None,
    ) -> None:
        """Find targets by these rules."""
        self._rules = rules
        self._category_limiters = category_limiters
        self._route_limiters = route_limiters
        self._admin_path = admin_path
        self.cached: dict[object, RequestTarget | None] = {}  # None: the request is not limited
        # The same, for requests that are known by method and path alone.
        self.plain: dict[object, RequestTarget | None] = {} if rules.by_method else self.cached

    def clear(self) -> None:
        """Forget all targets: the routes have changed."""
        self.cached.clear()

    def find(
        self,
        cache_key: tuple[str | None, ...],
        methods: tuple[str, ...],
        routes: Sequence[Route],
        template: str | None,
        route: MatchedRoute | None = None,
    ) -> RequestTarget | None:
        """Find the target of a request and cache it under `cache_key`; None if the request is not limited."""
        found = self._match_target(methods, routes, template, route)
        if sum(map(len, filter(None, cache_key))) <= MAX_CACHED_PATH_LENGTH:
            if len(self.cached) >= MAX_CACHED_TARGETS:
                self.clear()
            self.cached[cache_key] = found
        return found

    def _match_target(
        self, methods: tuple[str, ...], routes: Sequence[Route], template: str | None, route: MatchedRoute | None
    ) -> RequestTarget | None:
        categories = self._make_categories(self._rules.matches(routes, methods, template))
        path, prefixes, _ = routes[0]
        if self._admin_path is not None and self._admin_path in (path, *(prefix + path for prefix in prefixes)):
            # The admin endpoint is limited only if the rules name its default path; at another path it never is.
            return RequestTarget(categories if self._admin_path == ADMIN_PATH else (), admin=True)
        if route is not None and self._rules.enabled:
            if route.exempt:
                target = RequestTarget((), route, dropped=categories)
            else:
                target = RequestTarget(self._at_route(categories, route), route)
        else:
            target = RequestTarget(categories)
        return target if target.has_limits else None

    def _at_route(self, categories: Categories, route: MatchedRoute) -> Categories:
        """Return the categories of a request to a route: default limits count by route, unless it has its own."""
        if not self._route_limiters:
            return categories
        return tuple(
            each for each in categories if each[0].category.name != DEFAULT_LIMITS or not route.replaces_defaults
        )

    def find_for_messages(self, routes: Sequence[Route]) -> RequestTarget | None:
        """Find the target of the messages of a websocket; None if they are not limited."""
        categories = self._make_categories(self._rules.message_matches(routes))
        return RequestTarget(categories) if categories else None

    def _make_categories(self, matches: Sequence[Match]) -> Categories:
        return tuple([(self._category_limiters[match.category.name], match.cost) for match in matches])


class MessageTarget:
    """The target of the messages of one websocket, by the current rules."""

    __slots__ = ("_categories", "_request", "_routes", "_targets")

    def __init__(self, request: Request, routes: Sequence[Route]) -> None:
        """Find it for this request, and these readings of its path."""
        self._request = request
        self._routes = routes
        self._targets: RequestTargets | None = None
        self._categories: Categories = ()

    def find(self, targets: RequestTargets, plan_limiters: PlanLimiters) -> Categories:
        """Return the categories that a message is charged to; none if the messages are not limited."""
        if targets is not self._targets:  # a reload replaces them
            found = targets.find_for_messages(self._routes)
            self._categories = () if found is None else plan_limiters.choose(self._request, found.categories)
            self._targets = targets
        return self._categories
