"""Reads several logs as one stream of requests, in the order of their times.

    LogFile ──► blocks ──► LogParser ──► LogBatch ──► LogSource ─┐
                                                                                 ├──► rows in the order of time
    another file                                               ──► LogBatch ──► LogSource ─┘

A server writes a line when a request ends, so the lines of a log are not in the order in which requests arrived. Rows
wait for `REORDER_WITHIN` of log time, and are sorted. A clock that stepped back does not reorder anything: its lines
stay in the order of the log, each with the time that the server had.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from operator import add, itemgetter, sub
from typing import TYPE_CHECKING, Any, Final, Protocol

from tidegate.core._bounds import SECOND
from tidegate.errors import ConfigError
from tidegate.plan._logs.batch import MAX_SHOWN, NO_DURATION, NO_STATUS, LogBatch, MalformedLine
from tidegate.plan._logs.files import LogFile
from tidegate.plan._logs.formats import FoundFormat, LogOptions, find_format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from tidegate.plan._logs.batch import LogSender, LogSubject

    Row = tuple[int, Any, Any, int, int, Any]  # time, sender, subject, status, duration, cost

REORDER_WITHIN: Final = 60 * SECOND
MAX_RACE: Final = 5 * SECOND  # by which the end of a request may be before that of an earlier line
BY_TIME: Final = itemgetter(0)


class Resolver(Protocol):
    """Finds what the senders and subjects of a log are to the rules."""

    def find_sender(self, sender: LogSender) -> Any:  # noqa: ANN401 - of the rules
        """Return what a sender is; None: its requests are left out."""

    def find_subject(self, subject: LogSubject) -> Any:  # noqa: ANN401 - of the rules
        """Return what was asked for."""


@dataclass
class LogSummary:
    """What was read: lines, malformed lines with examples, and what is known of their times."""

    lines: int = 0
    requests: int = 0
    malformed: int = 0
    examples: list[MalformedLine] = field(default_factory=list)
    steps: int = 0  # times at which a log goes back by more than requests that overlap explain
    late: int = 0  # requests that began so long before their line that others were decided before
    resolution: int = 1  # of the coarsest log, in microseconds
    times_are_starts: bool = True  # or the time at which a request began is known from its duration
    has_durations: bool = True

    def add(self, batch: LogBatch) -> None:
        """Count a batch."""
        self.lines += batch.lines
        self.requests += len(batch.times)
        self.malformed += batch.malformed
        self.examples += batch.examples[: MAX_SHOWN - len(self.examples)]

    def add_format(self, found: FoundFormat) -> None:
        """Note what a file says of times."""
        parser = found.parser
        self.resolution = max(self.resolution, parser.resolution)
        self.times_are_starts = self.times_are_starts and (parser.times_are_starts or parser.has_durations)
        self.has_durations = self.has_durations and parser.has_durations


class LogSource:
    """The rows of one file that wait to be merged."""

    def __init__(self, batches: Iterator[LogBatch], summary: LogSummary) -> None:
        """Read these batches, and count what is late."""
        self._batches = batches
        self._summary = summary
        self._latest = 0  # end of a request
        self._floor = 0  # the latest end before the clock stepped back
        self._emitted = 0
        self._ordered: list[Row] = []  # before the latest step of the clock
        self._rows: list[Row] = []
        self.open: bool = True

    @property
    def watermark(self) -> int:
        """Until when the order of its rows is known."""
        return self._latest - REORDER_WITHIN

    def read(self, resolver: Resolver) -> None:
        """Read one batch."""
        batch = next(self._batches, None)
        if batch is None:
            self.open = False
            return
        self._summary.add(batch)
        if not batch.times:
            return
        ends = list(map(add, batch.times, batch.durations)) if batch.durations else batch.times
        highest = list(accumulate(ends, max, initial=self._latest))
        tolerance = MAX_RACE if batch.durations else REORDER_WITHIN
        behind = list(map(sub, highest, ends))
        rows = list(rows_of(batch, resolver))
        start = 0
        if max(behind) > tolerance:
            for place in steps_of(behind, tolerance):
                self._step_back(rows[start:place], highest[place])
                start = place
        self._latest = highest[-1]
        self._rows += rows[start:] if start else rows
        self._sort()

    def _step_back(self, before: list[Row], latest: int) -> None:
        """Keep the order of the lines after this one: they come after those that the log has before."""
        self._summary.steps += 1
        self._rows += before
        self._sort()
        self._ordered += self._rows
        self._rows = []
        self._floor = latest

    def _key(self, row: Row) -> int:
        return max(row[0], self._floor)

    def _sort(self) -> None:
        self._rows.sort(key=self._key if self._floor else BY_TIME)

    def take(self, until: int | None) -> list[Row]:
        """Remove and return the rows until an instant; None: all of them."""
        if until is None:
            taken, self._ordered, self._rows = self._ordered + self._rows, [], []
            return taken
        ordered = next((i for i, row in enumerate(self._ordered) if row[0] > until), len(self._ordered))
        taken, self._ordered = self._ordered[:ordered], self._ordered[ordered:]
        if self._ordered:
            return taken
        end = bisect_right(self._rows, until, key=self._key if self._floor else BY_TIME)
        taken += self._rows[:end]
        self._rows = self._rows[end:]
        if taken and not self._floor:
            if taken[0][0] < self._emitted:
                self._summary.late += sum(row[0] < self._emitted for row in taken)
            self._emitted = max(self._emitted, taken[-1][0])
        return taken


def steps_of(behind: Sequence[int], tolerance: int) -> Iterator[int]:
    """Yield the places where times step back, given how far each end is behind the latest one before it."""
    stepped = False
    for place, gap in enumerate(behind):
        if gap > tolerance and not stepped:
            yield place
        stepped = gap > tolerance


def rows_of(batch: LogBatch, resolver: Resolver) -> Iterator[Row]:
    """Return the rows of a batch, with what the rules know of each sender and subject."""
    senders = [resolver.find_sender(sender) for sender in batch.sender_table]
    rows = _all_rows(batch, senders, resolver)
    return (row for row in rows if row[1] is not None) if None in senders else rows


def _all_rows(batch: LogBatch, senders: Sequence[Any], resolver: Resolver) -> Iterator[Row]:
    subjects = [resolver.find_subject(subject) for subject in batch.subject_table]
    return zip(
        batch.times,
        map(senders.__getitem__, batch.senders),
        map(subjects.__getitem__, batch.subjects),
        batch.statuses or repeat(NO_STATUS),
        batch.durations or repeat(NO_DURATION),
        map(batch.cost_table.__getitem__, batch.costs) if batch.costs else repeat(1),
        strict=False,
    )


class LogStream:
    """Several logs, read as one stream."""

    def __init__(
        self,
        paths: Iterable[str | Path],
        options: LogOptions | None = None,
        *,
        progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> None:
        """Read these files. `progress` is called with the bytes that were read, and their total (0: unknown)."""
        self._options = options or LogOptions()
        self._done = 0
        self._progress = progress
        self._files = [LogFile(path, self._note) for path in paths]
        self._total = sum(file.size for file in self._files) if all(file.size for file in self._files) else 0
        self.summary: LogSummary = LogSummary()
        self._formats: dict[str, FoundFormat] = {}

    def _note(self, count: int) -> None:
        self._done += count
        self._progress(self._done, self._total)

    def look(self) -> LogSummary:
        """Read the first lines of each file, and return what their formats say of times; raises ConfigError."""
        for file in self._files:
            self._find_format(file)
        return self.summary

    def _find_format(self, file: LogFile) -> FoundFormat | None:
        """Return the format of a file; None: the file is empty."""
        found = self._formats.get(file.name)
        sample = file.sample() if found is None else b""
        if sample:
            try:
                found = find_format(sample.decode("utf-8", "surrogateescape"), self._options)
            except ConfigError as error:
                raise ConfigError(error.detail, file=file.name, field=error.field) from None
            self._formats[file.name] = found
            self.summary.add_format(found)
        return found

    def read(self, resolver: Resolver) -> Iterator[list[Row]]:
        """Yield lists of rows, in the order of time."""
        sources = [LogSource(self._batches(file), self.summary) for file in self._files]
        while reading := [source for source in sources if source.open]:
            min(reading, key=lambda source: source.watermark).read(resolver)
            until = min((source.watermark for source in sources if source.open), default=None)
            taken = [rows for source in sources if (rows := source.take(until))]
            rows = taken[0] if len(taken) == 1 else list(heapq.merge(*taken, key=BY_TIME))
            if rows:
                yield rows

    def _batches(self, file: LogFile) -> Iterator[LogBatch]:
        """Parse the blocks of a file."""
        found = self._find_format(file)
        if found is None:
            return
        line = 1
        for block in file.blocks():
            for _ in range(found.skipped if line == 1 else 0):
                block = block.partition(b"\n")[2]  # noqa: PLW2901 - the block without its header
                line += 1
            yield found.parser.parse(block.decode("utf-8", "surrogateescape"), file.name, line)
            line += block.count(b"\n")
