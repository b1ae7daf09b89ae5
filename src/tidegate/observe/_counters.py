"""A table of counters: rows of integers with a name. Its memory is that of one process, or shared by several workers.

What is counted is declared once, as a `RowKind`. Callers write to the row itself:

    row = counters.row(ERRORS, "busy")      # the same object for every caller
    row[0] += 1                             # CPython does not switch threads within that addition
    counters.totals(ERRORS)                 # {("busy",): [1]}: the sums of all processes that share the table
"""

from __future__ import annotations

import threading
from operator import add
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from tidegate._runtime.fork import fork_safe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Row = list[int] | memoryview[int]
    Labels = tuple[str, ...]


class RowKind(NamedTuple):
    """What is counted: the number of integers in a row, and how the rows of several processes are combined."""

    name: str
    width: int = 1
    combine: Callable[[int, int], int] = add
    gauge: bool = False  # current values, which end with their process; all others count on in its replacement


class Counters:
    """The counters of one process. `SharedCounters` of the service has the same methods."""

    def __init__(self) -> None:
        """Start without rows."""
        self._lock: Final = fork_safe(threading.Lock())
        self._rows: dict[str, dict[Labels, Row]] = {}  # by the name of their kind

    def row(self, kind: RowKind, *labels: str) -> Row:
        """Return the row of these labels, in which this process counts; create it if it is new."""
        found = self._rows.get(kind.name, {}).get(labels)
        if found is None:
            with self._lock:
                rows = self._rows.setdefault(kind.name, {})
                found = rows.get(labels)
                if found is None:
                    found = rows[labels] = self._new_row(kind, labels)
        return found

    def _new_row(self, kind: RowKind, _labels: Labels) -> Row:
        return [0] * kind.width

    def totals(self, kind: RowKind) -> dict[Labels, list[int]]:
        """Return the sums over all processes, the row that was created first at the beginning."""
        return self.own(kind)

    def own(self, kind: RowKind) -> dict[Labels, list[int]]:
        """Return what this process has counted."""
        return {labels: list(row) for labels, row in self._rows_of(kind).items()}

    def _rows_of(self, kind: RowKind) -> dict[Labels, Row]:
        with self._lock:  # threads may add rows meanwhile
            return self._rows.get(kind.name, {}).copy()


class RowField:
    """An attribute of an object that is stored in its `row`, or in another row that it has."""

    def __init__(self, place: int, row: str = "row") -> None:
        """Read and write this integer of the row."""
        self._place = place
        self._row = row

    def __get__(self, counts: Any, _owner: type | None = None) -> int:  # noqa: ANN401 - an object with rows
        """Return the integer."""
        return getattr(counts, self._row)[self._place]  # type: ignore[no-any-return]  # a Row

    def __set__(self, counts: Any, value: int) -> None:  # noqa: ANN401 - as above
        """Replace the integer."""
        getattr(counts, self._row)[self._place] = value


class LabelledCounts:
    """One counter for each label, or combination of labels."""

    def __init__(self, counters: Counters, kind: RowKind) -> None:
        """Count in this table."""
        self._counters = counters
        self._kind = kind

    def add(self, *labels: str, amount: int = 1) -> None:
        """Count something; with the amount 0, show the label from now on."""
        self._counters.row(self._kind, *labels)[0] += amount

    def move_to(self, counters: Counters) -> None:
        """Count in another table from now on; the counts so far move there."""
        before, self._counters = self._counters.own(self._kind), counters
        for labels, row in before.items():
            self.add(*labels, amount=row[0])

    def totals(self) -> dict[Any, int]:
        """Return the counts of all processes by label, or by labels if there are several."""
        return by_label(self._counters.totals(self._kind))

    def own(self) -> dict[Any, int]:
        """Return the counts of this process by label."""
        return by_label(self._counters.own(self._kind))


def by_label(rows: Mapping[Labels, list[int]]) -> dict[Any, int]:
    """Return the first integer of each row, by its label, or by its labels if there are several."""
    return {labels[0] if len(labels) == 1 else labels: row[0] for labels, row in rows.items()}


class CopiedCounts:
    """Copies counts that objects keep themselves, and count from 0, to the table."""

    def __init__(self, counters: Counters, kind: RowKind) -> None:
        """Copy to this table."""
        self._counters = counters
        self._kind = kind
        # What was copied before: an object may end, and another one with the same labels starts at 0.
        self._copied: WeakKeyDictionary[Any, dict[Labels, tuple[int, ...]]] = WeakKeyDictionary()

    def copy(self, source: object, labels: Labels, *values: int) -> None:
        """Add what an object has counted since the last copy."""
        before = self._copied.setdefault(source, {})
        for place, (now, then) in enumerate(zip(values, before.get(labels, (0,) * len(values)), strict=True)):
            if now != then:
                self._counters.row(self._kind, *labels)[place] += now - then
        before[labels] = values

    def totals(self) -> dict[Any, int]:
        """Return the first count of all processes, by label."""
        return by_label(self._counters.totals(self._kind))
