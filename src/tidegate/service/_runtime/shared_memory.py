"""Memory that the parent process and all workers share: counters, reports and the policies in effect.

The parent creates one anonymous file and passes its descriptor to each worker, which maps it. No name is left on disk,
and the memory is freed with the last process. Every worker has an area, which only this worker writes:

- **Counters** are rows of 64-bit integers with a name. A worker writes each change at once, so the counters outlive a
  worker that is killed. Its replacement continues in the same rows. A row is never moved or removed.
- **Messages** are byte strings, each replaced as a whole: one of each worker, and the policies of the parent. There are
  two buffers, and a checksum: a reader gets the last complete message, even if the writer was killed while it wrote the
  next one.

No process waits for another one: a worker that hangs cannot delay a request to the others.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import tempfile
import threading
from multiprocessing.reduction import DupFd
from operator import add, sub
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zlib import crc32

from tidegate.observe._counters import Counters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate._runtime.clock import Clock
    from tidegate.observe._counters import Labels, Row, RowKind

log: logging.Logger = logging.getLogger("tidegate.service")

INTEGER_BYTES: Final = 8
MAX_RULES_BYTES: Final = 16 * 2**20
MAX_MESSAGE_BYTES: Final = 12 * 2**20  # of one worker
COUNTER_BYTES: Final = 16 * 2**20  # of one worker; the file is sparse, so unused bytes take no memory
HEADER_BYTES: Final = 4096  # of an area, and of a message: a page
READ_ATTEMPTS: Final = 3  # to read a message that is replaced at the same time
ROW_HEADER: Final = (
    6  # integers: size of the row, checksum of the name, creation time, bytes of the name, values, gauge
)


class SharedRow(NamedTuple):
    """A row of counters that all processes see."""

    values: memoryview
    created: int  # steady time
    gauge: bool


class CounterArea:
    """The rows of one worker. One process appends and writes, others read."""

    def __init__(self, memory: memoryview) -> None:
        """Use this memory, which is zero at first. Its first integer is the number of integers in use."""
        self._bytes = memory
        self._integers = memory.cast("q")
        self._lock = threading.Lock()  # between the event loop and the threads of gRPC; other processes need none
        self._scanned = 1  # integers
        self._rows: dict[str, dict[Labels, SharedRow]] = {}  # by the name of their kind

    def row(self, kind: RowKind, labels: Labels, now: int) -> SharedRow | None:
        """Return the row of these labels; append it if it is new. None if the area is full."""
        with self._lock:
            self._scan()
            found = self._rows.get(kind.name, {}).get(labels)
            return self._append(kind, labels, now) if found is None else found

    def rows(self, kind: str) -> dict[Labels, SharedRow]:
        """Return the rows of a kind, in the order in which they were appended."""
        with self._lock:
            self._scan()
            return self._rows.get(kind, {}).copy()

    def clear_gauges(self) -> None:
        """Set the current values of a process that has ended to zero."""
        with self._lock:
            self._scan()
            for row in (row for rows in self._rows.values() for row in rows.values() if row.gauge):
                for place in range(len(row.values)):
                    row.values[place] = 0

    def _append(self, kind: RowKind, labels: Labels, now: int) -> SharedRow | None:
        text, width = json.dumps((kind.name, *labels)).encode(), kind.width
        begin = max(1, self._integers[0])
        first = begin + ROW_HEADER + -(-len(text) // INTEGER_BYTES)
        if first + width > len(self._integers):
            return None
        self._bytes[(begin + ROW_HEADER) * INTEGER_BYTES :][: len(text)] = text
        for index, value in enumerate((first + width - begin, crc32(text), now, len(text), width, kind.gauge)):
            self._integers[begin + index] = value
        for index in range(first, first + width):
            self._integers[index] = 0  # a process that was killed may have left a part of another row there
        self._integers[0] = first + width  # last: before, no process reads the row
        self._scan()
        return self._rows[kind.name][labels]

    def _scan(self) -> None:
        """Find the rows that were appended since the last call."""
        while self._scanned < self._integers[0]:
            begin = self._scanned
            size, checksum, created, length, width, gauge = self._integers[begin : begin + ROW_HEADER].tolist()
            text = bytes(self._bytes[(begin + ROW_HEADER) * INTEGER_BYTES :][:length])
            if crc32(text) != checksum or size < ROW_HEADER + width:
                return  # not visible to this processor yet
            kind, *labels = json.loads(text)
            values = self._integers[begin + size - width : begin + size]
            self._rows.setdefault(kind, {})[tuple(labels)] = SharedRow(values, created, bool(gauge))
            self._scanned = begin + size


class SharedCounters(Counters):
    """The table of counters of all workers: each writes its own area, and adds up all of them.

    Any worker can do so at any time, without asking the others, and each gets the same totals. A worker that is killed
    loses nothing that it has counted: its replacement continues in the same rows. So counters never decrease.

    prometheus_client's multiprocess mode works similarly. It is not used here, because it keeps one file for every
    process that ever ran, counts in floating point, and offers its values only in Prometheus's format.
    """

    def __init__(self, areas: Sequence[CounterArea], number: int, clock: Clock) -> None:
        """Count in the area of this number."""
        super().__init__()
        self._areas = areas
        self._own_area = areas[number]
        self._clock = clock
        self._start: dict[tuple[str, Labels], list[int]] = {}  # what earlier processes have left in the rows
        self._full = False

    def _new_row(self, kind: RowKind, labels: Labels) -> Row:
        row = self._own_area.row(kind, labels, self._clock.steady())
        if row is None:
            if not self._full:
                log.error("too many names: the totals of the workers do not include further policies and limits")
            self._full = True
            return super()._new_row(kind, labels)
        self._start[kind.name, labels] = list(row.values)
        return row.values

    def own(self, kind: RowKind) -> dict[Labels, list[int]]:
        """Return what this process has counted; of values that are not added up, those of all processes."""
        if kind.combine is not add:
            return self.totals(kind)
        none = [0] * kind.width
        return {
            labels: list(map(sub, row, self._start.get((kind.name, labels), none)))
            for labels, row in self._rows_of(kind).items()
        }

    def totals(self, kind: RowKind) -> dict[Labels, list[int]]:
        """Add up the rows of all workers; the order is the same in each of them."""
        created: dict[Labels, int] = {}
        found: dict[Labels, list[int]] = {}
        for area in self._areas:
            for labels, row in area.rows(kind.name).items():
                values = list(row.values)
                known = found.get(labels)
                found[labels] = values if known is None else list(map(kind.combine, known, values))
                created[labels] = row.created if known is None else min(created[labels], row.created)
        return {labels: found[labels] for labels in sorted(found, key=lambda labels: (created[labels], labels))}


class SharedMessage:
    """A byte string that one process replaces as a whole, and others read."""

    def __init__(self, memory: memoryview) -> None:
        """Use this memory: a header, then two buffers. The header holds version, length and checksum."""
        self._header = memory[:HEADER_BYTES].cast("q")
        half = (len(memory) - HEADER_BYTES) // 2
        self._buffers = memory[HEADER_BYTES : HEADER_BYTES + half], memory[HEADER_BYTES + half :]
        self.max_bytes: int = half

    @property
    def version(self) -> int:
        """How often the message was replaced."""
        return self._header[0]

    def write(self, data: bytes) -> bool:
        """Replace the message; return whether it fits."""
        if len(data) > self.max_bytes:
            return False
        version = self.version + 1
        self._buffers[version % 2][: len(data)] = data
        place = 1 + version % 2 * 2
        self._header[place], self._header[place + 1] = len(data), crc32(data, version)
        self._header[0] = version  # last: before, all processes read the other buffer
        return True

    def read(self) -> bytes | None:
        """Return the message; None if there is none, or if it was replaced again and again while it was read."""
        for _ in range(READ_ATTEMPTS):
            version = self.version
            if not version:
                return None
            place = 1 + version % 2 * 2
            length, checksum = self._header[place], self._header[place + 1]
            data = bytes(self._buffers[version % 2][: max(0, length)])
            if crc32(data, version) == checksum:
                return data
        return None


class WorkerArea:
    """What one worker shares with the others."""

    def __init__(self, memory: memoryview) -> None:
        """Divide this memory."""
        self._header = memory[:HEADER_BYTES].cast("q")
        end = HEADER_BYTES + COUNTER_BYTES
        self.counters: CounterArea = CounterArea(memory[HEADER_BYTES:end])
        self.message: SharedMessage = SharedMessage(memory[end : end + message_bytes(MAX_MESSAGE_BYTES)])

    @property
    def process_id(self) -> int:
        """The process that writes this area; 0 if it has ended."""
        return self._header[0]

    @process_id.setter
    def process_id(self, value: int) -> None:
        self._header[0] = value

    @property
    def viewed_at(self) -> int:
        """When this worker was last asked for the overview, in steady time."""
        return self._header[1]

    @viewed_at.setter
    def viewed_at(self, value: int) -> None:
        self._header[1] = value

    @property
    def history_wanted_at(self) -> int:
        """When this worker asked the others for their history, in steady time; 0 if it did not."""
        return self._header[3]

    @history_wanted_at.setter
    def history_wanted_at(self, value: int) -> None:
        self._header[3] = value

    def end(self) -> None:
        """Note that the process of this area has ended."""
        self.process_id = self.history_wanted_at = self.viewed_at = 0
        self.counters.clear_gauges()

    @property
    def heartbeat(self) -> int:
        """When the event loop of this worker last ran its timer, in steady time; 0 before it is ready."""
        return self._header[2]

    @heartbeat.setter
    def heartbeat(self, value: int) -> None:
        self._header[2] = value


class WorkerMemory:
    """The shared memory of one service. It can be sent to a new process as an argument."""

    def __init__(self, descriptor: int, workers: int, started_at: int) -> None:
        """Map the file of this descriptor. `started_at` is the start of the service, in milliseconds since 1970."""
        self._descriptor = descriptor
        self.started_at = started_at
        self._mapped = mmap.mmap(descriptor, file_bytes(workers))
        memory = memoryview(self._mapped)
        first = message_bytes(MAX_RULES_BYTES)
        self.rules: SharedMessage = SharedMessage(memory[:first])
        self.areas: list[WorkerArea] = [
            WorkerArea(memory[first + number * area_bytes() : first + (number + 1) * area_bytes()])
            for number in range(workers)
        ]

    @classmethod
    def create(cls, workers: int, started_at: int) -> WorkerMemory:
        """Create the memory of a service."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("tidegate-workers")
        else:  # pragma: no cover - other systems than Linux
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, file_bytes(workers))
        return cls(descriptor, workers, started_at)

    def __reduce__(self) -> tuple[Any, ...]:
        """Send the descriptor to a process that is being started."""
        return attach_memory, (DupFd(self._descriptor), len(self.areas), self.started_at)

    def close(self) -> None:
        """Close the descriptor; the memory is freed when no process maps it."""
        os.close(self._descriptor)


def attach_memory(descriptor: Any, workers: int, started_at: int) -> WorkerMemory:  # noqa: ANN401 - of multiprocessing
    """Map the memory in a worker."""
    return WorkerMemory(descriptor.detach(), workers, started_at)


def message_bytes(max_bytes: int) -> int:
    """Return the size of the memory for a message."""
    return HEADER_BYTES + 2 * max_bytes


def area_bytes() -> int:
    """Return the size of the memory for one worker."""
    return HEADER_BYTES + COUNTER_BYTES + message_bytes(MAX_MESSAGE_BYTES)


def file_bytes(workers: int) -> int:
    """Return the size of the memory for a service."""
    return message_bytes(MAX_RULES_BYTES) + workers * area_bytes()
