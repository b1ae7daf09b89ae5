"""The exception of Flask and Quart for a denied request; import it from `tidegate.inbound.flask` or `.quart`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from werkzeug.exceptions import TooManyRequests

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
