"""A call as the server is sent it, and as it is answered."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from tidegate.core.decision import Decision

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tidegate.core.algorithms import View
    from tidegate.core.limit import Limit
    from tidegate.stores.base import Ask

MISSING: Final = -1  # instead of an answer: calendar windows are missing
LONGEST_NAME: Final = 500  # bytes of a name that the index takes as it is


class StoreCall:
    """What is asked of the server, as elements of its arrays; and what it answered."""

    __slots__ = (
        "answer",
        "at",
        "costs",
        "counts",
        "error",
        "keys",
        "limits",
        "now",
        "places",
        "policies",
        "size",
        "verb",
    )

    def __init__(self, verb: str, size: int) -> None:
        """Ask about so many keys."""
        self.verb = verb
        self.size = size
        self.places = 0
        self.policies = self.keys = self.counts = self.limits = self.costs = self.now = self.at = ""
        self.answer: list[int] = []
        self.error: Exception | None = None

    def take(self, numbers: list[int]) -> list[int]:
        """Take the answer off the front of several; give the rest."""
        end = 2 + self.places * (1 if numbers[0] == MISSING else 3)
        self.answer = numbers[:end]
        return numbers[end:]

    def answered(self) -> list[int]:
        """Give the answer, or raise what came instead."""
        if not self.answer and self.error is not None:
            raise self.error
        return self.answer


def decisions_of(
    asks: Sequence[Ask],
    allowed: bool,  # noqa: FBT001 - data
    at: int,
    numbers: list[int],
) -> list[Decision]:
    """Read the server's answer."""
    views: list[View] = list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))
    decisions, place = [], 0
    for policy, _, _ in asks:
        end = place + len(policy.limits)
        decisions.append(Decision((allowed, at, policy.limits, views[place:end], None)))
        place = end
    return decisions


# ---- texts for the server ------------------------------------------------------------------------------------------


def describe(limit: Limit, around: int) -> str:
    """Write a limit as an element of an array of limit_t."""
    names = (limit.name, limit.algorithm, limit.unit, str(limit))
    numbers = (limit.quota, limit.burst, limit.length, limit.rate, limit.scale, limit.capacity, limit.floor, limit.tick)
    bounds = "" if limit.calendar is None else quoted(array_of(map(str, edges(limit, around))).decode())
    fields = [*(quoted(text_of(name)) for name in names), *map(str, numbers), bounds]
    return quoted(f"({','.join(fields)})")


def edges(limit: Limit, around: int) -> tuple[int, int, int, int]:
    """Give the edges of three calendar windows: the one around an instant, and its neighbours."""
    window = limit.calendar.window  # type: ignore[union-attr]  # asked of calendar windows only
    start, end = window(around)
    return window(start - 1)[0], start, end, window(end)[1]


def array_of(elements: Iterable[str]) -> bytes:
    """Write an array."""
    return f"{{{','.join(elements)}}}".encode()


def quoted(text: str) -> str:
    """Write a text as an element of an array or a row."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def text_of(name: str, *, escaped: bool = False) -> str:
    """Write a name so that PostgreSQL can keep and index it: without NUL and half characters, and not too long.

    These are escaped by '%', which is escaped itself, so that different names stay different.
    """
    if not escaped and "%" in name:
        name = name.replace("%", "%25")
    if name.isascii() and "\0" not in name and len(name) <= LONGEST_NAME:
        return name
    name = "".join(f"%u{ord(char):04X}" if char == "\0" or "\ud800" <= char <= "\udfff" else char for char in name)
    whole = name.encode()
    if len(whole) <= LONGEST_NAME:
        return name
    start = whole[: LONGEST_NAME // 2].decode(errors="ignore")
    return f"{start}%~{hashlib.sha256(whole).hexdigest()}"
