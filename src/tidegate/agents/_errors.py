"""The errors of runs.

RateLimitError
 ├── Denied ── RunDenied     a node denied a call
 ├── RunRefusedError         a service refused another change of a run: its client has no decision
 ├── RunEndedError           the run, or a node of it, is unknown
 ├── RunRightError           the token does not give the right
 └── TokenError              the token is not valid
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate.core._algorithms import NEVER, View
from tidegate.core._decision import Decision
from tidegate.core._limit import Limit
from tidegate.errors import Denied, RateLimitError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

STATUS_LIMIT: Final = Limit(1, "1d", "fixed_window", name="run")  # in decisions that no limit has made


def no_decision(at: int = 0, retry: int = NEVER) -> Decision:
    """Return a denial by the state of a node, which accepts no calls."""
    return Decision.of_views(at, (STATUS_LIMIT,), (View((0, retry, 0)),), within_limits=False)


class RunDenied(Denied):
    """A call that a node of its run has denied, before it was sent.

    `node` has the names from the root to the node that denied, `limit` the name of its limit, or why the node accepts
    no calls: `stopped`, `closed`, `ended` or `unknown`. `left` is what remains of each limit at each node of the line,
    and at credits. The call needed `needed` of the `quota` of the limit, in its `unit`.
    """

    def __init__(
        self,
        message: str,
        decision: Decision,
        node: str,
        limit: str,
        left: Mapping[str, Mapping[str, int]] | None = None,
        unit: str = "",
        quota: int = 0,
        needed: int = 0,
    ) -> None:
        """Keep who denied, and why."""
        super().__init__(message, decision, node)
        self.limit = limit
        self.left: Mapping[str, Mapping[str, int]] = left or {}
        self.unit = unit
        self.quota = quota
        self.needed = needed

    def __reduce__(self) -> tuple[type[RunDenied], tuple[Any, ...]]:
        """Support pickling."""
        fields = (self.node, self.limit, self.left, self.unit, self.quota, self.needed)
        return type(self), (str(self), self.decision.with_views(), *fields)


class RunRefusedError(RateLimitError):
    """The node of a run does not allow a change, such as a child that is carved out: the service says why."""


class RunEndedError(RateLimitError):
    """The run, or the node of it, is unknown: it ended long ago, or the store has lost it."""


class RunRightError(RateLimitError):
    """The token does not give this right."""


class TokenError(RateLimitError):
    """The token is not valid here: it is malformed, was changed, or was signed for another store."""
