"""The decisions about a request while the application handles it.

The middleware stores it in the ASGI scope or WSGI environ under STATE_KEY. Route limits read it there: they use the
middleware's store and client, and add their decisions, so that the headers show the tightest of all limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate.inbound.responses.response import combine_decisions

if TYPE_CHECKING:
    from tidegate.core.decision import Decision
    from tidegate.inbound.client.identify import RequestClient
    from tidegate.inbound.limiting.request_limiter import RequestLimiter

STATE_KEY: Final = "tidegate"


class RequestState:
    """The client of a request and the decisions about it.

    If middlewares are nested, the outer one writes the headers for both.
    """

    __slots__ = ("client", "decision", "inner", "nested", "request_limiter")

    def __init__(
        self,
        request_limiter: RequestLimiter,
        client: RequestClient | None,
        decision: Decision | None,
        outer: RequestState | None = None,
    ) -> None:
        """Start with the middleware's decision; client and decision are None if it does not limit the request."""
        self.request_limiter: RequestLimiter = request_limiter
        self.client: RequestClient | None = client
        self.decision = decision
        self.inner: list[Decision | RequestState] | None = None
        self.nested: bool = outer is not None
        if outer is not None:
            outer.add(self)

    def add(self, decision: Decision | RequestState) -> None:
        """Add the decision of a route limit, or the state of an inner middleware."""
        self.inner = [*(self.inner or ()), decision]

    def replace_decision(self, decision: Decision | None) -> None:
        """Replace the decision after the charge was corrected; None: keep it."""
        if decision is not None:
            self.decision = decision

    @property
    def combined_decision(self) -> Decision | None:
        """All decisions combined, as the headers show them."""
        if self.inner is None:
            return self.decision
        inner = [part.combined_decision if isinstance(part, RequestState) else part for part in self.inner]
        decisions = [decision for decision in (self.decision, *inner) if decision is not None]
        return combine_decisions(decisions) if decisions else None
