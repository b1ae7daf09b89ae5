"""The exception for a denied request; each framework has a subclass that is also its own HTTP exception."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.errors import Denied

if TYPE_CHECKING:
    from tidegate.core._decision import Decision
    from tidegate.inbound._responses.response import Response


class RateLimitExceeded(Denied):
    """Raised for a request that the limits of an endpoint, a blueprint or a block deny.

    `decision` has the reason, `denial` the complete response. The limits of a framework raise the subclass of its
    module, such as `tidegate.inbound.fastapi.RateLimitExceeded`, which is also the HTTP exception of the framework.
    """

    denial: Response

    def __reduce__(self) -> tuple[type[RateLimitExceeded], tuple[Response, Decision]]:
        """Support pickling."""
        return type(self), (self.denial, self.decision)
