"""The route of a request, found before the application runs, and the limits of it that a middleware charges.

A middleware charges the categories and the limits of the route in one step. For that it finds the route by the public
resolver of the framework, once for each method and path, and only if some route has limits. The endpoint that runs
checks that its own limits were charged (`RequestState.take`), so a path that is rewritten in between is no bypass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tidegate.inbound._limiting.route_limit import RouteLimit

    Scope = Any  # a mutable mapping; frameworks have different types for it

MAX_WRAPPED_APPS: Final = 32  # wrapped applications that are inspected


class RouteUse(NamedTuple):
    """A limit at a route; the route is the name of its count, unless the limit has a scope."""

    limit: RouteLimit
    route: str

    @property
    def policy_name(self) -> str:
        """The name under which the store keeps the count."""
        return f"{self.limit.scope or self.route}:{self.limit.name}"


class MatchedRoute(NamedTuple):
    """A route: its name, and its limits."""

    name: str  # of its count of default limits
    uses: tuple[RouteUse, ...] = ()  # the limits that a middleware charges
    covers: tuple[object, ...] = ()  # what the endpoint asks for, to see that these were charged
    late: tuple[RouteUse, ...] = ()  # the limits that the endpoint charges: they call functions
    exempt: bool = False
    replaces_defaults: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        uses: Iterable[RouteUse],
        covers: Iterable[object],
        method: str,
        *,
        exempt: bool = False,
        together: bool = False,
    ) -> MatchedRoute:
        """Divide the limits of a route into those that a middleware charges and those that call functions.

        With `together`, the middleware charges all: it knows the framework's own request.
        """
        early: list[RouteUse] = []
        late: list[RouteUse] = []
        replaces_defaults = False
        for use in uses:
            (late if use.limit.has_functions and not together else early).append(use)
            replaces_defaults = replaces_defaults or (use.limit.override_defaults and use.limit.applies_to(method))
        return cls(name, tuple(early), tuple(dict.fromkeys(covers)), tuple(late), exempt, replaces_defaults)

    @property
    def is_limited(self) -> bool:
        """Whether the route has limits of its own."""
        return bool(self.uses or self.late)


class RouteFinder:
    """Finds the routes of an application; this one knows none."""

    limited: bool = False  # whether some route has limits or is exempt, or there are default limits

    def update(self) -> bool:
        """Inspect routes that were added or replaced meanwhile; returns whether anything has changed."""
        return False

    def find(self, method: str, path: str, request: Any) -> MatchedRoute | None:  # noqa: ANN401 - a scope or environ
        """Return the route of a request; None if none matches, or if it cannot be known before it runs."""
        del method, path, request
        return None

    @property
    def overrides(self) -> object:
        """Whether a test replaces dependencies, so that no route is known before it runs."""
        return None


def wrapped_apps(app: Any) -> Iterator[Any]:  # noqa: ANN401 - any application
    """Yield an application and the applications that it wraps, as far as attributes show them."""
    for _ in range(MAX_WRAPPED_APPS):
        yield getattr(app, "__self__", app)  # the instance of a bound method
        app = getattr(app, "app", None)


def find_template(scope: Scope) -> str | None:
    """Return the template of the route that the framework has already matched, or None."""
    route = scope.get("route")
    if route is None or not hasattr(route, "endpoint"):
        return None  # no route, or a mount, whose route is not matched yet
    # For included routers, FastAPI keeps the path with its prefix in another object.
    included = scope.get("fastapi", {}).get("effective_route_context")
    if getattr(included, "original_route", None) is route:
        route = getattr(included, "starlette_route", None) or included
    template = getattr(route, "path", None)
    return template if isinstance(template, str) else None


def has_fixed_mount(scope: Scope) -> bool:
    """Return whether the mount point is constant, unlike Starlette's Mount("/{tenant}"), which the client chooses."""
    root, parts = scope.get("root_path"), scope.get("path_params")
    return not root or not parts or not any(str(part) in root for part in parts.values())


def matched_route_name(scope: Scope, route: Any, template: str | None = None) -> str:  # noqa: ANN401 - any route
    """Name the route that was matched: its methods, the mount point of its application, and its template."""
    methods = "|".join(sorted(getattr(route, "methods", None) or ["WEBSOCKET"]))
    root = scope.get("root_path") or ""
    mount = root.removeprefix(scope.get("app_root_path", root)) if has_fixed_mount(scope) else ""
    return f"{methods} {mount}{template or find_template(scope) or getattr(route, 'path', '')}"


def class_handler(endpoint: type, method: str | None) -> object:
    """Return the method of an endpoint class that handles a request, as Starlette's HTTPEndpoint chooses it."""
    name = (method or "GET").lower()
    return getattr(endpoint, "get" if name == "head" and not hasattr(endpoint, "head") else name, None)
