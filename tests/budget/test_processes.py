"""Processes that share a budget and are killed: no completed task is lost or counted twice."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter

import pytest

from tests.budget import programs
from tests.budget.both_kinds import used
from tests.budget.polling import wait_until
from tidegate.budget import TaskBudget

TIERS = ("hour", "day", "week", "month")


def start(*arguments):
    command = [sys.executable, "-W", "ignore::DeprecationWarning", programs.__file__, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish(*processes):
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return [json.loads(output) for output in outputs]


def query(path, sql):
    db = sqlite3.connect(path)
    try:
        return db.execute(sql).fetchall()
    finally:
        db.close()


def task_ids(batches):
    """Return the IDs of the tasks of batches such as 12a-3/2."""
    return [f"{batch.rpartition('/')[0]}/{i}" for batch in batches for i in range(int(batch.rpartition("/")[2]))]


@pytest.mark.slow
def test_two_hundred_kills_lose_and_duplicate_no_task(path):
    kills = 200
    (reports,) = finish(start("kill_workers", path, kills, 11))
    started, done = task_ids(reports["started"]), task_ids(reports["done"])
    completed = [name for (name,) in query(path, "SELECT task_id FROM task_completions")]
    assert len(done) > kills  # the workers did some work
    assert Counter(completed).most_common(1)[0][1] == 1
    assert set(done) <= set(completed) <= set(started)
    # For each kill, at most the one record that was in progress is not known to its caller.
    unknown = {name.rpartition("-")[0] for name in completed} & {
        name.rpartition("-")[0] for name in set(completed) - set(done)
    }
    assert len(unknown) <= kills
    with programs.open_budget(path) as budget:
        wait_until(lambda: used(budget)["day"] == len(completed), "only completed tasks are counted, after the lease")
        usage = used(budget)
    assert {tier: usage[tier] - len(completed) for tier in TIERS} == dict.fromkeys(TIERS, 0)
    assert query(path, programs.OPEN) == []
    assert query(path, "PRAGMA integrity_check") == [("ok",)]
    with programs.open_budget(path) as budget:
        assert budget.check_all_limits(1)


def test_reservations_of_a_killed_process_are_returned_after_its_lease(path):
    holder = start("hold", path, 5)
    assert holder.stdout.readline() == "true\n"
    with TaskBudget(per_day=programs.QUOTA, concurrency=5, store=path) as budget:
        denied = budget.check_all_limits(1)
        assert (denied.tier, denied.current_usage) == ("concurrency", {"day": 5, "concurrency": 5})
        holder.kill()
        holder.communicate()
        wait_until(lambda: budget.check_all_limits(5), "a check uses the permits of the batch")
        assert used(budget) == {"day": 5, "concurrency": 5}


def test_a_forked_process_owns_only_its_own_reservations(path):
    parent = start("fork", path, 7)
    lines = [parent.stdout.readline() for _ in range(2)]  # in either order
    child = next(int(line) for line in lines if line.strip().isdecimal())
    try:
        parent.wait()
        with programs.open_budget(path) as budget:
            wait_until(lambda: used(budget)["day"] == 1, "the parent has ended, the child has not")
    finally:
        os.kill(child, signal.SIGKILL)
    parent.stdout.read()  # until the child has closed it, too
    parent.stdout.close()
    with programs.open_budget(path) as budget:
        wait_until(lambda: used(budget)["day"] == 0, "the batch of the child is returned")


def test_two_processes_spend_exactly_the_quota(path):
    counts = finish(start("spend", path, 301, 1), start("spend", path, 301, 3))
    assert sum(counts) in (299, 300, 301)  # a rest of up to 2 may be left for the larger batches
    with programs.open_budget(path, 301) as budget:
        assert used(budget)["day"] == sum(counts)
