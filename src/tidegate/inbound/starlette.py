"""Limits on single routes in Starlette: `@limit("5/1m")` above `async def endpoint(request)` or an endpoint method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from tidegate.errors import ConfigError
from tidegate.inbound._limiting.asgi_responses import POLICY_VIOLATION
from tidegate.inbound._limiting.limited_call import FrameworkLimit, FrameworkLimits
from tidegate.inbound._limiting.limited_functions import exempt, route_name
from tidegate.inbound._limiting.native_requests import ScopeRequests
from tidegate.inbound._responses import exceeded
from tidegate.inbound._responses.response import BODY_HEADERS

try:
    from starlette.exceptions import HTTPException, WebSocketException
    from starlette.middleware.exceptions import ExceptionMiddleware
    from starlette.requests import HTTPConnection
    from starlette.responses import Response
except ImportError as _error:  # pragma: no cover - the development environment has it
    raise ConfigError("tidegate.inbound.starlette requires Starlette: pip install starlette") from _error

if TYPE_CHECKING:
    from tidegate.core._decision import Decision
    from tidegate.inbound import _responses as responses

__all__ = ["Limits", "RateLimitExceeded", "exempt", "limit"]


class RateLimitExceeded(exceeded.RateLimitExceeded, HTTPException):
    """Raised for a request that the limits of an endpoint or a block deny; `decision` has the reason.

    `detail` is the body, `denial` the complete response. An exception handler of the application for this class, for
    HTTPException or for the status replaces the response; without one, the response is `denial`.
    """

    def __init__(self, denial: responses.response.Response, decision: Decision) -> None:
        """Keep the response and the decision that denied the request."""
        HTTPException.__init__(self, denial.status, denial.body.decode("utf-8", "replace"), without_body_fields(denial))
        self.denial = denial
        self.decision = decision


def find_handler(scope: Any, error: HTTPException) -> Any:  # noqa: ANN401 - a scope is any mapping; any function
    """Return the function of the application that handles an exception, or the framework's default; None: neither."""
    known: tuple[dict[Any, Any], dict[int, Any]] = scope.get("starlette.exception_handlers") or ({}, {})
    handlers, by_status = known
    found = by_status.get(error.status_code)
    return found or next((handlers[kind] for kind in type(error).__mro__ if kind in handlers), None)


def is_default_handler(handler: Any) -> bool:  # noqa: ANN401 - any function
    """Return whether a handler is the framework's own: Starlette's, or FastAPI's."""
    return isinstance(getattr(handler, "__self__", None), ExceptionMiddleware) or (
        getattr(handler, "__module__", "") == "fastapi.exception_handlers"
    )


async def send_denial(request: Any, error: Any) -> Response:  # noqa: ANN401 - Starlette calls it
    """Answer a denied request in place of Starlette's own handler, which would send the body as plain text."""
    del request
    return Response(error.denial.body, error.denial.status, dict(error.denial.headers))


class AsgiFramework(ScopeRequests):
    """Requests and responses of Starlette, and of FastAPI."""

    request_type: Final = HTTPConnection

    def find_request(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> HTTPConnection:  # noqa: ANN401 - any function
        """Find the request among the arguments of a call."""
        for value in args:
            if isinstance(value, HTTPConnection):
                return value
        for value in kwargs.values():
            if isinstance(value, HTTPConnection):
                return value
        message = f"{route_name(function)} has no request argument: add one, as in `async def endpoint(request)`"
        raise ConfigError(message)

    def make_response(self, response: responses.response.Response) -> Response:
        """Return the response to a denied request."""
        return Response(response.body, response.status, dict(response.headers))

    def add_fields(self, response: Any, fields: list[tuple[str, str]]) -> Any:  # noqa: ANN401 - any response
        """Add header fields to the response of an endpoint."""
        if fields and isinstance(response, HTTPException):
            response.headers = {**(response.headers or {}), **dict(fields)}
        elif fields and hasattr(response, "headers"):
            response.headers.update(dict(fields))
        return response

    def error_response(self, error: Exception) -> HTTPException | None:
        """Return the exception if it is one that Starlette sends as a response."""
        return error if isinstance(error, HTTPException) else None

    def status(self, response: Any) -> int:  # noqa: ANN401 - as above
        """Return the status of a response."""
        return getattr(response, "status_code", 200)

    def make_error(
        self, response: responses.response.Response, decision: Decision, native: HTTPConnection
    ) -> Exception:
        """Return the exception for a denied request."""
        error = RateLimitExceeded(response, decision)
        if is_default_handler(find_handler(native.scope, error)):
            native.scope["starlette.exception_handlers"][0][RateLimitExceeded] = send_denial
        return error

    def deny_call(self, response: responses.response.Response, decision: Decision, native: HTTPConnection) -> Response:
        """Return the response; raise the exception if the application has a handler for it. A WebSocket is closed."""
        if native.scope["type"] == "websocket":
            raise WebSocketException(POLICY_VIOLATION, "Rate limit exceeded")
        error = RateLimitExceeded(response, decision)
        handler = find_handler(native.scope, error)
        if handler is None or handler is send_denial or is_default_handler(handler):
            return self.make_response(response)
        raise error


def without_body_fields(response: responses.response.Response) -> dict[str, str]:
    """Return the header fields of a response that do not describe its body."""
    return {name: value for name, value in response.headers if name.lower() not in BODY_HEADERS}


FRAMEWORK: Final = AsgiFramework()


class limit(FrameworkLimit):  # noqa: N801 - used as a decorator
    """Limits the endpoints that it decorates."""

    _framework: ClassVar = FRAMEWORK


class Limits(FrameworkLimits["limit"]):
    """One limiter for an application without a middleware: `limits = Limits(store=…)`, then `@limits.limit("5/1m")`."""

    _limit: ClassVar = limit
