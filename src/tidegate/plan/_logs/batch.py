"""LogBatch: requests of a log in columns, as parsers return them; and what could not be read.

Columns of integers cross from one process to another much faster than a list of objects. Values that repeat are kept
once, in tables: who sent a request (the address of the peer, and X-Forwarded-For; or the key of a call), what it asked
for (method and path; or the policy of a call), and its cost.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")

MAX_SHOWN: Final = 5  # malformed lines that are kept as examples, of each file
MAX_EXCERPT: Final = 80  # characters of a malformed line
NO_DURATION: Final = -1
NO_STATUS: Final = 0


class LogSender(NamedTuple):
    """Who sent a request: the peer and its X-Forwarded-For header, or the key of a call."""

    name: str
    forwarded: str = ""


class LogSubject(NamedTuple):
    """What was asked for: a method and a path or URL; or a policy, without a method."""

    method: str
    path: str


class MalformedLine(NamedTuple):
    """A line that could not be read."""

    file: str
    line: int
    reason: str
    excerpt: str

    def __str__(self) -> str:
        """Return it for people."""
        return f"{self.file}:{self.line}: {self.reason}: {self.excerpt}"


@dataclass(slots=True)
class LogBatch:
    """Requests in the order of the log. Times and durations are in microseconds; an empty column has no values."""

    times: array[int] = field(default_factory=lambda: array("q"))
    durations: array[int] = field(default_factory=lambda: array("q"))  # NO_DURATION: unknown
    statuses: array[int] = field(default_factory=lambda: array("H"))
    senders: array[int] = field(default_factory=lambda: array("L"))  # places in `sender_table`, as for the next two
    subjects: array[int] = field(default_factory=lambda: array("L"))
    costs: array[int] = field(default_factory=lambda: array("L"))
    sender_table: list[LogSender] = field(default_factory=list)
    subject_table: list[LogSubject] = field(default_factory=list)
    cost_table: list[Mapping[str, int] | int] = field(default_factory=list)
    lines: int = 0
    malformed: int = 0
    examples: list[MalformedLine] = field(default_factory=list)

    def reject(self, file: str, line: int, reason: str, text: str) -> None:
        """Count a malformed line, and keep the first ones as examples."""
        self.malformed += 1
        if len(self.examples) < MAX_SHOWN:
            shown = "".join(each if each.isprintable() else "?" for each in text[: MAX_EXCERPT + 1])
            cut = shown if len(shown) <= MAX_EXCERPT else shown[: MAX_EXCERPT - 1] + "…"
            self.examples.append(MalformedLine(file, line, reason, cut))


class BatchBuilder:
    """Builds a batch from one request at a time."""

    def __init__(self) -> None:
        """Start an empty batch."""
        self.batch: LogBatch = LogBatch()
        self._senders: dict[LogSender, int] = {}
        self._subjects: dict[LogSubject, int] = {}
        self._costs: dict[object, int] = {}

    def add(
        self,
        time: int,
        sender: LogSender,
        subject: LogSubject,
        *,
        duration: int = NO_DURATION,
        status: int = NO_STATUS,
        cost: Mapping[str, int] | int = 1,
    ) -> None:
        """Add a request."""
        batch = self.batch
        batch.times.append(time)
        batch.durations.append(duration)
        batch.statuses.append(status)
        batch.senders.append(place_of(sender, self._senders, batch.sender_table))
        batch.subjects.append(place_of(subject, self._subjects, batch.subject_table))
        known = cost if isinstance(cost, int) else tuple(sorted(cost.items()))
        place = self._costs.get(known)
        if place is None:
            place = self._costs[known] = len(batch.cost_table)
            batch.cost_table.append(cost)
        batch.costs.append(place)


def place_of(value: T, places: dict[T, int], table: list[T]) -> int:
    """Return the place of a value in a table, to which it is added if it is new."""
    place = places.get(value)
    if place is None:
        place = places[value] = len(table)
        table.append(value)
    return place
