"""Adds up the counts of the egress gateways of all workers, so that each of them shows those of the whole service.

Each worker writes its counters to the shared memory when a request ends, and at every report. See `worker_stats`.
"""

from __future__ import annotations

import os
from array import array
from operator import add
from typing import TYPE_CHECKING, Final

from tidegate.egress.stats import COUNTERS, FIRST_BYTE_BUCKETS, EgressStats, TrafficCounts
from tidegate.service.runtime.worker_stats import EGRESS, add_up

if TYPE_CHECKING:
    from tidegate.service.runtime.shared_memory import CounterRow
    from tidegate.service.runtime.worker_stats import NewRow, WorkerStatus

GAUGES: Final = ("active", "waiting")
ATTRIBUTES: Final = (*(name for _, kind, _, name in COUNTERS if kind == "counter"), "waited", "first_byte_sum")
ROW_WIDTH: Final = len(ATTRIBUTES) + len(FIRST_BYTE_BUCKETS) + 1


class SharedTrafficCounts(TrafficCounts):
    """The counts of one caller at one provider, also written to a row."""

    __slots__ = ("_row",)

    def __init__(self, row: CounterRow) -> None:
        """Start at zero; the row keeps what earlier processes counted."""
        super().__init__()
        self._row = row

    def publish(self) -> None:
        """Write the counters to the row."""
        values = (*(getattr(self, name) for name in ATTRIBUTES), *self.first_byte)
        self._row.values[:] = array("q", map(add, self._row.start, values))


class SharedEgressStats(EgressStats):
    """The counts of the gateway in one worker; it shows those of all workers."""

    def __init__(self, status: WorkerStatus, new_row: NewRow) -> None:
        """Write to rows of this worker."""
        super().__init__()
        self._status = status
        self._new_row = new_row

    def _new_counts(self, caller: str, provider: str) -> TrafficCounts:
        return SharedTrafficCounts(self._new_row((EGRESS, caller, provider), ROW_WIDTH))

    def gauges(self) -> list[tuple[str, str, int, int]]:
        """Write all counters; return the current values for the report of this worker."""
        for counts in self.pairs.values():
            counts.publish()
        return [(*pair, counts.active, counts.waiting) for pair, counts in self.pairs.items()]

    def totals(self) -> dict[tuple[str, str], TrafficCounts]:
        """Return the counts of all workers together; the gauges of the others are as old as their reports."""
        own = self.gauges()
        found: dict[tuple[str, str], TrafficCounts] = {}
        for (kind, *labels), values in add_up(self._status.counter_areas).items():
            if kind == EGRESS:
                counts = found[labels[0], labels[1]] = TrafficCounts()
                for name, value in zip(ATTRIBUTES, values, strict=False):
                    setattr(counts, name, value)
                counts.first_byte = values[len(ATTRIBUTES) :]
        for report in self._status.read_reports():
            for caller, provider, *values in own if report.process_id == os.getpid() else report.egress:
                counts = found.setdefault((caller, provider), TrafficCounts())
                for name, value in zip(GAUGES, values, strict=True):
                    setattr(counts, name, getattr(counts, name) + value)
        return found
