"""The example: a scheduler processes the tasks of a server within its budget."""

import asyncio
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from examples.budget import scheduler as module
from examples.budget.scheduler import TaskScheduler
from examples.budget.task_server import TaskServer, some_tasks
from tidegate.budget import AsyncTaskBudget

ROOT = Path(__file__).parents[2]


class TaskProcessor:
    """Processes tasks: stores when, and how many at once; fails some of them the first time."""

    def __init__(self, clock, fails=()):
        self.clock = clock
        self.fails = set(fails)
        self.done = []
        self.running = self.max_running = 0

    async def __call__(self, task):
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        try:
            if task["id"] in self.fails:
                self.fails.remove(task["id"])
                raise RuntimeError("the model did not answer")
            await asyncio.sleep(0)
            self.done.append((self.clock.now(), task["id"]))
        finally:
            self.running -= 1


async def test_a_scheduler_stays_within_its_budget(path, clock):
    start = clock.now()
    work = TaskProcessor(clock, fails=["task-3", "task-17"])
    sleeps = []

    async def sleep(seconds):
        sleeps.append(seconds)
        clock.advance(seconds)

    with TaskServer(some_tasks(50)) as server:
        settings = {"per_minute": 20, "per_hour": 45, "concurrency": 5, "store": path, "clock": clock}
        async with AsyncTaskBudget(**settings) as budget:
            await TaskScheduler(server.url, budget, work, sleep=sleep).run(poll_every=60)
            usage = await budget.get_current_usage()
    assert sorted(server.done) == sorted(f"task-{number}" for number in range(1, 51))
    assert work.max_running == 5
    times = [at - start for at, _ in work.done]
    assert {seconds: times.count(seconds) for seconds in set(times)} == {0.0: 20, 60.0: 20, 120.0: 5, 3600.0: 5}
    assert sleeps == [60] * 60
    assert usage["hour"].used == 30  # the tasks of the first minute have expired
    with closing(sqlite3.connect(path)) as db:
        recorded = db.execute("SELECT task_id FROM task_completions").fetchall()
    assert sorted(recorded) == sorted((name,) for _, name in work.done)


def test_the_example_runs_as_a_program(path):
    with TaskServer(some_tasks(12)) as server:
        variables = {
            "RATE_LIMIT_ENABLED": "true",
            "RATE_LIMIT_PER_DAY": "100",
            "RATE_LIMIT_STORAGE_PATH": str(path),
            "CONCURRENCY_LIMIT": "12",
        }
        command = [sys.executable, "-m", module.__name__, server.url]
        result = subprocess.run(
            command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, check=False, timeout=60
        )
        assert result.returncode == 0, result.stderr
        assert len(server.done) == 12
        assert "task-12: summarise document 12" in result.stderr
