"""Processes that share a budget, and are killed: no completed task is forgotten, none counts twice."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter

from tests.budget import programs
from tests.budget.faces import used
from tests.budget.waiting import until
from tidegate.budget import TaskBudget

TIERS = ("hour", "day", "week", "month")


def start(*arguments):
    command = [sys.executable, "-W", "ignore::DeprecationWarning", programs.__file__, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish(*processes):
    answers = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return [json.loads(answer) for answer in answers]


def query(path, sql):
    db = sqlite3.connect(path)
    try:
        return db.execute(sql).fetchall()
    finally:
        db.close()


def expand(words):
    """The names of the tasks that a word such as 12a-3/2 stands for."""
    return [f"{word.rpartition('/')[0]}/{i}" for word in words for i in range(int(word.rpartition("/")[2]))]


def test_two_hundred_kills_of_two_processes(path):
    kills = 200
    (said,) = finish(start("be_killed", path, kills, 11))
    begun, done = expand(said["begun"]), expand(said["done"])
    completed = [name for (name,) in query(path, "SELECT task_id FROM task_completions")]
    assert len(done) > kills  # they came to do something
    assert Counter(completed).most_common(1)[0][1] == 1
    assert set(done) <= set(completed) <= set(begun)
    # Of each kill, at most the one record that was under way is not known to its caller.
    unsure = {name.rpartition("-")[0] for name in completed} & {
        name.rpartition("-")[0] for name in set(completed) - set(done)
    }
    assert len(unsure) <= kills
    # What the killed had reserved is given back as soon as somebody looks: exactly the completed tasks are counted.
    with programs.open_budget(path) as budget:
        usage = used(budget)
    assert {tier: usage[tier] - len(completed) for tier in TIERS} == dict.fromkeys(TIERS, 0)
    assert query(path, "SELECT count(*) FROM budget_open") == [(0,)]
    assert query(path, "PRAGMA integrity_check") == [("ok",)]
    with programs.open_budget(path) as budget:
        assert budget.check_all_limits(1)
        assert len(list(path.parent.glob("*-owner-*"))) == 1
    assert list(path.parent.glob("*-owner-*")) == []


def test_what_a_killed_process_held_is_free_at_once(path):
    holder = start("hold", path, 5)
    assert holder.stdout.readline() == "true\n"
    with TaskBudget(per_day=programs.QUOTA, concurrency=5, storage=path) as budget:
        refused = budget.check_all_limits(1)
        assert (refused.tier, refused.current_usage) == ("concurrency", {"day": 5, "concurrency": 5})
        holder.kill()
        holder.communicate()
        assert budget.check_all_limits(5).current_usage == {"day": 5, "concurrency": 5}


def test_a_forked_process_owns_only_what_it_reserved_itself(path):
    parent = start("fork", path, 7)
    said = [parent.stdout.readline() for _ in range(2)]  # in either order
    child = next(int(line) for line in said if line.strip().isdecimal())
    try:
        parent.wait()
        with programs.open_budget(path) as budget:
            assert used(budget)["day"] == 1  # the parent has ended, its child has not
    finally:
        os.kill(child, signal.SIGKILL)
    parent.stdout.read()  # until the child, too, has closed it
    parent.stdout.close()
    with programs.open_budget(path) as budget:
        until(lambda: used(budget)["day"] == 0, "the child has ended, too")


def test_two_processes_spend_exactly_the_quota(path):
    counts = finish(start("spend", path, 301, 1), start("spend", path, 301, 3))
    assert sum(counts) in (299, 300, 301)  # the larger batches leave a rest that the smaller ones may have missed
    with programs.open_budget(path, 301) as budget:
        assert used(budget)["day"] == sum(counts)
