"""Measure how long `import tidegate` takes, compared with `import asyncio` (run `python bench/import_time.py`).

Each statement runs in 20 new interpreters, in turns, so that the load of the machine affects all of them alike. The
median of the whole process is reported, and of its processor time. The target is at most 1.5 times `import asyncio`
for `import tidegate`.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from statistics import median
from time import perf_counter
from typing import NamedTuple

ROUNDS = 20
BASE = "import asyncio"
STATEMENTS = (
    BASE,
    "import tidegate",
    "from tidegate import Limiter",
    "from tidegate.inbound.asgi import RateLimitMiddleware",
    "from tidegate.outbound import Providers",
    "from tidegate.budget import TaskBudget",
    "from tidegate.swarm import SwarmLimiter",
)


class Duration(NamedTuple):
    """How long one interpreter ran, in seconds."""

    elapsed: float
    processor: float


def processor_seconds() -> float:
    """Return the processor time of all interpreters that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(statement: str) -> Duration:
    """Run a statement in a new interpreter."""
    processor, start = processor_seconds(), perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)  # noqa: S603 - one of STATEMENTS
    return Duration(perf_counter() - start, processor_seconds() - processor)


def main() -> None:
    """Measure all statements and print a table."""
    found: dict[str, list[Duration]] = {statement: [] for statement in STATEMENTS}
    for _ in range(ROUNDS):
        for statement, durations in found.items():
            durations.append(measure(statement))
    medians = {
        statement: Duration(median(d.elapsed for d in durations), median(d.processor for d in durations))
        for statement, durations in found.items()
    }
    base = medians[BASE]
    print(f"{'statement':<58} {'elapsed':>9} {'processor':>9} {'ratio':>6}")
    for statement, (elapsed, processor) in medians.items():
        times = f"{elapsed * 1000:6.1f} ms {processor * 1000:6.1f} ms {elapsed / base.elapsed:6.2f}"
        print(f"{statement:<58} {times}")


if __name__ == "__main__":
    main()
