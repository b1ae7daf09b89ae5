"""Labels of metrics.

A bounded number of names have their own label; all others share one, so that the number of labels stays bounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate.core._decision import VERBS, denied_without_store

if TYPE_CHECKING:
    from tidegate.core._decision import Decision
    from tidegate.observe._record import Record

OTHER_LABEL: Final = "other"
STORE_UNAVAILABLE: Final = "store-unavailable"  # the limit of a denial without the store


class LabelNames:
    """Maps names to a bounded number of labels."""

    def __init__(self, max_names: int) -> None:
        """Allow `max_names` names with their own label."""
        self._max_names = max_names
        self._names: set[str] = set()

    def label(self, name: str) -> str:
        """Return the label of a name: the name, or `other` if there are too many."""
        if name in self._names:
            return name
        if len(self._names) >= self._max_names:
            return OTHER_LABEL
        self._names.add(name)
        return name

    def labels_of(self, record: Record) -> tuple[str, str] | None:
        """Return the labels of a decision, its policy and its outcome; None if it is not counted."""
        if not VERBS[record.verb].charges:
            return None
        return self.label(record.policy.name), outcome_of(record.decision)


def limit_label(record: Record, policy: str, name: str) -> str:
    """Return the label of a limit that denied a call, below the label of its policy."""
    if policy == OTHER_LABEL:
        return OTHER_LABEL
    return STORE_UNAVAILABLE if denied_without_store(record.decision, record.policy.limits) else name


def outcome_of(decision: Decision) -> str:
    """Return the outcome of a decision: allowed, shadow or denied."""
    return "allowed" if decision.within_limits else "shadow" if decision.allowed else "denied"
