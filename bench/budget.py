"""Compare task budgets: a batch check on five tiers, with 100,000 tasks in the month's window, on an SQLite file.

python -m bench.budget             about a minute
python -m bench.budget --quick     a look
python -m bench.budget --single    the 100,000 tasks were checked one by one: as many entries in each log

Each contender has the same tasks in its file, spread evenly over 30 days, and takes turns with the others; every batch
has 10 tasks. tidegate reserves in the check and settles in the record, pyrate-limiter's put checks and records at once,
and the hand-written count (aiosqlite, the document's schema) only looks in its check. What the daily removal may keep a
check waiting, a transaction of it, is measured at the end, with 100,000 completions to be removed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Ask = Callable[[], Awaitable[object]]

TASKS: Final = 100_000
BATCH: Final = 10
DAYS: Final = 30
PLENTY: Final = 10_000_000
PERIODS: Final = {"minute": 60, "hour": 3600, "day": 86_400, "week": 604_800, "month": 2_592_000}
START: Final = 1_750_000_000.0
ALLOWED_MS: Final = 1.0  # p99 of a check, of processor time
OUTLIER_MS: Final = (
    10.0  # of processor time; beyond it a check only waits for the disk (when SQLite writes its log back)
)
PAUSE_MS: Final = 5.0  # the most that the removal may cost a check


class Contender:
    """Checks and records batches; `check` and `record` are measured."""

    title = ""
    check: Ask
    record: Ask | None = None

    async def open(self, path: str, size: int) -> None:
        """Fill the file with tasks, in batches of this size."""

    def advance(self, seconds: float) -> None:
        """Let time pass."""

    async def close(self) -> None:
        """Let the file go."""


class Tidegate(Contender):
    """TaskBudget, called from a thread."""

    title = "tidegate TaskBudget"

    async def open(self, path: str, size: int) -> None:
        """Fill the file by recording."""
        from tidegate.budget import TaskBudget  # noqa: PLC0415 - only who is measured is loaded
        from tidegate.testing import ManualClock  # noqa: PLC0415 - as above

        self.clock = ManualClock(start=START)
        tiers = {f"per_{period}": PLENTY for period in PERIODS}
        self.budget = TaskBudget(**tiers, store=path, clock=self.clock)
        for _ in range(TASKS // size):
            self.budget.record_completed_tasks(size)
            self.clock.advance(DAYS * 86_400 / (TASKS / size))

    async def check(self) -> object:
        """Reserve."""
        return self.budget.check_all_limits(BATCH)

    async def record(self) -> object:
        """Settle."""
        self.budget.record_completed_tasks(BATCH)
        return None

    def advance(self, seconds: float) -> None:
        """Move the clock."""
        self.clock.advance(seconds)

    async def close(self) -> None:
        """Close."""
        self.budget.close()


class TidegateAsync(Tidegate):
    """AsyncTaskBudget: each call crosses to the thread of the store and back."""

    title = "tidegate AsyncTaskBudget"

    async def open(self, path: str, size: int) -> None:
        """Fill the file, then use it from tasks."""
        from tidegate.budget import AsyncTaskBudget  # noqa: PLC0415 - as above

        await super().open(path, size)
        self.budget.close()
        tiers = {f"per_{period}": PLENTY for period in PERIODS}
        self.tasks = AsyncTaskBudget(**tiers, store=path, clock=self.clock)

    async def check(self) -> object:
        """Reserve."""
        return await self.tasks.check_all_limits(BATCH)

    async def record(self) -> object:
        """Settle."""
        await self.tasks.record_completed_tasks(BATCH)
        return None

    async def close(self) -> None:
        """Close."""
        await self.tasks.close()


class Pyrate(Contender):
    """pyrate-limiter's SQLiteBucket: a row for each task."""

    title = "pyrate-limiter SQLiteBucket"

    async def open(self, path: str, size: int) -> None:
        """Fill its table."""
        from pyrate_limiter import Rate, RateItem, SQLiteBucket  # type: ignore[import-not-found]  # noqa: PLC0415 - peers are only in .venv-bench

        del size
        self.item = RateItem
        self.now = int(START * 1000) + DAYS * 86_400_000
        # It wants quotas that grow with their periods.
        rates = [Rate(PLENTY + number, seconds * 1000) for number, seconds in enumerate(PERIODS.values())]
        self.bucket = SQLiteBucket.init_from_file(rates, db_path=path)
        step = DAYS * 86_400_000 / TASKS
        rows = [("tasks", int(START * 1000 + number * step)) for number in range(TASKS)]
        names = [row[1] for row in self.bucket.conn.execute(f"PRAGMA table_info({self.bucket.table})")]
        self.bucket.conn.executemany(f"INSERT INTO {self.bucket.table} ({', '.join(names[:2])}) VALUES (?, ?)", rows)  # noqa: S608 - its own table
        self.bucket.conn.commit()

    async def check(self) -> object:
        """Check and record."""
        return self.bucket.put(self.item("tasks", self.now, weight=BATCH))

    def advance(self, seconds: float) -> None:
        """Move the instant that is passed, and let what is old go, as its background thread would."""
        self.now += int(seconds * 1000)
        self.bucket.leak(self.now)

    async def close(self) -> None:
        """Close."""
        self.bucket.close()


class Counting(Contender):
    """The document's schema, counted by hand with aiosqlite: five counts, then rows for what was done."""

    title = "aiosqlite, counting rows"

    async def open(self, path: str, size: int) -> None:
        """Fill the table."""
        import aiosqlite  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415 - peers are only in .venv-bench

        del size
        self.now = START + DAYS * 86_400
        self.db = await aiosqlite.connect(path)
        await self.db.execute("PRAGMA journal_mode = WAL")
        await self.db.execute("PRAGMA synchronous = NORMAL")
        await self.db.execute("CREATE TABLE task_completions (id INTEGER PRIMARY KEY AUTOINCREMENT, "
                              "completed_at REAL, task_type TEXT, task_id TEXT)")  # fmt: skip
        await self.db.execute("CREATE INDEX idx_task_completions_timestamp ON task_completions(completed_at)")
        step = DAYS * 86_400 / TASKS
        rows = [(START + number * step,) for number in range(TASKS)]
        await self.db.executemany("INSERT INTO task_completions (completed_at) VALUES (?)", rows)
        await self.db.commit()

    async def check(self) -> object:
        """Count each window."""
        for seconds in PERIODS.values():
            query = "SELECT count(*) FROM task_completions WHERE completed_at > ?"
            async with self.db.execute(query, (self.now - seconds,)) as cursor:
                row = await cursor.fetchone()
            if row[0] + BATCH > PLENTY:
                return False
        return True

    async def record(self) -> object:
        """Insert a row for each task."""
        query = "INSERT INTO task_completions (completed_at) VALUES (?)"
        await self.db.executemany(query, [(self.now,)] * BATCH)
        await self.db.commit()
        return None

    def advance(self, seconds: float) -> None:
        """Move the instant."""
        self.now += seconds

    async def close(self) -> None:
        """Close."""
        await self.db.close()


async def measure(folder: str, size: int, checks: int) -> list[dict[str, Any]]:
    """Let the contenders take turns, 20 batches each."""
    able: list[Contender] = []
    async with AsyncExitStack() as stack:
        for contender in (Tidegate(), TidegateAsync(), Pyrate(), Counting()):
            try:
                await contender.open(f"{folder}/{type(contender).__name__}.db", size)
            except ImportError as missing:
                print(f"not measured: {contender.title} ({missing})")
                continue
            stack.push_async_callback(contender.close)
            able.append(contender)
        times: dict[str, tuple[list[float], list[float]]] = {each.title: ([], []) for each in able}
        own: dict[str, list[float]] = {each.title: [] for each in able}
        for _ in range(checks // 20):
            for contender in able:
                for _ in range(20):
                    contender.advance(DAYS * 86_400 * BATCH / TASKS)
                    for call, seen in zip((contender.check, contender.record), times[contender.title], strict=True):
                        if call is not None:
                            begun, before = time.perf_counter(), time.thread_time()
                            await call()
                            seen.append((time.perf_counter() - begun) * 1000)
                            if call == contender.check:
                                own[contender.title].append((time.thread_time() - before) * 1000)
    return [
        {"contender": title, "check": summary(checked), "record": summary(recorded), "cpu": summary(own[title])}
        for title, (checked, recorded) in times.items()
    ]


def summary(times: list[float]) -> dict[str, float] | None:
    """Sum up milliseconds."""
    if not times:
        return None
    cuts = quantiles(times, n=100)
    return {"p50": cuts[49], "p99": cuts[98], "max": max(times)}


def measure_removal(folder: str) -> dict[str, float]:
    """Remove 100,000 old completions: each transaction is what a check may have to wait for."""
    from tidegate.budget import TaskBudget  # noqa: PLC0415 - as above

    path = f"{folder}/removal.db"
    wall, own = [], []
    with TaskBudget(per_month=PLENTY, store=path) as budget:
        budget.check_all_limits(1)
        db = sqlite3.connect(path)
        old = [("budget:tasks", 1_000_000 + number, 1) for number in range(TASKS)]
        db.executemany("INSERT INTO budget_completion (policy, completed, tasks) VALUES (?, ?, ?)", old)
        db.commit()
        db.close()
        file = budget.operations.settlements.budget_store
        assert file is not None  # noqa: S101 - it has a path
        removed = 1
        while removed:
            begun, before = time.perf_counter(), time.thread_time()
            removed = file.clean_up_some()
            wall.append((time.perf_counter() - begun) * 1000)
            own.append((time.thread_time() - before) * 1000)
    return {"transactions": len(wall), "cpu_max": max(own), **(summary(wall) or {})}


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer checks")
    options.add_argument("--single", action="store_true", help="tasks were checked one by one")
    options.add_argument("--json", type=Path, help="also write the results to this file")
    options.add_argument("--folder", help="where the files are made (default: the system's temporary folder)")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        found = asyncio.run(measure(folder, 1 if chosen.single else BATCH, 200 if chosen.quick else 2000))
        removal = measure_removal(folder)
    print(f"{f'ms for a batch of {BATCH}, {TASKS:,} tasks in the window':48}{'p50':>8}{'p99':>8}{'max':>8}")
    for row in found:
        for what in ("check", "record"):
            if (times := row[what]) is not None:
                numbers = "".join(f"{times[each]:>8.2f}" for each in ("p50", "p99", "max"))
                print(f"{row['contender']:32}{what:16}{numbers}")
    numbers = "".join(f"{removal[each]:>8.2f}" for each in ("p50", "p99", "max"))
    print(f"{'tidegate, removing 100 old completions':48}{numbers}")
    ours, cpu = found[0]["check"], found[0]["cpu"]
    own = f"{cpu['p50']:.2f} ms (p50), {cpu['p99']:.2f} ms (p99), {cpu['max']:.2f} ms at most"
    print(f"On a busy machine a process waits for its turn; of its own, a check of tidegate takes {own}.")
    pause = f"{removal['p99']:.2f} ms (p99), {removal['cpu_max']:.2f} ms of its own at most"
    verdicts = [
        (f"a check takes less than {ALLOWED_MS:g} ms of processor time (p99)", cpu["p99"] < ALLOWED_MS),
        (f"no check takes more than {OUTLIER_MS:g} ms of processor time", cpu["max"] < OUTLIER_MS),
        (f"the removal blocks a check for less than {PAUSE_MS:g} ms ({pause})", removal["p99"] < PAUSE_MS),
    ]
    for row in found[2:]:
        times = row["check"]["p50"] / ours["p50"]
        verdicts.append((f"faster than {row['contender']} ({times:.0f} times)", times > 1))
    for title, met in verdicts:
        print(f"{'met   ' if met else 'MISSED'}  {title}")
    if chosen.json:
        result = {"batches": found, "removal": removal, "targets": verdicts}
        chosen.json.write_text(json.dumps(result, indent=2), encoding="utf-8")


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # so that `bench` is a package, however this is started
    main()
