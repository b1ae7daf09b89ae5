"""What metrics call things.

Of names so many have their own label, and all further ones share one, so that nobody can multiply them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tidegate.core.decision import Decision

OTHER_LABEL: Final = "other"


class LabelNames:
    """Gives each name its label."""

    def __init__(self, most: int) -> None:
        """Give `most` names labels of their own."""
        self._most = most
        self._names: set[str] = set()

    def label(self, name: str) -> str:
        """Give the label of a name: itself, or `other` where there are too many."""
        if name in self._names:
            return name
        if len(self._names) >= self._most:
            return OTHER_LABEL
        self._names.add(name)
        return name


def outcome_of(decision: Decision) -> str:
    """Name how a decision ended."""
    return "allowed" if decision[0] else "shadow" if decision.allowed else "denied"
