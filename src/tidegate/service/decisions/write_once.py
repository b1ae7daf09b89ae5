"""Marks in a store: each can be made once, and remembers the numbers it was made with.

A Store has one method, which decides. A mark is a decision: a window of one permit, which the first caller takes and
every later caller is denied, and beside it windows whose counts are the numbers of the first caller. A denial reports
the counts of all windows, so a later caller reads these numbers from its own denial. A mark is therefore atomic in
every store, ends with its window, and needs nothing of a store but `apply`.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from tidegate.core import Limit
from tidegate.policy import Policy

if TYPE_CHECKING:
    from tidegate.core.decision import Decision

NUMBER_BYTES: Final = 6  # of each number of a mark: counts stay far below 2**53
NUMBER_LIMIT: Final = 2 ** (8 * NUMBER_BYTES)


def mark_policy(name: str, seconds: float, numbers: int = 1) -> Policy:
    """Describe a kind of mark that lasts so many seconds and remembers so many numbers.

    While the store is lost, nobody knows whether a mark was made: the answer is a LocalDecision.
    """
    first = Limit(1, seconds, "fixed_window", name="once")
    others = (Limit(NUMBER_LIMIT, seconds, "fixed_window", name=f"number-{place}") for place in range(numbers))
    return Policy(name, (first, *others), on_store_error="allow")


def is_repeated(mark: Decision) -> bool:
    """Tell whether the mark was made before: what the window of one permit says, whoever else denied the call."""
    return mark.views[0][1] != 0


def numbers_of(mark: Decision) -> tuple[int, ...]:
    """Read the numbers of the mark that was made before."""
    return tuple(NUMBER_LIMIT - remaining for remaining, _, _ in mark.views[1:])


def made_at(mark: Decision) -> int:
    """Tell when the mark was made before, in microseconds since 1970 by the store's clock."""
    return mark.at + mark.views[0][2] - mark[2][0].length


def number_from(*parts: bytes) -> int:
    """Digest bytes to a number that a mark can remember."""
    digest = blake2b(digest_size=NUMBER_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return int.from_bytes(digest.digest(), "big")
