"""Adds up the values of all workers, so that several processes are shown as one service.

Each worker counts as a single process does, and also writes every change to its area of the shared memory. Any worker
can add up all areas at any time, without asking the others, and each gets the same totals. A worker that is killed
loses no decision that it has counted: its replacement continues in the same rows. So counters never decrease.

Values that are not counters (waiting calls, keys near a limit, recent denials) are in a report that each worker writes
every `PUBLISH_INTERVAL`. The report of a worker that has ended is ignored.

prometheus_client's multiprocess mode works similarly. It is not used here, because it keeps one file for every process
that ever ran, counts in floating point, and offers its values only in Prometheus's format.
"""

from __future__ import annotations

import json
import logging
import os
from bisect import bisect_left
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tidegate.clock import TaskSignal
from tidegate.core.bounds import SECOND
from tidegate.errors import StoreUnavailable
from tidegate.service.dashboard.history import DecisionHistory
from tidegate.service.dashboard.status import ProcessReport, ServiceStatus, merge_reports, merge_store, report_process
from tidegate.service.decisions.denied_keys import MAX_TOP, merge_top
from tidegate.service.decisions.near_limit import MAX_SAMPLES_PER_SECOND
from tidegate.service.decisions.stats import LATENCY_BUCKETS, DecisionCount, LatencyHistogram, Stats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from tidegate.clock import Clock
    from tidegate.service.http import App
    from tidegate.service.runtime.shared_memory import CounterArea, CounterRow, RowName, WorkerMemory

    NewRow = Callable[[RowName, int], CounterRow]

log: logging.Logger = logging.getLogger("tidegate.service")

Label = TypeVar("Label", bound=str | tuple[str, str])

PUBLISH_INTERVAL: Final = SECOND // 4
HEARTBEAT_INTERVAL: Final = SECOND // 2
UNRESPONSIVE_AFTER: Final = 2 * SECOND  # without a heartbeat, a worker is reported
DUMP_SECONDS: Final = 10  # between two copies of the history for the replacement of a worker
VIEWED_TTL: Final = 3 * SECOND  # after a request for the overview, all workers record keys near a limit
PANEL_TTL: Final = 2 * SECOND
PANEL_POLL_INTERVAL: Final = SECOND // 20
OUTCOMES: Final = ("allowed", "denied", "shadow", "local")
LATENCY_VALUES: Final = len(LATENCY_BUCKETS) + 2  # the buckets, and the sum
# Kinds of rows: the first part of their names. The other parts are labels.
COUNTS, VIOLATED, LAST_DENIED, LATENCY, ERRORS, STORE, EGRESS, MONEY_WARNINGS, POOL = (
    "counts",
    "violated",
    "last_denied",
    "latency",
    "errors",
    "store",
    "egress",
    "money_warnings",
    "pool",
)
# Metrics of stores that only grow while a process runs. All others are current values.
STORE_COUNTERS: Final = frozenset((
    *("transactions", "waits", "failures", "scripts", "calls", "refunded", "refunds_failed", "overflowed"),
    *("losses", "returns", "probes", "corrections_dropped"),
    *("allowed_without_store", "denied_without_store"),
))  # fmt: skip
LEASE_COUNTERS: Final = ("lease_granted_", "lease_used_", "lease_returned_", "lease_lost_")


# ---- counting --------------------------------------------------------------------------------------------------------


class SharedDecisionCount(DecisionCount):
    """The decisions of one policy, also written to a row."""

    __slots__ = ("_row",)
    _row: CounterRow

    def __init__(self, row: CounterRow) -> None:
        """Start at zero; the row keeps what earlier processes counted."""
        object.__setattr__(self, "_row", row)
        super().__init__()

    def __setattr__(self, name: str, value: int) -> None:
        """Set a count here and in the row."""
        object.__setattr__(self, name, value)
        self._row.write(OUTCOMES.index(name), value)


class SharedLatencyHistogram(LatencyHistogram):
    """A histogram of request times, also written to a row."""

    __slots__ = ("_row",)

    def __init__(self, row: CounterRow) -> None:
        """Start at zero; the row keeps what earlier processes counted."""
        super().__init__()
        self._row = row

    def add(self, micros: int) -> None:
        """Count one request."""
        super().add(micros)
        bucket = bisect_left(LATENCY_BUCKETS, micros)
        self._row.write(bucket, self.counts[bucket])
        self._row.write(LATENCY_VALUES - 1, self.total)


class SharedCounter(Counter[Label]):
    """Counts by label, also written to rows."""

    def __init__(self, kind: str, new_row: NewRow, *, adds: bool = True) -> None:
        """Write to rows of this kind. Without `adds`, a value replaces that of an earlier process."""
        super().__init__()
        self._kind = kind
        self._new_row = new_row
        self._adds = adds
        self._rows: dict[Label, CounterRow] = {}

    def __setitem__(self, label: Label, value: int) -> None:
        """Set a count here and in its row."""
        super().__setitem__(label, value)
        row = self._rows.get(label)
        if row is None:
            labels = (label,) if isinstance(label, str) else label
            row = self._new_row((self._kind, *labels), 1)
            row = self._rows[label] = row if self._adds else row._replace(start=(0,))
        row.write(0, value)


class SharedStats(Stats):
    """The counts of one worker, also written to its area of the shared memory."""

    def __init__(self, area: CounterArea, clock: Clock) -> None:
        """Start at zero; the area keeps what earlier processes counted."""
        super().__init__()
        self._area = area
        self._clock = clock
        self.errors: Counter[str] = SharedCounter(ERRORS, self.new_row)
        self.violated: Counter[tuple[str, str]] = SharedCounter(VIOLATED, self.new_row)
        self.last_denied: dict[str, int] = SharedCounter(LAST_DENIED, self.new_row, adds=False)
        self._store_counters: SharedCounter[str] = SharedCounter(STORE, self.new_row)

    def new_row(self, name: RowName, width: int) -> CounterRow:
        """Return the row of this name in the area of this worker."""
        was_full = self._area.full
        row = self._area.row(name, width, self._clock.steady())
        if self._area.full and not was_full:
            log.error("too many names of policies and limits: the totals of the workers do not include further ones")
        return row

    def _new_count(self, policy: str) -> DecisionCount:
        return SharedDecisionCount(self.new_row((COUNTS, policy), len(OUTCOMES)))

    def _new_latency(self, verb: str) -> LatencyHistogram:
        return SharedLatencyHistogram(self.new_row((LATENCY, verb), LATENCY_VALUES))

    def write_store(self, metrics: Mapping[str, int]) -> None:
        """Write the counters of the store."""
        for name, value in metrics.items():
            if name in STORE_COUNTERS or name.startswith(LEASE_COUNTERS):
                self._store_counters[name] = value


# ---- adding up -------------------------------------------------------------------------------------------------------


def add_up(areas: Iterable[CounterArea]) -> dict[RowName, list[int]]:
    """Add up the rows of the same name, those that were created first at the beginning.

    So the order is the same in every worker, and a new name does not change which names come first.
    """
    created: dict[RowName, int] = {}
    values: dict[RowName, list[int]] = {}
    for area in areas:
        for name, row in area.rows():
            current = list(row.values)
            found = values.get(name)
            if found is None:
                values[name], created[name] = current, row.created
                continue
            combine = max if name[0] == LAST_DENIED else int.__add__
            values[name] = list(map(combine, found, current))
            created[name] = min(created[name], row.created)
    return {name: values[name] for name in sorted(values, key=lambda name: (created[name], name))}


def read_totals(rows: Mapping[RowName, list[int]]) -> Stats:
    """Return sums as Stats."""
    totals = Stats()
    for (kind, *labels), values in rows.items():
        if kind == COUNTS:
            count = totals.counts[labels[0]] = DecisionCount()
            for outcome, value in zip(OUTCOMES, values, strict=True):
                setattr(count, outcome, value)
        elif kind == LATENCY:
            latency = totals.latency[labels[0]] = LatencyHistogram()
            *latency.counts, latency.total = values
        elif kind == VIOLATED:
            totals.violated[labels[0], labels[1]] = values[0]
        elif kind == LAST_DENIED:
            totals.last_denied[labels[0]] = values[0]
        elif kind == ERRORS:
            totals.errors[labels[0]] = values[0]
    return totals


class WorkerStatus:
    """The values of all workers together. One worker writes its own values with `publish`."""

    def __init__(self, memory: WorkerMemory, number: int, app: App, stats: SharedStats) -> None:
        """Show the values in this memory. `number` is the area of this worker."""
        self._memory = memory
        self._area = memory.areas[number]
        self._app = app
        self._stats = stats
        self._clock = app.decider.store.clock
        self._since = self._clock.ns() // 1_000_000
        self._history_tick = 0
        self._panels_at = -SECOND  # steady time
        self.process_id: int = os.getppid()
        self.started_at: int = memory.started_at
        self._area.process_id = os.getpid()

    @property
    def counter_areas(self) -> list[CounterArea]:
        """The counters of each worker."""
        return [area.counters for area in self._memory.areas]

    def totals(self) -> Stats:
        """Return the sums of all counters."""
        return read_totals(add_up(self.counter_areas))

    def status(self) -> ServiceStatus:
        """Return the current values of all workers; those of the others are up to `PUBLISH_INTERVAL` old."""
        own = report_process(self._app, self._since)
        self._stats.write_store(own.store)
        reports = [own if report.process_id == own.process_id else report for report in self.read_reports()]
        kept = add_up(self.counter_areas)
        counters = {name[1]: values[0] for name, values in kept.items() if name[0] == STORE}
        return merge_reports(reports, merge_store(reports, counters), self._clock.steady())

    def waiting_by_policy(self) -> Mapping[str, int]:
        """Return the number of waiting calls in all workers, by policy."""
        found: Counter[str] = Counter()
        for report in self.read_reports():
            found.update(report.waiting_by_policy)
        return found

    def top_denied(self) -> list[dict[str, Any]]:
        """Return the keys that were denied most in the last minute, in all workers."""
        return merge_top((row for report in self.read_reports() for row in report.top), MAX_TOP)

    def store_lost(self) -> bool:
        """Return whether the store is unavailable for this worker."""
        return self._app.decider.store.unavailable

    def mark_viewed(self) -> None:
        """Let all workers record keys near a limit for a while, and the first one publish its panels."""
        self._area.viewed_at = self._clock.steady()

    @property
    def viewed(self) -> bool:
        """Whether a client of any worker reads the overview."""
        now = self._clock.steady()
        return any(area.viewed_at and now - area.viewed_at < VIEWED_TTL for area in self._memory.areas)

    def failed_checks(self) -> list[tuple[str, str]]:
        """Return the failed checks of this worker, then those of the others."""
        others = (report for report in self.read_reports() if report.process_id != self._area.process_id)
        return [
            *self._app.failed_checks(),
            *self._unresponsive_workers(),
            *(failed for report in others for failed in report.failed_checks),
        ]

    def _unresponsive_workers(self) -> Iterator[tuple[str, str]]:
        """Find workers without a heartbeat. The parent process replaces them soon (`workers`)."""
        now = self._clock.steady()
        for area in self._memory.areas:
            silent = now - area.heartbeat
            if area is not self._area and area.process_id and area.heartbeat and silent >= UNRESPONSIVE_AFTER:
                detail = f"worker process {area.process_id} has not responded for {silent // SECOND} s"
                yield "worker-unresponsive", detail

    async def read_panel(self, name: str) -> object:
        """Return the data of a panel of the first worker, at most PANEL_TTL old; wait until it is published."""
        first, signal = self._memory.areas[0], TaskSignal()
        while True:
            if not first.process_id:
                raise StoreUnavailable("the worker that runs this component is being replaced")
            data = first.panels.read()
            published = None if data is None else json.loads(data)
            now = self._clock.steady()
            if published is not None and now - published["at"] < PANEL_TTL:
                return published["panels"][name]
            await self._clock.wait_async(signal, now + PANEL_POLL_INTERVAL)

    def read_reports(self) -> list[ProcessReport]:
        """Return the reports of the workers that run."""
        found = []
        for area in self._memory.areas:
            data = area.report.read() if area.process_id else None
            report = None if data is None else ProcessReport(**json.loads(data))
            if report is not None and report.process_id == area.process_id:
                found.append(report)
        return found

    # ---- the values of this worker -----------------------------------------------------------------------------------

    def publish(self) -> None:
        """Write the report of this worker and the counters of its store."""
        report = report_process(self._app, self._since)
        self._stats.write_store(report.store)
        fields: dict[str, Any] = asdict(report)
        while not self._area.report.write(json.dumps(fields, separators=(",", ":")).encode()):
            for name in ("near", "reset_keys", "denials", "top", "egress"):
                fields[name] = fields[name][: len(fields[name]) // 2]

    def tick(self) -> None:
        """Publish, and record keys near a limit while a client of any worker reads the overview."""
        self.publish()
        if self.viewed:
            self._stats.near_limit.samples_left = MAX_SAMPLES_PER_SECOND // (SECOND // PUBLISH_INTERVAL)
        history = self._app.overview.history
        if history.tick - self._history_tick >= DUMP_SECONDS:
            self._history_tick = history.tick
            self._area.history.write(history.dump())

    @property
    def panels_due(self) -> bool:
        """Whether a client reads the overview, and the panels were published a second ago or earlier."""
        return self.viewed and self._clock.steady() - self._panels_at >= SECOND

    def write_panels(self, panels: dict[str, object]) -> None:
        """Publish panels of this worker."""
        at = self._panels_at = self._clock.steady()
        if not self._area.panels.write(json.dumps({"at": at, "panels": panels}).encode()):
            too_large: dict[str, object] = {"error": "too large to be shown by several workers"}
            self._area.panels.write(json.dumps({"at": at, "panels": dict.fromkeys(panels, too_large)}).encode())

    def restore_history(self) -> bool:
        """Continue the longest history that a worker has left, or still writes; return whether there is one."""
        history = self._app.overview.history
        dumps = [data for area in self._memory.areas if (data := area.history.read()) is not None]
        copies = [DecisionHistory.read_dump(data) for data in dumps]
        if copies:
            history.restore(
                max(copies, key=lambda copy: (copy.tiers[-1].steps, copy.tiers[0].steps, copy.tiers[0].tick))
            )
        return bool(copies)
