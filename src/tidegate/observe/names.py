"""Labels of metrics.

A bounded number of names have their own label; all others share one, so that the number of labels stays bounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tidegate.core.decision import Decision

OTHER_LABEL: Final = "other"


class LabelNames:
    """Maps names to a bounded number of labels."""

    def __init__(self, most: int) -> None:
        """Allow `most` names with their own label."""
        self._max_names = most
        self._names: set[str] = set()

    def label(self, name: str) -> str:
        """Return the label of a name: the name, or `other` if there are too many."""
        if name in self._names:
            return name
        if len(self._names) >= self._max_names:
            return OTHER_LABEL
        self._names.add(name)
        return name


def outcome_of(decision: Decision) -> str:
    """Return the outcome of a decision: allowed, shadow or denied."""
    return "allowed" if decision.within_limits else "shadow" if decision.allowed else "denied"
