"""Limits on single routes in Quart: `@limit("5/1m")` below `@app.get("/…")`, or `limit("5/1m")(blueprint)`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from tidegate._runtime.flow import run_async
from tidegate.errors import ConfigError
from tidegate.inbound._limiting.asgi_responses import SWITCHING_PROTOCOLS
from tidegate.inbound._limiting.blueprint_limits import check_blueprints_flow
from tidegate.inbound._limiting.charges import perform_async
from tidegate.inbound._limiting.limited_call import (
    FrameworkLimit,
    FrameworkLimits,
    decorate,
    settle_standalone_flow,
    standalone_fields,
)
from tidegate.inbound._limiting.limited_functions import exempt
from tidegate.inbound._limiting.native_requests import ScopeRequests
from tidegate.inbound._limiting.werkzeug_routes import add_limit, add_missing_headers

try:
    import quart
    from werkzeug.datastructures import Headers

    from tidegate.inbound._limiting.werkzeug_framework import RateLimitExceeded, WerkzeugFramework
except ImportError as _error:  # pragma: no cover - the development environment has it
    raise ConfigError("tidegate.inbound.quart requires Quart: pip install quart") from _error

if TYPE_CHECKING:
    from tidegate.core._decision import Decision
    from tidegate.inbound import _responses as responses
    from tidegate.inbound._limiting.request_state import RequestState

__all__ = ["Limits", "RateLimitExceeded", "exempt", "limit"]

V = TypeVar("V", bound=Callable[..., object] | quart.Blueprint)  # what is limited


class QuartFramework(WerkzeugFramework, ScopeRequests):
    """Requests and responses of Quart."""

    def find_request(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - any function
        """Return the current request, or the current websocket."""
        del function, args, kwargs
        proxy: Any = quart.request if quart.has_request_context() else quart.websocket
        return proxy._get_current_object()  # noqa: SLF001 - a public method of proxies

    def make_response(self, response: responses.response.Response) -> quart.Response:
        """Return the response to a denied request."""
        return quart.Response(response.body, response.status, headers=Headers(response.headers))

    def add_fields(self, response: Any, fields: list[tuple[str, str]]) -> Any:  # noqa: ANN401 - any response
        """Add header fields to the response that Quart makes of the result of a view."""
        if fields:

            @quart.after_this_request
            def add(made: Any) -> Any:  # noqa: ANN401 - any response
                made.headers.update(dict(fields))
                return made

        return response

    def make_error(self, response: responses.response.Response, decision: Decision, native: object) -> Exception:
        """Return the exception for a denied request."""
        del native
        if quart.has_request_context():

            @quart.after_this_request
            def add_headers(sent: Any) -> Any:  # noqa: ANN401 - any response
                add_missing_headers(sent, response)
                return sent

        made: Any = self.make_response(response)
        return RateLimitExceeded(response, decision, made)


FRAMEWORK: Final = QuartFramework()


class limit(FrameworkLimit):  # noqa: N801 - used as a decorator
    """Limits the views that it decorates, or each route of a blueprint."""

    limits_blueprints: ClassVar[bool] = True
    _framework: ClassVar = FRAMEWORK

    def __call__(self, view: V) -> V:
        """Decorate a view, sync or async, or add the limit to every route of a blueprint."""
        if isinstance(view, quart.Blueprint):
            if add_limit(self, view):
                view.before_request(check_blueprints)
                view.before_websocket(check_blueprints)
            return view
        return decorate(self, view, FRAMEWORK)  # type: ignore[no-any-return]  # the same type of function


class Limits(FrameworkLimits["limit"]):
    """One limiter for an application without a middleware: `limits = Limits(store=…)`, then `@limits.limit("5/1m")`."""

    _limit: ClassVar = limit


async def check_blueprints() -> Any:  # noqa: ANN401 - a response, or None
    """Decide the limits of all blueprints of the current route, together with those of its view."""
    request = FRAMEWORK.find_request(None, (), {})
    standalone, denial = await run_async(check_blueprints_flow(quart.current_app, request, FRAMEWORK), perform_async)
    if standalone is not None:
        after = quart.after_this_request if quart.has_request_context() else quart.ctx.after_this_websocket
        after(functools.partial(finish_standalone, standalone))
    return denial


async def finish_standalone(request_state: RequestState, response: Any) -> Any:  # noqa: ANN401 - None for a websocket
    """Settle what depends on the response and add the header fields: no middleware does."""
    status = SWITCHING_PROTOCOLS if response is None else response.status_code
    await run_async(settle_standalone_flow(request_state, status), perform_async)
    if response is not None:
        response.headers.update(dict(standalone_fields(request_state)))
    return response
