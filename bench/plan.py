"""How fast `tidegate plan replay` reads and decides: a generated log of many lines, three categories, two processes.

    python -m bench.plan 10000000

Parsing is measured apart: it is the whole work of a replay but the decisions.
"""

from __future__ import annotations

import random
import resource
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.plan import ReplayOptions, read_spec, replay
from tidegate.plan._logs.stream import LogStream

if TYPE_CHECKING:
    from tidegate.plan._logs.batch import LogSender, LogSubject

CLIENTS = 20_000
RATE = 1000  # requests a second, in the time of the log
START = 1_790_000_000
REPEATED = 200_000  # generated requests; their times go on
PATHS = ("/api/feeds", "/api/clusters", "/api/timeline", "/api/refresh", "/api/cluster")
CONFIG = """
rate_limiting:
  categories:
    read: {limits: [60/1m], endpoints: [/api/feeds, /api/clusters, /api/timeline]}
    refresh: {limits: [10/1h], endpoints: [/api/refresh]}
    cluster: {limits: [5/1h], endpoints: [/api/cluster]}
"""


def write_log(path: Path, count: int) -> None:
    """Write a log in the combined format: most clients send little, and a few send too much."""
    chosen = random.Random(1)
    rows = []
    for _ in range(REPEATED):
        client = min(int(chosen.paretovariate(0.2)) + chosen.randrange(8000), CLIENTS - 1)
        target = chosen.choices(PATHS, [60, 30, 20, 1, 1])[0]
        rows.append(
            (f"10.0.{client >> 8}.{client & 255}", f'"GET {target}?page={chosen.randrange(50)} HTTP/1.1" 200 5120')
        )
    with path.open("w", encoding="ascii") as file:
        for second in range(count // RATE):
            stamp = datetime.fromtimestamp(START + second, UTC).strftime("%d/%b/%Y:%H:%M:%S +0000")
            first = second * RATE % REPEATED
            for address, rest in rows[first : first + RATE]:
                file.write(f'{address} - - [{stamp}] {rest} "-" "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36"\n')


class Unresolved:
    """Reads senders and subjects as they are."""

    def find_sender(self, sender: LogSender) -> LogSender:
        """Return the sender."""
        return sender

    def find_subject(self, subject: LogSubject) -> LogSubject:
        """Return the subject."""
        return subject


def parse(path: Path) -> int:
    """Read all lines in one process."""
    return sum(map(len, LogStream([path]).read(Unresolved())))


def main(count: int) -> None:
    """Measure, and print a table."""
    with tempfile.TemporaryDirectory() as folder:
        path, config = Path(folder, "access.log"), Path(folder, "config.yaml")
        config.write_text(CONFIG)
        write_log(path, count)
        began = time.perf_counter()
        parse(path)
        parsed = time.perf_counter() - began
        began = time.perf_counter()
        report: dict[str, Any] = replay([path], read_spec([config]), ReplayOptions(processes=2, uncertainty=0))
        replayed = time.perf_counter() - began
    memory = [resource.getrusage(who).ru_maxrss // 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    totals = report["totals"]
    print(
        f"{totals['requests']:,} requests of {totals['clients']:,} clients, {100 * totals['denied_share']:.2f} % denied"
    )
    print(f"parsing, one process       {parsed:7.1f} s  {1e6 * parsed / count:5.2f} µs a line")
    print(f"replay, two processes      {replayed:7.1f} s  {1e6 * replayed / count:5.2f} µs a line")
    print(f"memory of each process     {memory[0]:,} and {memory[1]:,} MB")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
