"""Decides the pending charges of a request at the route that the framework has matched, before the endpoint runs.

Routes without limits of their own get a hook, which decides what the middleware left pending. Routes with limits need
none: their decorators and dependencies decide everything together. An application without limits on routes has no
hooks: there the middleware decides at once.

The module knows Starlette's and FastAPI's routes by their attributes, and imports neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_not
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from tidegate.inbound.limiting.fast_decision import decide_deferred
from tidegate.inbound.limiting.limited_functions import is_exempt, is_limited
from tidegate.inbound.limiting.matched_route import matched_route_name
from tidegate.inbound.limiting.request_state import STATE_KEY

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator

    from tidegate.inbound.limiting.request_limiter import RequestLimiter
    from tidegate.inbound.limiting.route_limiters import RouteLimiters
    from tidegate.inbound.limiting.view_hook import ViewHook

    Decide = Callable[..., Awaitable[bool]]  # (scope, receive, send): decides what is pending

MAX_WRAPPED_APPS: Final = 32  # wrapped applications that are inspected
MAX_ROUTERS: Final = 1000  # routers that are inspected
NO_OVERRIDES: Final[Mapping[Any, Any]] = MappingProxyType({})
MAX_DENIED_PATHS: Final = 4096  # the set is cleared when it is full


def wrapped_apps(app: Any) -> Iterator[Any]:  # noqa: ANN401 - any application
    """Yield an application and the applications that it wraps, as far as attributes show them."""
    for _ in range(MAX_WRAPPED_APPS):
        yield getattr(app, "__self__", app)  # the instance of a bound method
        app = getattr(app, "app", None)


class RouteHooks:
    """Finds out whether the routes of an application have limits: `limited`. Subclasses install the hooks.

    Routes are inspected at the first request to each path, when the rules change, and once a second.
    """

    def __init__(self, request_limiter: RequestLimiter, *watched: Collection[Any]) -> None:
        """Watch these routes or views; the first request inspects them."""
        self.request_limiter: RequestLimiter = request_limiter
        self.limited: bool = False  # some route has limits of its own, or routes have default limits
        self.exempts: bool = False  # some route may be exempt
        self._denied_paths: set[tuple[str, str]] = set()  # method and path: their routes are not exempt
        self.watched: list[Collection[Any]] = list(watched)
        self.count: int = -1  # of these, when they were inspected
        self._inspected: list[Any] = []  # the routes or views themselves
        self.defaults: RouteLimiters = request_limiter.route_limiters

    def update(self) -> bool:
        """Inspect routes that were added meanwhile; returns whether there are limits."""
        return self.limited if sum(map(len, self.watched)) == self.count else self.inspect()

    def update_replaced(self) -> None:
        """Inspect routes that were added, or replaced by others in the same place, meanwhile."""
        routes = self._routes()
        if len(routes) != len(self._inspected) or any(map(is_not, routes, self._inspected)):
            self.invalidate()
        self.update()

    def _routes(self) -> list[Any]:
        return [
            route
            for routes in self.watched
            for route in list(routes.values() if isinstance(routes, Mapping) else routes)
        ]

    def invalidate(self) -> None:
        """Inspect again at the next request: other rules apply."""
        self.count = -1

    def inspect(self) -> bool:
        """Look for limits; returns whether there are any."""
        self.defaults = self.request_limiter.route_limiters
        self._denied_paths.clear()
        self.limited = self.find_limits()
        self.count = sum(map(len, self.watched))
        self._inspected = self._routes()
        return self.limited

    def find_limits(self) -> bool:
        """Return whether there are limits; subclasses know how to find them."""
        return False

    def may_be_exempt(self, method: str, path: str) -> bool:
        """Return whether the route of a request may be exempt; before it is matched, only earlier denials show this."""
        return self.exempts and (method, path) not in self._denied_paths

    def record_denial(self, method: str, path: str) -> None:
        """Remember that a request was denied at its route by limits that exempt routes do not have."""
        if self.exempts:
            if len(self._denied_paths) >= MAX_DENIED_PATHS:
                self._denied_paths.clear()
            self._denied_paths.add((method, path))


class AsgiRouteHooks(RouteHooks):
    """The hooks at the routes of a Starlette or FastAPI application, and of those mounted in it."""

    def __init__(self, app: Any, decide: Decide, request_limiter: RequestLimiter) -> None:  # noqa: ANN401 - any application
        """Look for routes in this application; `decide` decides what is pending."""
        super().__init__(request_limiter)
        self._app = app
        self._decide = decide
        self._views: ViewHook | None = None  # of a Quart application

    def find_limits(self) -> bool:
        """Look for limits, and give routes their hooks; returns whether there are limits."""
        self.watched.clear()
        self.exempts = False
        leaves: list[Any] = []
        for app in wrapped_apps(self._app):
            if hasattr(app, "_view_middleware"):
                from tidegate.inbound import django  # noqa: PLC0415 - only a Django application needs it

                hook = django.DjangoViewHook(app, self.request_limiter)
                self.exempts = hook.exempts
                return hook.find_limits()
            if hasattr(app, "view_functions") and hasattr(app, "before_request_funcs"):
                from tidegate.inbound import quart  # noqa: PLC0415 - only a Quart application needs it

                self._views = self._views or quart.QuartViewHook(app, self.request_limiter)
                self.watched.extend(self._views.watched)
                limited = self._views.inspect()
                self.exempts = self._views.exempts
                return limited
            router = getattr(app, "router", app)
            if has_known_routes(router):
                limited = self._walk(router, leaves) or bool(self.defaults)
                for route in leaves if limited else ():
                    self._install(route)
                return limited
        return False

    def _walk(self, router: Any, leaves: list[Any]) -> bool:  # noqa: ANN401 - any router
        """Find all routes below a router, of mounted applications and included routers, too; return whether limited."""
        routes = router.routes
        if len(self.watched) >= MAX_ROUTERS or any(routes is known for known in self.watched):
            return False
        self.watched.append(routes)
        limited = has_limit(getattr(router, "dependencies", ()))
        for route in routes:
            self.exempts = self.exempts or is_exempt_route(route)
            limited = limited or self.exempts or is_limited_route(route)
            included = getattr(route, "original_router", None)
            below = included or mounted_router(route)
            if below is not None:
                limited = self._walk(below, leaves) or limited
            # FastAPI copies Starlette's routes of an included router: what handles them is not in this list.
            if below is None or (included is not None and not all(hasattr(each, "dependant") for each in below.routes)):
                leaves.append(route)
        return limited

    def _install(self, route: Any) -> None:  # noqa: ANN401 - any route
        handle = getattr(route, "handle", None)
        if handle is None or isinstance(handle, RouteHook) or decides_itself(route):
            return
        route.handle = RouteHook(route, handle, self._decide)


class RouteHook:
    """Decides what is pending, then lets the route handle the request."""

    def __init__(self, route: Any, handle: Any, decide: Decide) -> None:  # noqa: ANN401 - any route
        """Wrap this route."""
        self._route = route
        self._handle = handle
        self._decide = decide
        self._exempt = is_exempt_route(route)
        self._decides_itself = is_limited_route(route) and not hasattr(route, "dependant")
        self._dependants: dict[int, tuple[Any, bool]] = {}

    def __call__(self, scope: Any, receive: Any, send: Any) -> Awaitable[None]:  # noqa: ANN401 - as ASGI has it
        """Handle a request that the router has matched."""
        request_state = scope.get(STATE_KEY)
        if request_state is not None and self._exempt:
            request_state.pending = ()
        if request_state is None or not request_state.is_pending or self._is_limited(scope):
            return self._handle(scope, receive, send)  # type: ignore[no-any-return]  # as the route has it
        if request_state.by_route:
            request_state.choose_route(matched_route_name(scope, self._route))
        if decide_deferred(request_state):
            return self._handle(scope, receive, send)  # type: ignore[no-any-return]  # as above
        return self._decide_first(scope, receive, send)

    async def _decide_first(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - as ASGI has it
        if await self._decide(scope, receive, send):
            await self._handle(scope, receive, send)

    def _is_limited(self, scope: Any) -> bool:  # noqa: ANN401 - a scope
        """Return whether limits of the route itself decide."""
        route = self._route
        if not hasattr(route, "dependant"):
            return self._decides_itself and (
                not isinstance(route.endpoint, type) or is_limited(class_handler(route.endpoint, scope.get("method")))
            )
        # A router's dependencies belong to the way it is included; FastAPI keeps them in another object.
        context = scope.get("fastapi", {}).get("effective_route_context")
        dependant = (context if getattr(context, "original_route", None) is route else route).dependant
        overrides = dependency_overrides(scope)
        if overrides:  # only in tests: not cached
            return has_limit_dependency(dependant, overrides)
        known = self._dependants.get(id(dependant))
        if known is None:
            known = self._dependants[id(dependant)] = (dependant, has_limit_dependency(dependant))
        return known[1]


def has_known_routes(router: Any) -> bool:  # noqa: ANN401 - any router
    """Return whether the routes are those of Starlette or FastAPI; Litestar has another kind."""
    routes = getattr(router, "routes", None)
    return isinstance(routes, list) and all(hasattr(route, "matches") for route in routes)


def mounted_router(route: Any) -> Any:  # noqa: ANN401 - any route
    """Return the router of a mounted application; None if it is not a mount, or its routes are unknown."""
    if hasattr(route, "endpoint"):
        return None
    app = getattr(route, "_base_app", None) or getattr(route, "app", None)
    router = getattr(app, "router", app)
    return router if has_known_routes(router) else None


def is_limited_route(route: Any) -> bool:  # noqa: ANN401 - any route
    """Return whether a route has limits of its own."""
    dependant = getattr(route, "dependant", None)
    if dependant is not None and has_limit_dependency(dependant):
        return True
    if has_limit(getattr(getattr(route, "include_context", None), "dependencies", ())):  # of an included router
        return True
    endpoint = getattr(route, "endpoint", None)
    if isinstance(endpoint, type):
        return any(is_limited(value) for value in vars(endpoint).values())
    return is_limited(endpoint)


def decides_itself(route: Any) -> bool:  # noqa: ANN401 - any route
    """Return whether the endpoint is a limited function, whose limits decide everything: the route needs no hook."""
    endpoint = getattr(route, "endpoint", None)
    if hasattr(route, "dependant") or isinstance(endpoint, type) or is_exempt(endpoint):
        return False
    return is_limited(endpoint)


def is_exempt_route(route: Any) -> bool:  # noqa: ANN401 - any route
    """Return whether the endpoint of a route is exempt."""
    return is_exempt(getattr(route, "endpoint", None))


def class_handler(endpoint: type, method: str | None) -> object:
    """Return the method of an endpoint class that handles a request, as Starlette's HTTPEndpoint chooses it."""
    name = (method or "GET").lower()
    return getattr(endpoint, "get" if name == "head" and not hasattr(endpoint, "head") else name, None)


def has_limit_dependency(dependant: Any, overrides: Mapping[Any, Any] = NO_OVERRIDES) -> bool:  # noqa: ANN401 - FastAPI's
    """Return whether a limit is among the dependencies of a route."""
    return any(True for _ in limit_dependencies(dependant, overrides))


def limit_dependencies(dependant: Any, overrides: Mapping[Any, Any]) -> Iterator[Any]:  # noqa: ANN401 - FastAPI's
    """Yield the limits among dependencies, in order; `overrides` replace dependencies and all that they depend on."""
    for each in dependant.dependencies:
        called = overrides.get(each.call, each.call)
        if is_limit(called):
            yield called
        if called is each.call:
            yield from limit_dependencies(each, overrides)


def dependency_overrides(scope: Any) -> Mapping[Any, Any]:  # noqa: ANN401 - a scope
    """Return the dependencies that a test of a FastAPI application replaces."""
    return getattr(scope.get("app"), "dependency_overrides", None) or NO_OVERRIDES


def has_limit(dependencies: Iterable[Any]) -> bool:
    """Return whether a limit is among FastAPI's `Depends(…)`."""
    return any(is_limit(each.dependency) for each in dependencies)


def is_limit(call: object) -> bool:
    """Return whether a dependency is a limit."""
    return getattr(call, "limits_routes", False) is True


__all__ = [
    "AsgiRouteHooks",
    "RouteHook",
    "RouteHooks",
    "class_handler",
    "has_limit_dependency",
    "is_limit",
    "wrapped_apps",
]
