"""The exception of Flask and Quart for a denied request; import it from `tidegate.inbound.flask` or `.quart`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from werkzeug.exceptions import TooManyRequests

if TYPE_CHECKING:
    from werkzeug.wrappers import Response

    from tidegate.core.decision import Decision


class RequestLimitExceeded(TooManyRequests):
    """Raised for a request that the limits of a view, a blueprint or a block deny; `decision` has the reason.

    `description` is the body. An error handler of the application for this class or for 429 replaces the response.
    """

    def __init__(self, description: str, denial: Response, decision: Decision) -> None:
        """Keep the response and the decision that denied the request."""
        super().__init__(description, denial)
        self.decision = decision
