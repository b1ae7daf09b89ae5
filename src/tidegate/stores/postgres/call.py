"""Encodes calls for the server, and decodes its answers."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from tidegate.core.decision import Decision
from tidegate.stores.base import check_ported

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tidegate.core.algorithms import View
    from tidegate.core.limit import Limit
    from tidegate.stores.base import Ask

MISSING: Final = -1  # status of an answer: calendar windows are missing
MAX_NAME_BYTES: Final = 500  # bytes; longer names are hashed for the index


class StoreCall:
    """One call, as elements of the array parameters of the statement, and its answer."""

    __slots__ = (
        "answer",
        "at",
        "costs",
        "counts",
        "error",
        "keys",
        "limit_count",
        "limits",
        "now",
        "policies",
        "size",
        "verb",
    )
    at: str
    costs: str
    counts: str
    keys: str
    limits: str
    now: str
    policies: str

    def __init__(self, verb: str, size: int) -> None:
        """Prepare a call with this number of keys."""
        self.verb: str = verb
        self.size: int = size
        self.limit_count: int = 0
        self.policies = self.keys = self.counts = self.limits = self.costs = self.now = self.at = ""
        self.answer: list[int] = []
        self.error: Exception | None = None

    def take_answer(self, numbers: list[int]) -> list[int]:
        """Take the answer of this call from the front of the numbers; return the rest."""
        end = 2 + self.limit_count * (1 if numbers[0] == MISSING else 3)
        self.answer = numbers[:end]
        return numbers[end:]

    def result(self) -> list[int]:
        """Return the answer, or raise the error."""
        if not self.answer and self.error is not None:
            raise self.error
        return self.answer


def decode_decisions(
    asks: Sequence[Ask],
    allowed: bool,  # noqa: FBT001 - data
    at: int,
    numbers: list[int],
) -> list[Decision]:
    """Decode the server's answer."""
    views: list[View] = list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))
    decisions, position = [], 0
    for policy, _, _ in asks:
        end = position + len(policy.limits)
        decisions.append(Decision.of_signed_views(at, policy.limits, views[position:end], within_limits=allowed))
        position = end
    return decisions


# ---- encoding parameters --------------------------------------------------------------------------------------------


def encode_limit(limit: Limit, around: int) -> str:
    """Encode a limit as an element of an array of limit_t."""
    check_ported(limit)
    names = (limit.name, limit.algorithm, limit.unit, str(limit))
    numbers = (limit.quota, limit.burst, limit.length, limit.rate, limit.scale, limit.capacity, limit.floor, limit.tick)
    bounds = "" if limit.calendar is None else quote(encode_array(map(str, window_bounds(limit, around))).decode())
    fields = [*(quote(encode_name(name)) for name in names), *map(str, numbers), bounds]
    return quote(f"({','.join(fields)})")


def window_bounds(limit: Limit, around: int) -> tuple[int, int, int, int]:
    """Return the bounds of three calendar windows: the one around an instant, and its neighbours."""
    window = limit.calendar.window  # type: ignore[union-attr]  # called for calendar windows only
    start, end = window(around)
    return window(start - 1)[0], start, end, window(end)[1]


def encode_array(elements: Iterable[str]) -> bytes:
    """Encode an array."""
    return f"{{{','.join(elements)}}}".encode()


def quote(text: str) -> str:
    """Encode a string as an element of an array or a row."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def encode_name(name: str, *, escaped: bool = False) -> str:
    """Encode a name so that PostgreSQL can store and index it: without NUL and surrogates, and not too long.

    These are escaped with '%', which is escaped itself, so that different names stay different.
    """
    if not escaped and "%" in name:
        name = name.replace("%", "%25")
    if name.isascii() and "\0" not in name and len(name) <= MAX_NAME_BYTES:
        return name
    name = "".join(f"%u{ord(char):04X}" if char == "\0" or "\ud800" <= char <= "\udfff" else char for char in name)
    whole = name.encode()
    if len(whole) <= MAX_NAME_BYTES:
        return name
    start = whole[: MAX_NAME_BYTES // 2].decode(errors="ignore")
    return f"{start}%~{hashlib.sha256(whole).hexdigest()}"
