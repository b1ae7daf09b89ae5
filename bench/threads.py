"""Eight threads on one key: how many decisions a second in total, and whether exactly the limit is admitted."""

from __future__ import annotations

import sys
import threading
import time
from itertools import count, repeat
from typing import TYPE_CHECKING, Any, Final

from bench.workers import Case

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.libraries import Library

THREADS: Final = 8
YEAR: Final = (
    365  # days: a bucket must not refill a single permit during a round, or rightly admits more than its quota
)
ROUND: Final = 0.4  # seconds
MISTAKES: Final = ("over", "wrongly_denied", "errors")
RUSHED: Final = 1e-5  # seconds between thread switches, to find races; the interpreter's default is 5e-3


def fast(library: Library) -> Callable[[], Any] | None:
    """Count decisions a second, on a fresh key each time; half of the calls are over the limit."""
    if not hasattr(library, "per_day"):
        return None
    fresh = count()
    calls = 1_000 * THREADS
    seconds = storm(library, calls, f"first:{next(fresh)}")["seconds"]
    calls = min(1_000_000, max(calls, int(calls / seconds * ROUND) // THREADS * THREADS))
    return lambda: storm(library, calls, f"user:{next(fresh)}")


def exact(library: Library) -> Callable[[], Any] | None:
    """Count calls wrongly admitted or denied while threads switch very often."""
    if not hasattr(library, "per_day"):
        return None

    def rushed() -> dict[str, float]:
        before = sys.getswitchinterval()
        sys.setswitchinterval(RUSHED)
        try:
            return storm(library, 500 * THREADS, library.HOT)
        finally:
            sys.setswitchinterval(before)

    return rushed


def storm(library: Library, calls: int, key: str) -> dict[str, float]:
    """Let all threads ask at once for twice what the limit allows."""
    quota = calls // 2
    ask, admitted = library.per_day(quota, YEAR), library.admitted
    gate = threading.Barrier(THREADS + 1)
    totals: list[int] = []
    errors: list[Exception] = []

    def work() -> None:
        gate.wait()
        total = 0
        for _ in repeat(None, calls // THREADS):
            try:
                if admitted(ask(key)):
                    total += 1
            except Exception as error:  # noqa: BLE001 - a library that breaks under threads is a finding
                errors.append(error)
        totals.append(total)

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    gate.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    over = sum(totals) - quota
    wrong = {"over": max(0, over), "wrongly_denied": max(0, -over), "errors": len(errors)}
    return {"calls": calls, "seconds": seconds, **wrong}


CASES = (
    Case("threads-fast", "8 threads, decisions a second", fast),
    Case("threads-exact", "8 threads, switching often", exact),
)
