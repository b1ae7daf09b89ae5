"""A Celery worker that forks its pool while threads of the parent decide: tasks end, and share the quota."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from celery import Celery

from tests.servers.process import until

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")

ROOT = Path(__file__).parents[2]
QUOTA = 200  # of each limiter
TASKS = 20  # for each limiter, in one round
CONCURRENCY = 6  # so many forks, each while threads of the parent decide
DEADLINE = 30.0  # seconds after which a task that has not ended is a failure; an idle machine needs one
OPTIONS = ("--loglevel=warning", "--without-gossip", "--without-mingle", "--without-heartbeat")


class Worker:
    """A Celery worker with its pool, and what its tasks reported."""

    def __init__(self, broker, stores, folder):
        self.folder = folder
        self.cases = [(store, lease) for store in stores for lease in (False, True)]
        self.sent = CONCURRENCY  # for each limiter; the parent calls the task before each fork
        self.app = Celery(broker=broker)
        self.log = folder / "log"
        settings = {"BROKER": broker, "STORES": json.dumps(stores), "FOLDER": str(folder), "QUOTA": str(QUOTA)}
        pool = ("--pool=prefork", f"--concurrency={CONCURRENCY}")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "tests.engine.celery_app", "worker", *pool, *OPTIONS],
                cwd=ROOT,
                env={**os.environ, **settings, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{ROOT}"},
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def answers(self):
        """Return `(process, store, lease, permits)` of each task that has ended."""
        found = []
        for path in self.folder.glob("answers-*"):
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            found += [(path.name, *json.loads(line)) for line in lines if line.endswith("\n")]
        return found

    def admitted(self):
        """Return how many permits of each limiter were taken, by tasks and by the parent."""
        admitted = Counter()
        for _, store, lease, allowed in self.answers():
            admitted[store, lease] += allowed
        return admitted

    def run_in_each_child(self):
        """Have each child of the pool ask each limiter."""
        for _ in range(CONCURRENCY):
            self.app.send_task("tests.engine.celery_app.take_in_each", (CONCURRENCY,))
        self.sent += CONCURRENCY
        self.wait()

    def run_tasks(self):
        """Send a round of tasks for each limiter, and wait until all have ended."""
        for _ in range(TASKS):
            for case in self.cases:
                self.app.send_task("tests.engine.celery_app.take", case)
        self.sent += TASKS
        self.wait()

    def wait(self):
        """Wait until all tasks have ended."""
        try:
            until(lambda: self.process.poll() is not None or self.ended(), "the end of all tasks", DEADLINE)
        except AssertionError as error:
            ended = Counter((store, lease) for _, store, lease, _ in self.answers())
            raise AssertionError(f"{error}; ended: {ended}; log:\n{self.text()}\n{self.stacks()}") from None
        assert self.ended(), f"the worker ended with {self.process.returncode}:\n{self.text()}"

    def ended(self):
        return len(self.answers()) == self.sent * len(self.cases)

    def stacks(self):
        """Have the children of the worker write their stacks, and return these."""
        lists = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        for pid in {int(pid) for path in lists for pid in path.read_text(encoding="utf-8").split()}:
            os.kill(pid, signal.SIGRTMIN)
        path = self.folder / "stacks"
        until(lambda: path.read_text(encoding="utf-8").count("_run_module_as_main") >= CONCURRENCY, "a dump", 5)
        return path.read_text(encoding="utf-8")

    def beats(self):
        """Return how often each thread of the parent has decided."""
        return {path.name: path.read_text(encoding="utf-8") for path in self.folder.glob("parent-*")}

    def text(self):
        return self.log.read_text(encoding="utf-8", errors="replace")

    def stop(self):
        """End the worker as a supervisor does; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE)

    def close(self):
        """Kill whatever has not ended."""
        self.app.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)


@contextmanager
def working(broker, stores, folder):
    """Run a worker until the end of the block."""
    worker = Worker(broker, stores, folder)
    try:
        yield worker
    finally:
        worker.close()


@pytest.mark.slow
def test_tasks_of_a_prefork_pool_share_the_limits_of_their_parent(valkey, postgres_url, tmp_path):
    stores = {
        "memory": "memory://",
        "sqlite": f"sqlite:///{tmp_path / 'store.db'}?deadline=20s",
        "redis": f"{valkey.url}?deadline=20s&prefix=celery",
        "postgres": f"{postgres_url}?deadline=20s&schema=celery",
    }
    with working(valkey.url, stores, tmp_path) as worker:
        worker.run_in_each_child()
        shared = {case: QUOTA for case in worker.cases if case[0] != "memory"}

        def used():
            worker.run_tasks()
            taken = worker.admitted()
            return all(taken[case] >= quota for case, quota in shared.items())

        try:
            until(used, "the use of all permits")  # a process returns within a second the permits that it does not use
        except AssertionError as error:
            raise AssertionError(f"{error}; admitted: {worker.admitted()}") from None
        worker.run_tasks()
        taken = worker.admitted()
        assert {case: taken[case] for case in shared} == shared
        assert len({name for name, *_ in worker.answers()}) == CONCURRENCY + 1  # and the parent
        alone = Counter()
        for name, store, lease, allowed in worker.answers():
            if store == "memory":
                alone[name, lease] += allowed
        assert 0 < min(alone.values()) <= max(alone.values()) <= QUOTA
        before = worker.beats()
        assert len(before) == len(worker.cases)
        until(lambda: all(worker.beats()[name] != beat for name, beat in before.items()), "further calls of the parent")
        assert worker.stop() == 0
        assert "Traceback" not in worker.text()
