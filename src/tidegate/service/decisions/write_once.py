"""Write-once entries in a store: only the first writer succeeds, and later writers read the numbers it stored.

A Store has one method, which decides. An entry is a decision: a window of one permit, which the first caller takes and
later callers are denied, and further windows whose counts are the numbers of the first caller. A denial reports the
counts of all windows, so a later caller reads these numbers from its own denial. Writing an entry is therefore atomic
in every store, and the entry expires with its window. A store needs nothing but `apply` for it.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from tidegate.core import Limit
from tidegate.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidegate.core.decision import Decision

NUMBER_BYTES: Final = 6  # bytes of each number of an entry: counts stay far below 2**53
NUMBER_LIMIT: Final = 2 ** (8 * NUMBER_BYTES)


def write_once_policy(name: str, seconds: float, numbers: int = 1) -> Policy:
    """Build the policy for entries that last `seconds` and contain `numbers` integers.

    While the store is unavailable, the decision is a LocalDecision: whether the entry exists is unknown.
    """
    first = Limit(1, seconds, "fixed_window", name="once")
    others = (Limit(NUMBER_LIMIT, seconds, "fixed_window", name=f"number-{place}") for place in range(numbers))
    return Policy(name, (first, *others), on_store_error="allow")


def was_written(entry: Decision) -> bool:
    """Return whether the entry was written before: only the window of one permit shows that."""
    return entry.views[0][1] != 0


def read_numbers(entry: Decision) -> tuple[int, ...]:
    """Return the numbers of an entry that was written before."""
    return tuple(NUMBER_LIMIT - remaining for remaining, _, _ in entry.views[1:])


def written_at(entry: Decision) -> int:
    """Return when the entry was written, in microseconds since 1970 by the store's clock."""
    return entry.at + entry.views[0][2] - entry.policy_limits[0].length


def pack_bytes(data: bytes, numbers: int) -> tuple[int, ...]:
    """Return the numbers that hold these bytes, at most NUMBER_BYTES each; the rest is filled with zeros."""
    padded = data.ljust(numbers * NUMBER_BYTES, b"\0")
    starts = range(0, numbers * NUMBER_BYTES, NUMBER_BYTES)
    return tuple(int.from_bytes(padded[start : start + NUMBER_BYTES], "big") for start in starts)


def unpack_bytes(numbers: Iterable[int]) -> bytes:
    """Return the bytes that numbers hold, with the zeros at the end."""
    return b"".join(number.to_bytes(NUMBER_BYTES, "big") for number in numbers)


def digest_number(*parts: bytes) -> int:
    """Digest bytes to a number that an entry can hold."""
    digest = blake2b(digest_size=NUMBER_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return int.from_bytes(digest.digest(), "big")
