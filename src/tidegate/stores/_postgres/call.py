"""Encodes calls for the server, and decodes its answers."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from tidegate.core._algorithms import View
from tidegate.core._decision import Decision
from tidegate.stores._base import Alternatives, check_ported

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tidegate.core._limit import Limit
    from tidegate.stores._base import Ask

APPLY: Final = (
    b"select apply($1::text[], $2::int[], $3::text[], $4::text[], $5::int[], "
    b"$6::limit_t[], $7::bigint[], $8::bigint[], $9::bigint[], $10::int)"
)
MISSING: Final = -1  # status of an answer: calendar windows are missing
DENIED: Final = 0
ALLOWED: Final = 1
MAX_NAME_BYTES: Final = 500  # bytes; longer names are hashed for the index


class StoreCall:
    """One call, as elements of the array parameters of the statement, and its answers.

    A call with alternatives has an element of each array, and an answer, for each that is decided.
    """

    __slots__ = (
        "answers",
        "at",
        "costs",
        "counts",
        "error",
        "groups",
        "keys",
        "limit_counts",
        "limits",
        "now",
        "policies",
        "sizes",
        "verb",
        "verbs",
    )
    at: str
    costs: str
    counts: str
    keys: str
    limits: str
    now: str
    policies: str

    def __init__(self, verb: str, asks: Sequence[Ask]) -> None:
        """Prepare a call for these keys."""
        self.verb: str = verb
        self.groups: Sequence[Sequence[Ask]] = asks.groups() if isinstance(asks, Alternatives) else (asks,)
        self.verbs: str = ",".join([verb, *[f"else_{verb}"] * (len(self.groups) - 1)])
        self.sizes: str = ",".join([str(len(group)) for group in self.groups])
        self.limit_counts: list[int] = [sum([len(ask[0].limits) for ask in group]) for group in self.groups]
        self.policies = self.keys = self.counts = self.limits = self.costs = self.now = self.at = ""
        self.answers: list[list[int]] = []
        self.error: Exception | None = None

    def repeat(self, element: str) -> str:
        """Return an element for each group."""
        return ",".join([element] * len(self.groups))

    def take_answers(self, numbers: list[int], start: int) -> int:
        """Take the answers of this call from the numbers, from an index on; return the index after them."""
        self.answers = []
        for count in self.limit_counts:
            end = start + 2 + count * (1 if numbers[start] == MISSING else 3)
            self.answers.append(numbers[start:end])
            start = end
            if self.answers[-1][0] != DENIED:
                break
        return start

    def result(self) -> list[list[int]]:
        """Return the answers, or raise the error."""
        if not self.answers and self.error is not None:
            raise self.error
        return self.answers


def decode_decisions(asks: Sequence[Ask], answer: list[int]) -> list[Decision]:
    """Decode the server's answer to asks that were decided together."""
    status, at, *numbers = answer
    views = list(map(View, zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)))
    allowed, decisions, position = status == ALLOWED, [], 0
    for policy, _, _ in asks:
        end = position + len(policy.limits)
        decisions.append(Decision.of_views(at, policy.limits, views[position:end], within_limits=allowed))
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
