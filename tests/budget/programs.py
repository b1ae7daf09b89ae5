"""Programs that tests start as processes of their own: python programs.py NAME PATH [numbers]."""

import json
import os
import random
import signal
import sys
from collections.abc import Callable

from tidegate.budget import TaskBudget

QUOTA = 100_000
TTL = 3600.0  # longer than the test: only the death of its process gives a batch back


def open_budget(path, quota=QUOTA, **options):
    tiers = {f"per_{period}": quota for period in ("minute", "hour", "day", "week", "month")}
    return TaskBudget(**tiers, storage=path, batch_ttl=TTL, deadline=60.0, **options)


def be_killed(path: str, kills: int, seed: int) -> None:
    """Kill workers, two at a time, at random moments; print what they said of their tasks."""
    draw = random.Random(seed)
    said: list[str] = []
    for number in range(kills // 2):
        pipes = []
        for side in "ab":
            mine, theirs = os.pipe()
            child = os.fork()
            if not child:
                work_until_killed(path, theirs, f"{number}{side}")
            os.close(theirs)
            pipes.append((child, mine))
        for child, mine in pipes:
            said.append(read_some(mine, draw.randrange(12)))
            os.kill(child, signal.SIGKILL)
        for child, mine in pipes:
            while told := os.read(mine, 65_536):
                said.append(told.decode())
            os.close(mine)
            os.waitpid(child, 0)
    words = "".join(said).split()
    begun = [word[1:] for word in words if word[0] == "+"]
    done = [word[1:] for word in words if word[0] == "="]
    print(json.dumps({"begun": begun, "done": done}))  # noqa: T201 - how it answers


def read_some(pipe: int, words: int) -> str:
    """Read until the worker has said so many words, so that it is killed in the middle of something."""
    text = ""
    while text.count("\n") < words:
        told = os.read(pipe, 1)
        if not told:
            break
        text += told.decode()
    return text


def work_until_killed(path: str, pipe: int, name: str) -> None:
    """Check, process and record batches; say which tasks are about to be recorded (+), and which are (=)."""
    budget = open_budget(path)
    draw = random.Random(name)
    number = 0
    while True:
        size = draw.randrange(1, 4)
        if draw.random() < 0.5:
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
    """Reserve, say so, and wait to be killed."""
    budget = TaskBudget(per_day=QUOTA, concurrency=tasks, storage=path, batch_ttl=TTL)
    print(json.dumps(budget.check_all_limits(tasks).allowed), flush=True)  # noqa: T201 - how it answers
    signal.pause()


def fork(path: str, tasks: int) -> None:
    """Reserve, fork, reserve in the child, and end without settling; the child stays until it is killed."""
    budget = open_budget(path)
    budget.check_all_limits(tasks)
    if child := os.fork():
        print(json.dumps(child), flush=True)  # noqa: T201 - how it answers
        os._exit(0)
    budget.check_all_limits(1)
    os.write(1, b"reserved\n")
    signal.pause()


def spend(path: str, quota: int, size: int) -> None:
    """Process batches until a tier says no; print how many tasks that were."""
    budget = open_budget(path, quota)
    count = 0
    while budget.check_all_limits(size):
        budget.record_completed_tasks(size)
        count += size
    budget.close()
    print(json.dumps(count))  # noqa: T201 - how it answers


if __name__ == "__main__":
    name, path, *numbers = sys.argv[1:]
    programs: dict[str, Callable[..., None]] = {"be_killed": be_killed, "hold": hold, "fork": fork, "spend": spend}
    programs[name](path, *map(int, numbers))
