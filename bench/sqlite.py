"""Compare limiters on one SQLite file: decisions per second of several processes, and whether the limit is kept.

python -m bench.sqlite             about a minute
python -m bench.sqlite --quick     a look

Each decision is a transaction of its own. The contenders take turns, in several rounds; the best and the median of the
rounds are shown. pyrate-limiter counts the rows in its window, so it gets one that stays small (100 ms). Its file lock
needs the package filelock; without it, its processes do not exclude each other.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sqlite3
import sys
import tempfile
import time
from contextlib import closing
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.synchronize import Barrier

    Ask = Callable[[], object]

CONTEXT: Final = multiprocessing.get_context("spawn")
PLENTY: Final = 1_000_000_000
QUOTA: Final = 1000
TASKS: Final = 100_000
TIMES: Final = 5  # as fast as the best peer, at least
FILES: Final = count()


# ---- contenders: from a file to a function that asks for one permit, true when admitted ------------------------------


def tidegate_bucket(path: str, quota: int) -> Ask:
    """Ask tidegate's default algorithm."""
    return tidegate(path, [(quota, "1d", "token_bucket")])


def tidegate_log(path: str, quota: int) -> Ask:
    """Ask tidegate's exact log, which is what the peer does."""
    return tidegate(path, [(quota, "1d" if quota < PLENTY else "100ms", "sliding_log")])


def tidegate_five(path: str, quota: int) -> Ask:
    """Ask five limits at once."""
    return tidegate(path, [(quota, period, "token_bucket") for period in ("1s", "1m", "1h", "1d", "1w")])


def tidegate(path: str, limits: list[tuple[int, str, str]]) -> Ask:
    """Ask a Limiter."""
    from tidegate import Limit, Limiter  # noqa: PLC0415 - each process loads only what it measures
    from tidegate.stores._sqlite import SQLiteStore  # noqa: PLC0415 - as above

    # Not by its URL: a store that did not answer within the deadline of 50 ms would be counted as one that did.
    limiter = Limiter([Limit(*limit) for limit in limits], store=SQLiteStore(path, busy_timeout="60s"))
    return lambda: limiter.try_acquire("user:42")


def pyrate_limiter_locked(path: str, quota: int) -> Ask:
    """Ask pyrate-limiter with its lock between processes (WAL, synchronous=NORMAL)."""
    return pyrate_limiter(path, quota, use_file_lock=True)


def pyrate_limiter_bare(path: str, quota: int) -> Ask:
    """Ask pyrate-limiter as it is by default."""
    return pyrate_limiter(path, quota, use_file_lock=False)


def pyrate_limiter(path: str, quota: int, *, use_file_lock: bool) -> Ask:
    """Ask its SQLiteBucket: less than its Limiter does, which breaks on the newest filelock."""
    from pyrate_limiter import (  # type: ignore[import-not-found]  # noqa: PLC0415 - peers are only in .venv-bench
        Rate,
        RateItem,
        SQLiteBucket,
    )

    interval = 86_400_000 if quota < PLENTY else 100
    bucket = SQLiteBucket.init_from_file([Rate(quota, interval)], db_path=path, use_file_lock=use_file_lock)

    def ask() -> object:
        while True:
            try:
                with bucket.lock:
                    return bucket.put(RateItem("user:42", bucket.now()))
            except sqlite3.OperationalError:  # locked: that is left to its caller
                bucket.conn.rollback()

    return ask


def raw_transaction(path: str, quota: int) -> Ask:
    """Read and write one row, deciding nothing: the floor."""
    del quota
    db = sqlite3.connect(path, isolation_level=None, timeout=60)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute("CREATE TABLE IF NOT EXISTS state (key TEXT PRIMARY KEY, used INTEGER)")
    db.execute("INSERT OR IGNORE INTO state VALUES ('user:42', 0)")
    execute = db.cursor().execute

    def ask() -> bool:
        execute("BEGIN IMMEDIATE")
        (used,) = execute("SELECT used FROM state WHERE key = ?", ("user:42",)).fetchone()
        execute("UPDATE state SET used = ? WHERE key = ?", (used + 1, "user:42"))
        execute("COMMIT")
        return True

    return ask


# ---- measuring -------------------------------------------------------------------------------------------------------


class Contender(NamedTuple):
    """Who is measured, with how many processes."""

    title: str
    opener: Callable[[str, int], Ask]
    processes: int


CONTENDERS: Final = (
    Contender("tidegate, token bucket", tidegate_bucket, 1),
    Contender("tidegate, five token buckets", tidegate_five, 1),
    Contender("tidegate, sliding log", tidegate_log, 1),
    Contender("pyrate-limiter, file lock", pyrate_limiter_locked, 1),
    Contender("pyrate-limiter, default", pyrate_limiter_bare, 1),
    Contender("bare transaction", raw_transaction, 1),
    Contender("tidegate, token bucket", tidegate_bucket, 4),
    Contender("tidegate, sliding log", tidegate_log, 4),
    Contender("pyrate-limiter, file lock", pyrate_limiter_locked, 4),
    Contender("bare transaction", raw_transaction, 4),
)
EXACT: Final = (
    Contender("tidegate, token bucket", tidegate_bucket, 4),
    Contender("tidegate, sliding log", tidegate_log, 4),
    Contender("pyrate-limiter, file lock", pyrate_limiter_locked, 4),
    Contender("pyrate-limiter, default", pyrate_limiter_bare, 4),
)


def work(contender: Contender, path: str, start: Barrier, seconds: float, results: Any) -> None:  # noqa: ANN401 - a queue
    """Ask for some seconds, in one process; tell how many decisions, and how long each took."""
    ask = contender.opener(path, PLENTY)
    ask()
    start.wait()
    times = []
    before = begun = time.perf_counter()
    while before - begun < seconds:
        ask()
        after = time.perf_counter()
        times.append(after - before)
        before = after
    late = quantiles(times, n=100)[98] if len(times) > 1 else before - begun  # one that hardly came to its turn
    results.put((len(times) / (before - begun), late))


def spend(contender: Contender, path: str, start: Barrier, results: Any) -> None:  # noqa: ANN401 - a queue
    """Ask for more than there is, in one process; tell how many were admitted."""
    ask = contender.opener(path, QUOTA)
    start.wait()
    results.put(sum(bool(ask()) for _ in range(QUOTA // 2)))


def together(target: Callable[..., None], contender: Contender, folder: str, *arguments: float) -> list[Any]:
    """Run a contender's processes on a new file."""
    path = f"{folder}/{next(FILES)}.db"
    contender.opener(path, PLENTY)  # whoever comes first makes the file; none of them is measured for that
    start, results = CONTEXT.Barrier(contender.processes), CONTEXT.Queue()
    processes = [
        CONTEXT.Process(target=target, args=(contender, path, start, *arguments, results), daemon=True)
        for _ in range(contender.processes)
    ]
    for process in processes:
        process.start()
    answers = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    return answers


def usable(contender: Contender) -> bool:
    """Tell whether a contender is installed."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            contender.opener(f"{folder}/try.db", 1)
    except ImportError as missing:
        print(f"not measured: {contender.title} ({missing})")
        return False
    return True


def measure_speed(folder: str, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Let the contenders take turns."""
    able = [contender for contender in CONTENDERS if usable(contender)]
    seen: dict[Contender, list[tuple[float, float]]] = {contender: [] for contender in able}
    for _ in range(rounds):
        for contender in able:
            answers = together(work, contender, folder, seconds)
            seen[contender].append((sum(rate for rate, _ in answers), max(slow for _, slow in answers)))
    return [
        {
            "contender": contender.title,
            "processes": contender.processes,
            "best": max(rate for rate, _ in runs),
            "median": median(rate for rate, _ in runs),
            "p99_ms": min(slow for _, slow in runs) * 1000,
        }
        for contender, runs in seen.items()
    ]


def measure_exactness(folder: str) -> list[dict[str, Any]]:
    """Count what four processes are admitted of a quota, asking for twice as much."""
    return [
        {"contender": contender.title, "quota": QUOTA, "admitted": sum(together(spend, contender, folder))}
        for contender in EXACT
        if usable(contender)
    ]


def measure_batch(folder: str, checks: int) -> dict[str, Any]:
    """Time a batch check of five rolling budgets, the month's with 100,000 tasks in its window."""
    from tidegate import Limit, Limiter  # noqa: PLC0415 - as above
    from tidegate.stores._sqlite import SQLiteStore  # noqa: PLC0415 - as above
    from tidegate.testing import ManualClock  # noqa: PLC0415 - as above

    clock = ManualClock(start=1_750_000_000)
    store = SQLiteStore(f"{folder}/batch.db", clock=clock)
    limits = [Limit(PLENTY, period, "sliding_log") for period in ("1m", "1h", "1d", "1w", "30d")]
    times = []
    with closing(store), Limiter(limits, store=store) as limiter:
        for _ in range(TASKS):
            limiter.try_acquire("tasks")
            clock.advance(20)
        for _ in range(checks):
            clock.advance(20)
            begun = time.perf_counter()
            limiter.try_acquire("tasks", 10)
            times.append(time.perf_counter() - begun)
    cuts = quantiles(times, n=100)
    return {"tasks": TASKS, "p50_ms": cuts[49] * 1000, "p99_ms": cuts[98] * 1000}


def judge(speed: list[dict[str, Any]], exact: list[dict[str, Any]], batch: dict[str, Any]) -> list[tuple[str, bool]]:
    """Compare with the project's targets."""
    rate = {(row["contender"], row["processes"]): row["best"] for row in speed}
    verdicts = [
        ("a 5-limit policy costs at most 1.5x a single limit",
         rate["tidegate, five token buckets", 1] * 1.5 >= rate["tidegate, token bucket", 1]),
        (f"a batch check with {TASKS:,} tasks in the window takes less than 1 ms (p99)", batch["p99_ms"] < 1),
        ("exact with 4 processes", all(r["admitted"] == QUOTA for r in exact if r["contender"].startswith("tidegate"))),
    ]  # fmt: skip
    for processes in (1, 4):
        peers = [best for (name, n), best in rate.items() if name.startswith("pyrate") and n == processes]
        if peers:
            bucket, log = (
                rate[f"tidegate, {kind}", processes] / max(peers) for kind in ("token bucket", "sliding log")
            )
            title = f"at least 5x pyrate-limiter, {processes} process{'es' * (processes > 1)}"
            verdicts.append((f"{title} ({bucket:.1f}x; its own algorithm, a sliding log: {log:.1f}x)", bucket >= TIMES))
    return verdicts


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    options.add_argument("--json", type=Path, help="also write the results to this file")
    options.add_argument("--folder", help="where the files are made (default: the system's temporary folder)")
    chosen = options.parse_args()
    rounds, seconds = (2, 0.5) if chosen.quick else (5, 1.0)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        speed = measure_speed(folder, rounds, seconds)
        exact = measure_exactness(folder)
        batch = measure_batch(folder, 500 if chosen.quick else 5000)
    print(f"{'':32}{'processes':>10}{'best/s':>12}{'median/s':>12}{'p99 ms':>10}")
    for row in speed:
        numbers = f"{row['processes']:>10}{row['best']:>12,.0f}{row['median']:>12,.0f}{row['p99_ms']:>10.2f}"
        print(f"{row['contender']:32}{numbers}")
    for row in exact:
        print(f"{row['contender']:32}admitted {row['admitted']:,} of {row['quota']:,} to 4 processes")
    print(
        f"batch check, {batch['tasks']:,} tasks in the window: {batch['p50_ms']:.2f} ms, p99 {batch['p99_ms']:.2f} ms"
    )
    verdicts = judge(speed, exact, batch)
    for title, met in verdicts:
        print(f"{'met   ' if met else 'MISSED'}  {title}")
    if chosen.json:
        result = {"speed": speed, "exact": exact, "batch": batch, "targets": verdicts}
        chosen.json.write_text(json.dumps(result, indent=2), encoding="utf-8")


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # so that `bench` is a package, however this is started
    main()
