"""Limits on single views in Django: `@limit("5/1m")` above `def view(request, …)`, or through `method_decorator`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from tidegate.errors import ConfigError
from tidegate.inbound._limiting.limited_call import FrameworkLimit, FrameworkLimits
from tidegate.inbound._limiting.limited_functions import exempt, route_name
from tidegate.inbound._limiting.native_requests import MetaRequests
from tidegate.inbound._limiting.request_state import STATE_KEY
from tidegate.inbound._responses import exceeded

try:
    from django.core.exceptions import (  # type: ignore[import-untyped]  # Django has no types
        BadRequest,
        PermissionDenied,
        SuspiciousOperation,
    )
    from django.http import Http404, HttpRequest, HttpResponse  # type: ignore[import-untyped]  # Django has no types
    from django.views.defaults import permission_denied  # type: ignore[import-untyped]  # as above
except ImportError as _error:  # pragma: no cover - the development environment has it
    raise ConfigError("tidegate.inbound.django requires Django: pip install django") from _error

if TYPE_CHECKING:
    from tidegate.core._decision import Decision
    from tidegate.inbound import _responses as responses

__all__ = ["Limits", "RateLimitExceeded", "exempt", "handler403", "limit"]

# As django.core.handlers.exception has it.
ERROR_STATUSES: Final = ((Http404, 404), (PermissionDenied, 403), ((BadRequest, SuspiciousOperation), 400))


class RateLimitExceeded(exceeded.RateLimitExceeded, PermissionDenied):  # type: ignore[misc]  # Django has no types
    """Raised by a limited block; `response` is the response to the denied request.

    Behind a RateLimitMiddleware it is sent, unless a middleware of the application handles the exception. Without one,
    Django sends a 403, unless the URLconf imports `handler403` from this module.
    """

    def __init__(self, denial: responses.response.Response, decision: Decision) -> None:
        """Keep the response and the decision."""
        PermissionDenied.__init__(self, "rate limit exceeded")
        self.denial = denial
        self.decision = decision
        self.response = FRAMEWORK.make_response(denial)


def handler403(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Answer a denied block with its 429, and other exceptions as Django does: import it into the root URLconf."""
    return exception.response if isinstance(exception, RateLimitExceeded) else permission_denied(request, exception)


class DjangoFramework(MetaRequests):
    """Requests and responses of Django."""

    request_type: Final[type[Any]] = HttpRequest

    def find_request(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - any function
        """Return the request: the first argument of a view, the second of a method."""
        for value in (*args[:2], kwargs.get("request")):
            if hasattr(value, "META"):
                return value
        message = f"{route_name(function)} has no request argument: the first argument of a view is the request"
        raise ConfigError(message)

    def make_response(self, response: responses.response.Response) -> HttpResponse:
        """Return the response to a denied request."""
        return HttpResponse(response.body, status=response.status, headers=dict(response.headers))

    def add_fields(self, response: Any, fields: list[tuple[str, str]]) -> Any:  # noqa: ANN401 - any response
        """Add header fields to the response of a view."""
        for name, value in fields:
            response[name] = value
        return response

    def error_response(self, error: Exception) -> HttpResponse | None:
        """Return a response with the status that Django sends for an exception; Django builds its own."""
        for kind, status in ERROR_STATUSES:
            if isinstance(error, kind):
                return HttpResponse(status=status)
        return None

    def status(self, response: Any) -> int:  # noqa: ANN401 - as above
        """Return the status of a response."""
        return response.status_code  # type: ignore[no-any-return]  # Django has no types

    def deny_call(self, response: responses.response.Response, decision: Decision, native: object) -> HttpResponse:
        """Return the response to a call that its own limits deny."""
        del decision, native
        return self.make_response(response)

    def make_error(self, response: responses.response.Response, decision: Decision, native: Any) -> Exception:  # noqa: ANN401 - as above
        """Return the exception for a denied request; the middleware replaces Django's 403."""
        request_state = self.mapping(native).get(STATE_KEY)
        if request_state is not None:
            request_state.raised = response
        return RateLimitExceeded(response, decision)


FRAMEWORK: Final = DjangoFramework()


class limit(FrameworkLimit):  # noqa: N801 - used as a decorator
    """Limits the views that it decorates."""

    _framework: ClassVar = FRAMEWORK


class Limits(FrameworkLimits["limit"]):
    """One limiter for an application without a middleware: `limits = Limits(store=…)`, then `@limits.limit("5/1m")`."""

    _limit: ClassVar = limit
