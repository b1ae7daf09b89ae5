"""Memory that the parent process and all workers share: counters, reports and the policies in effect.

The parent creates one anonymous file and passes its descriptor to each worker, which maps it. No name is left on disk,
and the memory is freed with the last process. Every worker has an area, which only this worker writes:

- **Counters** are rows of 64-bit integers with a name. A worker writes each change at once, so the counters outlive a
  worker that is killed. Its replacement continues in the same rows. A row is never moved or removed.
- **Messages** are byte strings, each replaced as a whole. There are two buffers, and a checksum: a reader gets the last
  complete message, even if the writer was killed while it wrote the next one.

No process waits for another one: a worker that hangs cannot delay a request to the others.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
import threading
from multiprocessing.reduction import DupFd
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Iterator

    RowName = tuple[str, ...]

INTEGER_BYTES: Final = 8
MAX_RULES_BYTES: Final = 16 * 2**20
MAX_REPORT_BYTES: Final = 2**20
MAX_PANELS_BYTES: Final = 2 * 2**20
MAX_HISTORY_BYTES: Final = 8 * 2**20
COUNTER_BYTES: Final = 16 * 2**20  # of one worker; the file is sparse, so unused bytes take no memory
HEADER_BYTES: Final = 4096  # of an area, and of a message: a page
READ_ATTEMPTS: Final = 3  # to read a message that is replaced at the same time
ROW_HEADER: Final = 5  # integers: size of the row, checksum of the name, creation time, bytes of the name, values


class CounterRow(NamedTuple):
    """A row of counters. `start` holds the values that earlier processes left; `write` adds to them."""

    values: memoryview | list[int]
    start: tuple[int, ...]
    created: int = 0  # steady time

    def write(self, index: int, value: int) -> None:
        """Set a counter, which this process counts from 0."""
        self.values[index] = self.start[index] + value


class CounterArea:
    """The rows of one worker. One process appends and writes, others read."""

    def __init__(self, memory: memoryview) -> None:
        """Use this memory, which is zero at first. Its first integer is the number of integers in use."""
        self._bytes = memory
        self._integers = memory.cast("q")
        self._lock = threading.Lock()  # between the event loop and the threads of gRPC; other processes need none
        self._scanned = 1  # integers
        self._rows: dict[RowName, CounterRow] = {}
        self.full: bool = False

    def row(self, name: RowName, width: int, now: int) -> CounterRow:
        """Return the row of this name; append it if it is new. If the area is full, it is not shared."""
        with self._lock:
            self._scan()
            found = self._rows.get(name)
            if found is None:
                found = self._append(name, width, now)
        return found._replace(start=tuple(found.values))

    def rows(self) -> Iterator[tuple[RowName, CounterRow]]:
        """Iterate over all rows, in the order in which they were appended."""
        with self._lock:
            self._scan()
            return iter(list(self._rows.items()))

    def _append(self, name: RowName, width: int, now: int) -> CounterRow:
        text = json.dumps(name).encode()
        begin = max(1, self._integers[0])
        first = begin + ROW_HEADER + -(-len(text) // INTEGER_BYTES)
        if first + width > len(self._integers):
            self.full = True
            return CounterRow([0] * width, ())
        self._bytes[(begin + ROW_HEADER) * INTEGER_BYTES :][: len(text)] = text
        for index, value in enumerate((first + width - begin, crc32(text), now, len(text), width)):
            self._integers[begin + index] = value
        for index in range(first, first + width):
            self._integers[index] = 0  # a process that was killed may have left a part of another row there
        self._integers[0] = first + width  # last: before, no process reads the row
        self._scan()
        return self._rows[name]

    def _scan(self) -> None:
        """Find the rows that were appended since the last call."""
        while self._scanned < self._integers[0]:
            begin = self._scanned
            size, checksum, created, length, width = self._integers[begin : begin + ROW_HEADER].tolist()
            text = bytes(self._bytes[(begin + ROW_HEADER) * INTEGER_BYTES :][:length])
            if crc32(text) != checksum or size < ROW_HEADER + width:
                return  # not visible to this processor yet
            values = self._integers[begin + size - width : begin + size]
            self._rows[tuple(json.loads(text))] = CounterRow(values, (), created)
            self._scanned = begin + size


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
        self.report: SharedMessage = SharedMessage(memory[end : end + message_bytes(MAX_REPORT_BYTES)])
        end += message_bytes(MAX_REPORT_BYTES)
        self.history: SharedMessage = SharedMessage(memory[end : end + message_bytes(MAX_HISTORY_BYTES)])
        end += message_bytes(MAX_HISTORY_BYTES)
        self.panels: SharedMessage = SharedMessage(memory[end : end + message_bytes(MAX_PANELS_BYTES)])

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
    messages = (MAX_REPORT_BYTES, MAX_HISTORY_BYTES, MAX_PANELS_BYTES)
    return HEADER_BYTES + COUNTER_BYTES + sum(map(message_bytes, messages))


def file_bytes(workers: int) -> int:
    """Return the size of the memory for a service."""
    return message_bytes(MAX_RULES_BYTES) + workers * area_bytes()
