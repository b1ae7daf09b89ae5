"""Limits on single routes in Flask: `@limit("5/1m")` below `@app.get("/…")`, or `limit("5/1m")(blueprint)`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from tidegate._runtime.flow import run
from tidegate.errors import ConfigError
from tidegate.inbound._client.request import is_async_callable
from tidegate.inbound._limiting.blueprint_limits import check_blueprints_flow
from tidegate.inbound._limiting.charges import perform
from tidegate.inbound._limiting.limited_call import (
    FrameworkLimit,
    FrameworkLimits,
    decorate,
    settle_standalone_flow,
    standalone_fields,
)
from tidegate.inbound._limiting.limited_functions import exempt
from tidegate.inbound._limiting.native_requests import EnvironRequests
from tidegate.inbound._limiting.werkzeug_routes import add_limit, add_missing_headers

try:
    import flask

    from tidegate.inbound._limiting.flask_commands import commands
    from tidegate.inbound._limiting.werkzeug_framework import RateLimitExceeded, WerkzeugFramework
except ImportError as _error:  # pragma: no cover - the development environment has it
    raise ConfigError("tidegate.inbound.flask requires Flask: pip install flask") from _error

if TYPE_CHECKING:
    from tidegate.core._decision import Decision
    from tidegate.inbound import _responses as responses
    from tidegate.inbound._limiting.request_state import RequestState

__all__ = ["Limits", "RateLimitExceeded", "commands", "exempt", "limit"]

V = TypeVar("V", bound=Callable[..., object] | flask.Blueprint)  # what is limited


class FlaskFramework(WerkzeugFramework, EnvironRequests):
    """Requests and responses of Flask."""

    def find_request(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - any function
        """Return the current request itself, not the proxy, which would look it up again at every use."""
        del function, args, kwargs
        return flask.request._get_current_object()  # type: ignore[attr-defined]  # noqa: SLF001 - a public method of proxies

    def make_response(self, response: responses.response.Response) -> flask.Response:
        """Return the response to a denied request."""
        return flask.Response(response.body, response.status, list(response.headers))

    def add_fields(self, response: Any, fields: list[tuple[str, str]]) -> Any:  # noqa: ANN401 - any response
        """Add header fields to the response that Flask makes of the result of a view."""
        if fields:

            @flask.after_this_request
            def add(made: flask.Response) -> flask.Response:
                made.headers.update(dict(fields))
                return made

        return response

    def make_error(self, response: responses.response.Response, decision: Decision, native: object) -> Exception:
        """Return the exception for a denied request."""
        del native

        @flask.after_this_request
        def add_headers(sent: flask.Response) -> flask.Response:
            add_missing_headers(sent, response)
            return sent

        return RateLimitExceeded(response, decision, self.make_response(response))


FRAMEWORK: Final = FlaskFramework()


class limit(FrameworkLimit):  # noqa: N801 - used as a decorator
    """Limits the views that it decorates, or each route of a blueprint."""

    limits_blueprints: ClassVar[bool] = True
    _framework: ClassVar = FRAMEWORK

    def __call__(self, view: V) -> V:
        """Decorate a view, or add the limit to every route of a blueprint."""
        if isinstance(view, flask.Blueprint):
            if add_limit(self, view):
                view.before_request(check_blueprints)
            return view
        if not is_async_callable(view):
            return decorate(self, view, FRAMEWORK)  # type: ignore[no-any-return]  # the same type of function

        @functools.wraps(view)
        def run_in_loop(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the view's
            return flask.current_app.ensure_sync(view)(*args, **kwargs)

        return decorate(self, run_in_loop, FRAMEWORK)  # type: ignore[no-any-return]  # as above


class Limits(FrameworkLimits["limit"]):
    """One limiter for an application without a middleware: `limits = Limits(store=…)`, then `@limits.limit("5/1m")`."""

    _limit: ClassVar = limit


def check_blueprints() -> flask.Response | None:
    """Decide the limits of all blueprints of the current route, together with those of its view."""
    request = FRAMEWORK.find_request(None, (), {})
    standalone, denial = run(check_blueprints_flow(flask.current_app, request, FRAMEWORK), perform)
    if standalone is not None:
        flask.after_this_request(functools.partial(finish_standalone, standalone))
    return denial  # type: ignore[no-any-return]  # of Flask


def finish_standalone(request_state: RequestState, response: flask.Response) -> flask.Response:
    """Settle what depends on the response and add the header fields: no middleware does."""
    run(settle_standalone_flow(request_state, response.status_code), perform)
    response.headers.update(dict(standalone_fields(request_state)))
    return response
