"""Finds the routes of Flask and Quart: their views and blueprints, and the limits of these."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate.inbound._limiting.limited_functions import is_exempt, is_limited, route_name, stack_of
from tidegate.inbound._limiting.matched_route import MatchedRoute, RouteFinder, RouteUse, class_handler
from tidegate.inbound._limiting.settle import FIRST_SERVER_ERROR
from tidegate.inbound._responses.response import BODY_HEADERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.inbound._limiting.limited_functions import LimitStack
    from tidegate.inbound._limiting.route_limit import RouteLimit
    from tidegate.inbound._responses.response import Response

OK: Final = 200
BLUEPRINT_LIMITS: Final = "__tidegate_blueprint_limits__"
SERVER_NAME: Final = "localhost"  # routes that depend on the host are not matched


class WerkzeugRoutes(RouteFinder):
    """The routes of a Flask or Quart application."""

    def __init__(self, app: Any, has_defaults: Callable[[], bool]) -> None:  # noqa: ANN401 - a Flask or Quart application
        """Find the routes of this application; `has_defaults` returns whether there are default limits."""
        self._app = app
        self._has_defaults = has_defaults
        self._inspected: tuple[object, ...] | None = None

    def update(self) -> bool:
        """Inspect views that were added or replaced meanwhile; returns whether anything has changed."""
        views, blueprints = tuple(self._app.view_functions.values()), tuple(self._app.blueprints.values())
        state = (self._has_defaults(), views, blueprints, sum(len(vars(each)) for each in blueprints))
        if state == self._inspected:
            return False
        self._inspected = state
        self.limited = (
            self._has_defaults()
            or any(map(is_exempt, (*views, *blueprints)))
            or any(map(is_limited_view, views))
            or any(BLUEPRINT_LIMITS in vars(each) for each in blueprints)
        )
        return True

    def find(self, method: str, path: str, request: Any) -> MatchedRoute | None:  # noqa: ANN401 - a scope or environ
        """Return the route of a request; None if none matches, or if it depends on the host."""
        app = self._app
        if not self.limited or app.url_map.host_matching or app.subdomain_matching:
            return None
        websocket = request.get("type") == "websocket"
        root = request.get("root_path") or ""
        if root and path.startswith(root):
            path = path[len(root) :]
        adapter = app.url_map.bind(SERVER_NAME, path_info=path, default_method=method)
        try:
            rule, _ = adapter.match(return_rule=True, websocket=websocket)
        except Exception:  # noqa: BLE001 - no route, another method, a redirect: exceptions of Werkzeug
            return None
        view = app.view_functions.get(rule.endpoint)
        if view is None or (method == "OPTIONS" and getattr(rule, "provide_automatic_options", False)):
            return None  # the framework answers the request itself
        blueprints = blueprints_of(app, rule.endpoint)
        route, stack = route_name(view), view_stack(view, method)
        uses = blueprint_uses(app, rule.endpoint, route, stack, method)
        covers: list[object] = [("blueprints", route)] if uses else []
        if stack is not None:
            uses += stack.uses
            covers += [stack, *stack.covers]
        return MatchedRoute.of(route, uses, covers, method, exempt=any(map(is_exempt, (view, *blueprints))))


def is_limited_view(view: Any) -> bool:  # noqa: ANN401 - any function
    """Return whether a view has limits."""
    methods = vars(view.view_class).values() if hasattr(view, "view_class") else ()
    return is_limited(view) or any(map(is_limited, methods))


def view_stack(view: Any, method: str) -> LimitStack | None:  # noqa: ANN401 - any function
    """Return the limits of a view, or of the method of a class-based view."""
    found = stack_of(view)
    if found is None and hasattr(view, "view_class"):
        found = stack_of(class_handler(view.view_class, method))
    return found


def blueprint_names(endpoint: str) -> list[str]:
    """Return the names of the blueprints of an endpoint, the innermost first, as Flask and Quart read them.

    An endpoint may contain a dot without a blueprint of that name.
    """
    parts = endpoint.split(".")[:-1]
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def blueprints_of(app: Any, endpoint: str) -> list[Any]:  # noqa: ANN401 - of Flask or Quart
    """Return the blueprints of an endpoint, the innermost first."""
    return [app.blueprints[name] for name in blueprint_names(endpoint) if name in app.blueprints]


def blueprint_uses(app: Any, endpoint: str, route: str, stack: LimitStack | None, method: str) -> list[RouteUse]:  # noqa: ANN401 - as above
    """Return the limits of the blueprints of a route; default ones only if its view has no limits of its own."""
    own = () if stack is None else stack.uses
    replaced = any(use.limit.override_defaults and use.limit.applies_to(method) for use in own)
    return [
        RouteUse(limit, route)
        for blueprint in blueprints_of(app, endpoint)
        for limit in limits_of_blueprint(blueprint)
        if not (limit.as_default and replaced)
    ]


def limits_of_blueprint(blueprint: Any) -> list[RouteLimit]:  # noqa: ANN401 - of Flask or Quart
    """Return the limits of a blueprint."""
    return vars(blueprint).get(BLUEPRINT_LIMITS, [])  # type: ignore[no-any-return]  # as `add_limit` leaves them


def add_limit(limit: RouteLimit, blueprint: Any) -> bool:  # noqa: ANN401 - of Flask or Quart
    """Add a limit to every route of a blueprint; returns whether it is the first one."""
    known = vars(blueprint).setdefault(BLUEPRINT_LIMITS, [])
    known.append(limit)
    return len(known) == 1


def status_of(result: Any) -> int:  # noqa: ANN401 - whatever a view returns or raises
    """Return the status of the result of a view: a response, an exception, a tuple with a status, or a body."""
    if isinstance(result, Exception):  # an HTTPException of Werkzeug
        code: int | None = getattr(result, "code", None) or getattr(
            getattr(result, "response", None), "status_code", None
        )
        return FIRST_SERVER_ERROR if code is None else code
    given = result[1] if isinstance(result, tuple) and len(result) > 1 else None
    return given if isinstance(given, int) else getattr(result, "status_code", OK)


def add_missing_headers(sent: Any, denial: Response) -> None:  # noqa: ANN401 - a response of Flask or Quart
    """Add the header fields of a denial to the response that an error handler has built in its place."""
    if sent.status_code == denial.status:
        for name, value in denial.headers:
            if name.lower() not in BODY_HEADERS:
                sent.headers.setdefault(name, value)
