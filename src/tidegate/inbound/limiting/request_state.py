"""A request on its way through the application: what was decided about it so far.

The middleware leaves it in the ASGI scope or WSGI environ under NAME. Limits of single routes find it there: they use
the middleware's store and its idea of who the client is, and add their decisions, so that the tightest limit of all is
told in the headers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate.inbound.responses.response import together

if TYPE_CHECKING:
    from tidegate.core.decision import Decision
    from tidegate.inbound.client.identify import RequestClient
    from tidegate.inbound.limiting.request_limiter import RequestLimiter

STATE_KEY: Final = "tidegate"


class RequestState:
    """Who asks, and what was decided.

    Where a middleware stands in front of another one, the outer one writes what both have decided.
    """

    __slots__ = ("decision", "guard", "inner", "nested", "visitor")

    def __init__(
        self,
        guard: RequestLimiter,
        visitor: RequestClient | None,
        decision: Decision | None,
        outer: RequestState | None = None,
    ) -> None:
        """Begin with the middleware's decision; None: it limits no such requests, and did not ask who it is."""
        self.guard = guard
        self.visitor = visitor
        self.decision = decision
        self.inner: list[Decision | RequestState] | None = None
        self.nested = outer is not None
        if outer is not None:
            outer.add(self)

    def add(self, decision: Decision | RequestState) -> None:
        """Note the decision of a limit further in, or the visit to a middleware there."""
        self.inner = [*(self.inner or ()), decision]

    def look_again(self, decision: Decision | None) -> None:
        """Tell how the client stands now; None: as before."""
        if decision is not None:
            self.decision = decision

    @property
    def told(self) -> Decision | None:
        """What the client is told: everything that was decided."""
        if self.inner is None:
            return self.decision
        inner = [part.told if isinstance(part, RequestState) else part for part in self.inner]
        decisions = [decision for decision in (self.decision, *inner) if decision is not None]
        return together(decisions) if decisions else None
