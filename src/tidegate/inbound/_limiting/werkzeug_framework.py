"""What Flask and Quart have in common: the exception for a denied request, and how results and errors are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

from werkzeug.exceptions import HTTPException, TooManyRequests

from tidegate.inbound._limiting.werkzeug_routes import status_of
from tidegate.inbound._responses import exceeded

if TYPE_CHECKING:
    from werkzeug.wrappers import Response

    from tidegate.core._decision import Decision
    from tidegate.inbound import _responses as responses


class RateLimitExceeded(exceeded.RateLimitExceeded, TooManyRequests):
    """Raised for a request that the limits of a view, a blueprint or a block deny; `decision` has the reason.

    `description` is the body. An error handler of the application for this class or for 429 replaces the response.
    """

    def __init__(
        self, denial: responses.response.Response, decision: Decision, response: Response | None = None
    ) -> None:
        """Keep the response, also as the framework has it, and the decision that denied the request."""
        TooManyRequests.__init__(self, denial.body.decode("utf-8", "replace"), response)
        self.code = denial.status
        self.denial = denial
        self.decision = decision


class WerkzeugFramework:
    """What Flask and Quart have in common, beside their requests."""

    request_type: Final = ()  # the request is not an argument

    def error_response(self, error: Exception) -> HTTPException | None:
        """Return the exception if it is one that the framework sends as a response."""
        return error if isinstance(error, HTTPException) else None

    def status(self, response: Any) -> int:  # noqa: ANN401 - any response
        """Return the status of the result of a view."""
        return status_of(response)

    def deny_call(self, response: responses.response.Response, decision: Decision, native: object) -> NoReturn:
        """Raise the exception, which the error handlers of the application see."""
        raise self.make_error(response, decision, native)

    def make_error(self, response: responses.response.Response, decision: Decision, native: object) -> Exception:
        """Return the exception for a denied request."""
        raise NotImplementedError
