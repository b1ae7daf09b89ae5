"""Charges by response status: count only some statuses, refund some, add penalties.

A request is charged before it is allowed, and the charge is corrected when the status is known. So concurrent requests
cannot share the last permit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

STATUSES: Final = range(100, 600)


@dataclass(frozen=True, slots=True)
class Charging:
    """Only `counted` statuses are charged (None: all) except `refunded` ones; penalties are added."""

    counted: frozenset[int] | None = None
    refunded: frozenset[int] = frozenset()
    penalties: dict[int, int] = field(default_factory=dict, hash=False)

    def cost(self, status: int, cost: int) -> int:
        """Return the final cost of a request, given the status of its response."""
        counts = status not in self.refunded if self.counted is None else status in self.counted
        return (cost if counts else 0) + self.penalties.get(status, 0)


def statuses_of(text: str) -> frozenset[int] | None:
    """Parse `401`, or a class such as `4xx`; None if it is not a status."""
    if len(text) == 3 and text[0] in "12345" and text[1:].lower() == "xx":  # noqa: PLR2004 - digits of a status
        return frozenset(range(int(text[0]) * 100, int(text[0]) * 100 + 100))
    if text.isascii() and text.isdecimal() and len(text) == 3 and int(text) in STATUSES:  # noqa: PLR2004 - as above
        return frozenset((int(text),))
    return None
