"""What a request is charged once its response is known: count only failures, give back, penalise.

The permits are taken before the request is let in and corrected when the status is known, so that a thousand attempts
at once cannot all be let in on the same last permit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

STATUSES: Final = range(100, 600)


@dataclass(frozen=True, slots=True)
class Charging:
    """By status: only the `counted` ones are charged (None: all), `refunded` ones not, penalties come on top."""

    counted: frozenset[int] | None = None
    refunded: frozenset[int] = frozenset()
    penalties: dict[int, int] = field(default_factory=dict, hash=False)

    def cost(self, status: int, cost: int) -> int:
        """Tell what a request of this cost is charged when its response has this status."""
        counts = status not in self.refunded if self.counted is None else status in self.counted
        return (cost if counts else 0) + self.penalties.get(status, 0)


def statuses_of(text: str) -> frozenset[int] | None:
    """Read `401`, or a class such as `4xx`; None: it is no status."""
    if len(text) == 3 and text[0] in "12345" and text[1:].lower() == "xx":  # noqa: PLR2004 - digits of a status
        return frozenset(range(int(text[0]) * 100, int(text[0]) * 100 + 100))
    if text.isascii() and text.isdecimal() and len(text) == 3 and int(text) in STATUSES:  # noqa: PLR2004 - as above
        return frozenset((int(text),))
    return None
