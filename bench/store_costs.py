"""Measure what one decision costs on each store, with and without leases: `python -m bench.store_costs`, half a minute.

One thread decides on one hot key. CPU is processor time per decision: of this process, and of the server. Calls are
requests to the store per million decisions. Bytes per key are measured with keys that were each used twice: as
allocations of this process (memory), as growth of the file (SQLite), of `used_memory` (Valkey), of the tables and
indexes (PostgreSQL).
"""

from __future__ import annotations

import gc
import os
import sqlite3
import tempfile
import time
import tracemalloc
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tests.servers.postgres import PostgresServer, find_binaries
from tests.servers.valkey import ValkeyServer, find_server
from tidegate import Limit, Limiter
from tidegate.stores import DelegatingStore, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate import Decision
    from tidegate.stores._base import Ask, Store
    from tidegate.stores._values import Write

PLENTY: Final = Limit(1_000_000_000, "1d")
SCARCE: Final = Limit(100, "1d")  # a bucket that does not refill during the measurement, so that its state is kept
PATIENT: Final = "?deadline=30s"
KEYS: Final = 5_000
NAMES: Final = count()
TICKS: Final = os.sysconf("SC_CLK_TCK")


class CountedStore(DelegatingStore):
    """Counts the calls of a store."""

    def __init__(self, inner: Store) -> None:
        """Count the calls of `inner`."""
        super().__init__(inner)
        self.instant: bool = False  # type: ignore[misc]  # so that calls take the path of a shared store
        self.calls = 0

    def apply(
        self,
        verb: str,
        asks: Sequence[Ask],
        now: int | None = None,
        at: int | None = None,
        writes: Sequence[Write] = (),
    ) -> list[Decision]:
        """Count, and apply."""
        self.calls += 1
        return super().apply(verb, asks, now, at, writes)


class Place(NamedTuple):
    """A store to measure: its URL, options for it, the process id of its server (0: none), and its size in bytes."""

    url: str
    options: str
    pid: int
    size: Callable[[], int]


class Cost(NamedTuple):
    """What a decision costs."""

    rate: float  # decisions per second of one thread
    client: float  # microseconds of processor time
    server: float
    calls: float  # requests to the store

    def __str__(self) -> str:
        """Format as the columns of a table."""
        per_core = 1e6 / self.client
        return (
            f"{self.rate:>12,.0f}{self.client:>12.2f}{per_core:>16,.0f}{self.server:>12.2f}{self.calls * 1e6:>18,.1f}"
        )


def open_places(stack: ExitStack) -> dict[str, Place]:
    """Start the servers that this machine has."""
    file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "limits.db"
    places = {"memory": Place("memory://", "", 0, lambda: tracemalloc.get_traced_memory()[0])}
    places["SQLite"] = Place(f"sqlite:///{file}", PATIENT, 0, lambda: file_size(file))
    if find_server() is not None:
        valkey = stack.enter_context(ValkeyServer())
        assert valkey.process is not None  # noqa: S101 - it has started
        places["Valkey"] = Place(valkey.url, PATIENT, valkey.process.pid, lambda: used_memory(valkey))
    binaries = find_binaries()
    if binaries is not None:
        server = stack.enter_context(PostgresServer(binaries, fsync="on"))
        assert server.process is not None  # noqa: S101 - as above
        places["PostgreSQL"] = Place(server.url, PATIENT, server.process.pid, lambda: table_size(server.url))
    return places


def file_size(file: Path) -> int:
    """Return the size of an SQLite file, after its log was written to it."""
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return file.stat().st_size


def used_memory(server: ValkeyServer) -> int:
    """Return the bytes that Valkey has allocated."""
    lines = server.ask("INFO", "memory").decode().splitlines()
    return int(next(line for line in lines if line.startswith("used_memory:")).partition(":")[2])


def table_size(url: str) -> int:
    """Return the bytes of all tables of users, with their indexes."""
    import psycopg  # noqa: PLC0415 - only where PostgreSQL is measured

    with psycopg.connect(url) as connection:
        row: Any = connection.execute("SELECT sum(pg_total_relation_size(relid)) FROM pg_stat_user_tables").fetchone()
    return int(row[0] or 0)


def processor_time(pid: int) -> float:
    """Return the processor time of a process and its children, in seconds."""
    total = 0.0
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(entry.parent.name) == pid or int(fields[1]) == pid:
            total += (int(fields[11]) + int(fields[12])) / TICKS
    return total


def measure(place: Place, *, leased: bool, seconds: float) -> Cost:
    """Decide on one hot key: with the store as a URL opens it, and then with one that counts its calls."""
    with Limiter(PLENTY, store=place.url + place.options, lease=leased, name=f"cost{next(NAMES)}") as limiter:
        decide(limiter, 0.05)
        server, own, began = processor_time(place.pid), time.process_time(), time.perf_counter()
        made = decide(limiter, seconds)
        passed, own = time.perf_counter() - began, time.process_time() - own
        server = processor_time(place.pid) - server if place.pid else 0.0
    return Cost(made / passed, own * 1e6 / made, server * 1e6 / made, count_calls(place, leased, seconds / 2))


def count_calls(place: Place, leased: bool, seconds: float) -> float:  # noqa: FBT001 - the value of `lease=`
    """Return the calls of the store per decision."""
    if not place.options:
        return 0.0  # in memory, a decision calls nothing
    store = CountedStore(open_store(place.url))
    with Limiter(PLENTY, store=store, lease=leased, name=f"cost{next(NAMES)}") as limiter:
        decide(limiter, 0.05)
        before = store.calls
        made = decide(limiter, seconds)
        return (store.calls - before) / made


def decide(limiter: Limiter, seconds: float) -> int:
    """Decide for so long; returns how often."""
    try_acquire, clock, made, ends = limiter.try_acquire, time.perf_counter, 0, time.perf_counter() + seconds
    while clock() < ends:
        for _ in range(50):
            try_acquire("user:42")
        made += 50
    return made


def bytes_per_key(place: Place) -> float:
    """Use each of many keys twice, and compare sizes."""
    keys = [f"user:{i}" for i in range(KEYS)]
    gc.collect()
    tracemalloc.start()
    with Limiter(SCARCE, store=place.url + place.options, name=f"keys{next(NAMES)}") as limiter:
        limiter.try_acquire("first")
        before = place.size()
        for key in (*keys, *keys):
            limiter.try_acquire(key)
        gc.collect()
        after = place.size()
    tracemalloc.stop()
    return (after - before) / KEYS


def measure_all(seconds: float) -> dict[str, Cost]:
    """Measure every store, with and without leases, and print a table."""
    found: dict[str, Cost] = {}
    print(f"{'one thread, one hot key':24}{'decisions/s':>12}{'CPU us':>12}{'per core, 1/s':>16}", end="")
    print(f"{'server us':>12}{'calls/million':>18}{'bytes/key':>12}")
    with ExitStack() as stack:
        for name, place in open_places(stack).items():
            size = bytes_per_key(place)
            for leased in (False, True) if name != "memory" else (False,):
                label = f"{name} leased" if leased else name
                found[label] = measure(place, leased=leased, seconds=seconds)
                print(f"{label:24}{found[label]!s}{'' if leased else f'{size:>12.0f}'}", flush=True)
    return found


if __name__ == "__main__":
    print("load average before:", *(f"{load:.1f}" for load in os.getloadavg()))
    measure_all(2.0)
    print("load average after:", *(f"{load:.1f}" for load in os.getloadavg()))
