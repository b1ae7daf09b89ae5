"""What the hooks of Flask and Quart share: which views decide by themselves, and the routes of default limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate.inbound.limiting.category_limiter import FIRST_SERVER_ERROR
from tidegate.inbound.limiting.limited_functions import STACK_ATTRIBUTE, is_exempt, is_limited, route_name
from tidegate.inbound.limiting.route_hooks import RouteHooks, class_handler
from tidegate.inbound.responses.response import BODY_HEADERS

if TYPE_CHECKING:
    from tidegate.inbound.limiting.limited_functions import LimitStack
    from tidegate.inbound.limiting.request_limiter import RequestLimiter
    from tidegate.inbound.limiting.request_state import RequestState
    from tidegate.inbound.limiting.route_limit import RouteLimit
    from tidegate.inbound.responses.response import Response

OK: Final = 200
BLUEPRINT_LIMITS: Final = "__tidegate_blueprint_limits__"
METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))  # that are cached


class ViewHook(RouteHooks):
    """Decides what the middleware left pending, before the view of a route without limits runs.

    Subclasses install themselves before all that the application has registered with `before_request`.
    """

    def __init__(self, app: Any, request_limiter: RequestLimiter) -> None:  # noqa: ANN401 - a Flask or Quart application
        """Look for limits in this application."""
        super().__init__(request_limiter, app.view_functions)
        self.app = app
        self._installed = False
        self._pending: dict[tuple[str | None, str], bool | None] = {}  # by endpoint and method; None: exempt

    def find_limits(self) -> bool:
        """Return whether some view or blueprint has limits, or routes have default limits."""
        self._pending.clear()
        views, blueprints = self.app.view_functions.values(), self.app.blueprints.values()
        self.exempts = any(map(is_exempt, (*views, *blueprints)))
        limited = (
            self.exempts
            or bool(self.defaults)
            or any(map(is_limited_view, views))
            or any(BLUEPRINT_LIMITS in vars(each) for each in blueprints)
        )
        if limited and not self._installed:
            self._installed = True
            self.install()
        return limited

    def install(self) -> None:
        """Decide before the functions that the application has registered with `before_request`."""
        raise NotImplementedError

    def decides(self, request: Any, request_state: RequestState) -> bool:  # noqa: ANN401 - the framework's
        """Return whether the hook decides what is pending: not for exempt views, nor if limits of the route do."""
        route = (request.endpoint, request.method)
        decides = self._pending.get(route, False)
        if route not in self._pending:
            view = current_view(self.app, request)
            limited = view_stack(self.app, request) is not None or blueprint_limits(self.app, request)
            exempt = is_exempt(view) or any(map(is_exempt, current_blueprints(self.app, request)))
            decides = None if exempt else not limited
            if request.endpoint is not None and request.method in METHODS:
                self._pending[route] = decides
        if decides is None:
            request_state.pending = ()
        if decides and request_state.by_route and request.endpoint is not None:
            request_state.choose_route(route_name(current_view(self.app, request)))
        return bool(decides)


def is_limited_view(view: Any) -> bool:  # noqa: ANN401 - any function
    """Return whether a view has limits."""
    methods = vars(view.view_class).values() if hasattr(view, "view_class") else ()
    return is_limited(view) or any(map(is_limited, methods))


def current_view(app: Any, request: Any) -> Any:  # noqa: ANN401 - any function
    """Return the view of the current route; None if no route matches."""
    return app.view_functions.get(request.endpoint or "")


def view_stack(app: Any, request: Any) -> LimitStack | None:  # noqa: ANN401 - as above
    """Return the limits of the view of the current route."""
    view = current_view(app, request)
    found: LimitStack | None = getattr(view, STACK_ATTRIBUTE, None)
    if found is None and hasattr(view, "view_class"):
        found = getattr(class_handler(view.view_class, request.method), STACK_ATTRIBUTE, None)
    return found


def current_blueprints(app: Any, request: Any) -> list[Any]:  # noqa: ANN401 - as above
    """Return the blueprints of the current route, the innermost first.

    Flask and Quart read their names from the endpoint, which may contain a dot without a blueprint of that name.
    """
    return [app.blueprints[name] for name in request.blueprints if name in app.blueprints]


def blueprint_limits(app: Any, request: Any) -> list[RouteLimit]:  # noqa: ANN401 - as above
    """Return the limits of the blueprints of the current route."""
    return [limit for each in current_blueprints(app, request) for limit in vars(each).get(BLUEPRINT_LIMITS, ())]


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
