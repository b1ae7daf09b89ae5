"""Limits on single routes in Starlette: `@limit("5/1m")` above `async def endpoint(request)` or an endpoint method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import ConfigError
from tidegate.inbound.limiting.asgi_responses import ScopeRequests
from tidegate.inbound.limiting.limited_call import LimitedBlock, decorate
from tidegate.inbound.limiting.limited_functions import exempt, route_name
from tidegate.inbound.limiting.route_limit import F, RouteLimit

try:
    from starlette.exceptions import HTTPException
    from starlette.requests import HTTPConnection
    from starlette.responses import Response
except ImportError as error:  # pragma: no cover - the development environment has it
    raise ConfigError("tidegate.inbound.starlette requires Starlette: pip install starlette") from error

if TYPE_CHECKING:
    from tidegate.core.decision import Decision
    from tidegate.inbound import responses
    from tidegate.inbound.limiting.charges import DecidedCharge

__all__ = ["exempt", "limit"]

BODY_HEADERS: Final = ("content-type", "content-length")


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
        del decision, native
        return HTTPException(response.status, response.body.decode("utf-8", "replace"), body_free(response))

    def report(self, native: HTTPConnection, decided: list[DecidedCharge]) -> None:
        """Set `request.state.limited` if a limit with `block=False` is exceeded."""
        if decided:
            native.state.limited = any(not each.decision.within_limits for each in decided)


def body_free(response: responses.response.Response) -> dict[str, str]:
    """Return the header fields of a response that do not describe its body."""
    return {name: value for name, value in response.headers if name.lower() not in BODY_HEADERS}


FRAMEWORK: Final = AsgiFramework()


class limit(RouteLimit):  # noqa: N801 - used as a decorator
    """Limits the endpoints that it decorates."""

    def __call__(self, endpoint: F) -> F:
        """Decorate an endpoint."""
        return decorate(self, endpoint, FRAMEWORK)  # type: ignore[no-any-return]  # the same type of function

    def check(self, request: HTTPConnection) -> LimitedBlock:
        """Limit a block: `with limit.check(request):`, or `async with`; a denial raises Starlette's HTTPException."""
        return LimitedBlock(self, request, FRAMEWORK)
