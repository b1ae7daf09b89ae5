"""The tables of budgets in an SQLite file: created by a budget only, and shared with other users of the file."""

import sqlite3
from contextlib import closing

import pytest

from tests.budget.both_kinds import used
from tidegate import Limiter
from tidegate.budget import TaskBudget
from tidegate.stores._sqlite import SQLiteStore
from tidegate.stores._sqlite.database import SCHEMA_VERSION

TIERS = {"per_minute": 20, "per_day": 500}


def read(path, sql):
    with closing(sqlite3.connect(path)) as db:
        return db.execute(sql).fetchall()


def count_call(path, clock):
    """Charge a key of an ordinary policy in the file, and return what remains."""
    with Limiter("5/1h sliding_log", store=SQLiteStore(path), clock=clock) as limiter:
        return limiter.try_acquire("k").remaining


def use_budget(path, clock):
    """Record a task in the file, and return the usage."""
    with TaskBudget(**TIERS, store=path, clock=clock) as budget:
        assert budget.check_all_limits(2)
        budget.record_completed_tasks(1)
        return used(budget)


@pytest.mark.parametrize("first", [count_call, use_budget])
def test_only_a_budget_creates_its_tables(path, clock, first):
    first(path, clock)
    names = [
        name for (name,) in read(path, "SELECT name FROM sqlite_master WHERE name LIKE 'budget_%' AND type = 'table'")
    ]
    assert sorted(names) == ([] if first is count_call else ["budget_completion"])
    tasks = 0 if first is count_call else 1
    assert use_budget(path, clock) == {"minute": tasks + 1, "day": tasks + 1}
    assert count_call(path, clock) == (3 if first is count_call else 4)
    assert use_budget(path, clock)["day"] == tasks + 2
    assert read(path, "PRAGMA user_version") == [(SCHEMA_VERSION,)]
