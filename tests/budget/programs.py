"""Programs that tests start as processes: python programs.py NAME PATH [numbers]."""

import json
import os
import random
import signal
import sys
from collections.abc import Callable

from tidegate._runtime.clock import ThreadSignal
from tidegate.budget import TaskBudget
from tidegate.budget._storage import open_values

QUOTA = 100_000
SHORT_LEASE = 2.0  # seconds after which the batches of a killed program are returned, in place of 30
OPEN = "SELECT name, data FROM value WHERE name LIKE '%:%' AND data != CAST('returned' AS BLOB)"  # in SQLite
SHARED_TIERS = {"per_hour": 100, "per_day": 100, "concurrency": 50}
TTL = 3600.0  # longer than the test: batches are returned only because their process has ended


def open_budget(path, quota=QUOTA, **options):
    tiers = {f"per_{period}": quota for period in ("minute", "hour", "day", "week", "month")}
    return TaskBudget(**tiers, store=path, batch_ttl=TTL, deadline=60.0, **options)


def kill_workers(path: str, kills: int, seed: int) -> None:
    """Kill workers, two at a time, at random moments; print what they reported about their tasks."""
    random_source = random.Random(seed)
    reports: list[str] = []
    for number in range(kills // 2):
        pipes = []
        for side in "ab":
            read_end, write_end = os.pipe()
            child = os.fork()
            if not child:
                work_until_killed(path, write_end, f"{number}{side}")
            os.close(write_end)
            pipes.append((child, read_end))
        for child, read_end in pipes:
            reports.append(read_lines(read_end, random_source.randrange(12)))
            os.kill(child, signal.SIGKILL)
        for child, read_end in pipes:
            while data := os.read(read_end, 65_536):
                reports.append(data.decode())
            os.close(read_end)
            os.waitpid(child, 0)
    lines = "".join(reports).split()
    started = [line[1:] for line in lines if line[0] == "+"]
    done = [line[1:] for line in lines if line[0] == "="]
    print(json.dumps({"started": started, "done": done}))  # noqa: T201 - the result of the program


def read_lines(pipe: int, count: int) -> str:
    """Read so many lines from a worker, so that it is killed while it works."""
    text = ""
    while text.count("\n") < count:
        data = os.read(pipe, 1)
        if not data:
            break
        text += data.decode()
    return text


def work_until_killed(path: str, pipe: int, name: str) -> None:
    """Check, process and record batches; report tasks before (+) and after (=) they are recorded."""
    budget = open_budget(path)
    random_source = random.Random(name)
    number = 0
    while True:
        size = random_source.randrange(1, 4)
        if random_source.random() < 0.5:
            result = budget.check_all_limits(size)
            assert result.allowed, result
            assert not result.local, result
            number += 1
            task = f"{name}-{number}"
            os.write(pipe, f"+{task}/{size}\n".encode())
            budget.record_completed_tasks(task_ids=[f"{task}/{i}" for i in range(size)], result=result)
            os.write(pipe, f"={task}/{size}\n".encode())
        else:
            with budget.batch(size + 1) as batch:
                for _ in range(size):
                    number += 1
                    task = f"{name}-{number}"
                    os.write(pipe, f"+{task}/1\n".encode())
                    batch.record(task_ids=[f"{task}/0"])
                    os.write(pipe, f"={task}/1\n".encode())


def hold(path: str, tasks: int) -> None:
    """Reserve, print whether it was allowed, and wait to be killed."""
    budget = TaskBudget(per_day=QUOTA, concurrency=tasks, store=path, batch_ttl=TTL)
    print(json.dumps(budget.check_all_limits(tasks).allowed), flush=True)  # noqa: T201 - the result of the program
    signal.pause()


def hold_shared(path: str, tasks: int, recorded: int, number: int) -> None:
    """Reserve a batch in a shared store, record some of its tasks, and end the batch when a signal arrives."""
    ended = ThreadSignal()  # a signal handler that sets a threading.Event may wait forever
    signal.signal(signal.SIGUSR1, lambda *_: ended.set())
    budget = TaskBudget(**SHARED_TIERS, store=path, name=f"shared-{number}", batch_ttl=TTL, deadline=5.0)
    with budget.batch(tasks) as batch:
        for _ in range(recorded):
            batch.record(1)
        print("reserved", flush=True)  # noqa: T201 - the result of the program
        while not ended.wait(0.05):  # `pause` would miss a signal that another thread receives
            pass
    budget.close()


def fork(path: str, tasks: int) -> None:
    """Reserve, fork, reserve in the child, and exit without settling; the child runs until it is killed."""
    budget = open_budget(path)
    budget.check_all_limits(tasks)
    if child := os.fork():
        print(json.dumps(child), flush=True)  # noqa: T201 - the result of the program
        os._exit(0)
    budget.check_all_limits(1)
    os.write(1, b"reserved\n")
    signal.pause()


def spend(path: str, quota: int, size: int) -> None:
    """Process batches until a tier denies one; print the number of tasks."""
    budget = open_budget(path, quota)
    count = 0
    while budget.check_all_limits(size):
        budget.record_completed_tasks(size)
        count += size
    budget.close()
    print(json.dumps(count))  # noqa: T201 - the result of the program


if __name__ == "__main__":
    open_values.LEASE_SECONDS = SHORT_LEASE
    name, path, *numbers = sys.argv[1:]
    programs: dict[str, Callable[..., None]] = {
        "kill_workers": kill_workers,
        "hold": hold,
        "hold_shared": hold_shared,
        "fork": fork,
        "spend": spend,
    }
    programs[name](path, *map(int, numbers))
