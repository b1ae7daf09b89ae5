"""When the next permit is available, as `X-RateLimit-Reset` shows it with `reset_time: next`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from tidegate.core._algorithms import View

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core._decision import Decision


class NextPermitView(View):
    """The view of a limit, and the microseconds until its next permit is available."""

    next_permit: int

    @classmethod
    def of(cls, view: View, next_permit: int) -> Self:
        """Add the time of the next permit to a view."""
        found = cls(view)
        found.next_permit = next_permit
        return found


def with_next_permits(decision: Decision, waits: Sequence[int]) -> Decision:
    """Return a decision that also says how long each limit takes to have its next permit."""
    views = tuple(map(NextPermitView.of, decision.views, waits))
    return decision.of_views(decision.at, decision.policy_limits, views, within_limits=decision.within_limits)


def shown_reset(views: Sequence[View], reset: int) -> int:
    """Return the microseconds until the time that the headers show as reset.

    This is the `reset` of the tightest limit; or the wait for the next permit, if the decision says it: then all
    limits have one.
    """
    if not any(isinstance(view, NextPermitView) for view in views):
        return reset
    return max(view.next_permit if isinstance(view, NextPermitView) else view[1] for view in views)
