"""Finds the routes of Starlette and FastAPI: also those of mounted applications and included routers.

Each router has an index of its routes by the literal start of their paths, so that only few routes are asked whether
they match. The module knows the routes by their public attributes, and imports neither framework.
"""

from __future__ import annotations

import sys
from operator import is_not
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.inbound._limiting.limited_functions import is_exempt, is_limited, stack_of
from tidegate.inbound._limiting.matched_route import (
    MatchedRoute,
    RouteFinder,
    RouteUse,
    class_handler,
    matched_route_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

MAX_ROUTERS: Final = 1000  # routers that are inspected
MAX_CANDIDATES: Final = 32  # routes that are asked whether they match; if there are more, the endpoint charges
FULL_MATCH: Final = "FULL"  # the name of Starlette's result: path and method match


class AsgiRoutes(RouteFinder):
    """The routes of a Starlette or FastAPI application."""

    def __init__(self, router: Any, has_defaults: Callable[[], bool]) -> None:  # noqa: ANN401 - any router
        """Find the routes of this router; `has_defaults` returns whether there are default limits."""
        self._router = router
        self._has_defaults = has_defaults
        self._watched: list[list[Any]] = []
        self._inspected: list[Any] = []
        self._defaulted = False
        self._index: RouterIndex | None = None

    def update(self) -> bool:
        """Inspect routes that were added or replaced meanwhile; returns whether anything has changed."""
        defaulted = self._has_defaults()
        routes = [route for watched in self._watched for route in watched]
        if (
            self._index is not None
            and defaulted is self._defaulted
            and len(routes) == len(self._inspected)
            and not any(map(is_not, routes, self._inspected))
        ):
            return False
        self._defaulted, self._watched = defaulted, []
        self._index = RouterIndex(self._router, self._watched)
        self._inspected = [route for watched in self._watched for route in watched]
        self.limited = defaulted or self._index.limited
        return True

    def find(self, method: str, path: str, request: Any) -> MatchedRoute | None:  # noqa: ANN401 - a scope
        """Return the route of a request; None if none matches, or if it cannot be known before it runs."""
        if self._index is None or not self.limited:
            return None
        root = request.get("root_path") or ""
        if root and path.startswith(root):
            path = path[len(root) :]
        return self._index.find(path, dict(request), method)


class IndexedRoute(NamedTuple):
    """A route of a router, and its position: the first one that matches handles the request."""

    position: int
    route: Any
    child: RouterIndex | None  # of a mounted application


class RouterIndex:
    """The routes of one router, by the literal start of their paths."""

    def __init__(self, router: Any, watched: list[list[Any]]) -> None:  # noqa: ANN401 - any router
        """Inspect the routes; adds their lists to those that are watched."""
        self._by_start: dict[str, list[IndexedRoute]] = {}
        self.limited = has_limit(getattr(router, "dependencies", ()))
        watched.append(router.routes)
        for position, route in enumerate(all_routes(router.routes, watched)):
            child = None
            below = mounted_router(route)
            if below is not None and len(watched) < MAX_ROUTERS and not any(below.routes is each for each in watched):
                child = RouterIndex(below, watched)
                self.limited = self.limited or child.limited
            self.limited = self.limited or is_limited_route(route) or is_exempt(getattr(route, "endpoint", None))
            self._by_start.setdefault(literal_start(route), []).append(IndexedRoute(position, route, child))

    def find(self, path: str, scope: dict[str, Any], method: str) -> MatchedRoute | None:
        """Return the route of a request; None if none matches, or if it cannot be known before it runs."""
        found = list(self._candidates(path))
        if len(found) > MAX_CANDIDATES:
            return None
        for _, route, child in sorted(found, key=_position) if len(found) > 1 else found:
            match, added = route.matches(scope)
            if match.name != FULL_MATCH:
                continue
            scope = {**scope, **added}
            if child is None:
                return matched(route, scope, method) if is_endpoint(route) else None
            root = scope.get("root_path") or ""
            inner = scope["path"]
            return child.find(inner.removeprefix(root), scope, method)
        return None

    def _candidates(self, path: str) -> Iterator[IndexedRoute]:
        """Yield the routes that may match a path: those that start with it, or with one of its parts."""
        by_start = self._by_start
        yield from by_start.get("", ())
        if not path.endswith("/"):
            yield from by_start.get(path, ())
        end = path.find("/")
        while end >= 0:
            yield from by_start.get(path[: end + 1], ())
            end = path.find("/", end + 1)


def _position(indexed: IndexedRoute) -> int:
    return indexed.position


def is_endpoint(route: Any) -> bool:  # noqa: ANN401 - any route
    """Return whether a route calls an endpoint, unlike a mount."""
    return getattr(route, "endpoint", None) is not None


def literal_start(route: Any) -> str:  # noqa: ANN401 - any route
    """Return a string that is one of the parts of every path that a route matches; empty if it is not known."""
    path = getattr(route, "path", None)
    if not isinstance(path, str) or not hasattr(route, "path_regex"):
        return ""
    start, variable, _ = path.partition("{")
    if not is_endpoint(route):  # a mount
        start = start if variable else f"{start}/"
        variable = "{"
    return start[: start.rfind("/") + 1] if variable else start


def all_routes(routes: list[Any], watched: list[list[Any]]) -> Iterable[Any]:
    """Return routes in the order in which they are asked; those of routers that FastAPI has included, too."""
    for route in routes:
        _watch_included(route, watched)
    contexts = getattr(sys.modules.get("fastapi.routing"), "iter_route_contexts", None)
    if contexts is None or not any(hasattr(route, "original_router") for route in routes):
        return routes
    return contexts(routes)  # type: ignore[no-any-return]  # of FastAPI


def _watch_included(route: Any, watched: list[list[Any]]) -> None:  # noqa: ANN401 - any route
    included = getattr(route, "original_router", None)
    if included is not None and len(watched) < MAX_ROUTERS:
        watched.append(included.routes)
        for each in included.routes:
            _watch_included(each, watched)


def matched(route: Any, scope: dict[str, Any], method: str) -> MatchedRoute:  # noqa: ANN401 - any route
    """Return what is known about a route that matches a request."""
    name = matched_route_name(scope, route, route.path)
    endpoint = route.endpoint
    uses: list[RouteUse] = []
    covers: list[object] = []
    dependant = getattr(route, "dependant", None)
    if dependant is not None:
        for limit in dict.fromkeys(limit_dependencies(dependant)):
            uses.append(RouteUse(limit, name))
            if not limit.has_functions:
                covers.append((limit, id(dependant)))
    stack = stack_of(class_handler(endpoint, method) if isinstance(endpoint, type) else endpoint)
    if stack is not None:
        uses += stack.uses
        covers += [stack, *stack.covers]
    return MatchedRoute.of(name, uses, covers, method, exempt=is_exempt(endpoint))


def has_known_routes(router: Any) -> bool:  # noqa: ANN401 - any router
    """Return whether the routes are those of Starlette or FastAPI; Litestar has another kind."""
    routes = getattr(router, "routes", None)
    return isinstance(routes, list) and all(hasattr(route, "matches") for route in routes)


def mounted_router(route: Any) -> Any:  # noqa: ANN401 - any route
    """Return the router of a mounted application; None if it is not a mount, or its routes are unknown."""
    if is_endpoint(route):
        return None
    app = getattr(route, "_base_app", None) or getattr(route, "app", None)
    router = getattr(app, "router", app)
    return router if has_known_routes(router) else None


def is_limited_route(route: Any) -> bool:  # noqa: ANN401 - any route
    """Return whether a route has limits of its own."""
    dependant = getattr(route, "dependant", None)
    if dependant is not None and any(True for _ in limit_dependencies(dependant)):
        return True
    endpoint = getattr(route, "endpoint", None)
    if isinstance(endpoint, type):
        return any(is_limited(value) for value in vars(endpoint).values())
    return is_limited(endpoint)


def limit_dependencies(dependant: Any, overrides: Mapping[Any, Any] | None = None) -> Iterator[Any]:  # noqa: ANN401 - FastAPI's
    """Yield the limits among dependencies, in order; `overrides` replace dependencies and all that they depend on."""
    for each in dependant.dependencies:
        called = overrides.get(each.call, each.call) if overrides else each.call
        if is_limit(called):
            yield called
        if called is each.call:
            yield from limit_dependencies(each, overrides)


def has_limit(dependencies: Iterable[Any]) -> bool:
    """Return whether a limit is among FastAPI's `Depends(…)`."""
    return any(is_limit(each.dependency) for each in dependencies)


def is_limit(call: object) -> bool:
    """Return whether a dependency is a limit."""
    return getattr(call, "limits_routes", False) is True
