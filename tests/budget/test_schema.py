"""The tables of budgets in an SQLite file: created by a budget only, and compatible with files of other versions."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.budget.both_kinds import START, used
from tidegate import Limiter
from tidegate.budget import TaskBudget
from tidegate.budget.storage import sqlite
from tidegate.stores.sqlite import SQLiteStore
from tidegate.stores.sqlite.database import SCHEMA_VERSION, Migration, read_migrations
from tidegate.testing import ManualClock

VERSION_3 = Path(__file__).with_name("schema_3.sql")
TIERS = {"per_minute": 20, "per_day": 500}


class EarlierStore(SQLiteStore):
    """Migrates as earlier versions did: every file gets all migrations, by their numbers."""

    def _migrations(self):
        budgets = read_migrations(sqlite.__package__)
        return [*super()._migrations(), *(Migration(number, script) for number, script, _ in budgets)]


@pytest.fixture
def version_3(path):
    """Create a file of an earlier version of tidegate."""
    with closing(sqlite3.connect(path)) as db:
        db.executescript(VERSION_3.read_text(encoding="utf-8"))
    return path


def read(path, sql):
    with closing(sqlite3.connect(path)) as db:
        return db.execute(sql).fetchall()


def version(path):
    return read(path, "PRAGMA user_version")[0][0]


def tables(path):
    """Return the tables and indexes of a file, with their definitions."""
    return read(path, "SELECT type, name, sql FROM sqlite_master WHERE type <> 'view' ORDER BY type, name")


def count_call(path, clock):
    """Charge a key of an ordinary policy in the file, and return what remains."""
    with Limiter("5/1h sliding_log", store=SQLiteStore(path), clock=clock) as limiter:
        return limiter.try_acquire("k").remaining


def use_budget(path, clock):
    """Record a task in the file, and return the usage."""
    with TaskBudget(**TIERS, storage=path, clock=clock) as budget:
        assert budget.check_all_limits(2)
        budget.record_completed_tasks(1)
        return used(budget)


def test_the_number_of_the_migration_is_the_schema_version():
    numbers = [migration.number for migration in read_migrations(sqlite.__package__)]
    assert set(numbers) == {SCHEMA_VERSION} == {3}


def test_only_a_budget_creates_its_tables(path, clock):
    count_call(path, clock)
    assert version(path) == 2
    assert read(path, "SELECT name FROM sqlite_master WHERE name LIKE 'budget%'") == []
    assert use_budget(path, clock) == {"minute": 1, "day": 1}
    assert version(path) == 3
    assert count_call(path, clock) == 3
    assert use_budget(path, clock) == {"minute": 2, "day": 2}


def test_a_file_of_an_earlier_version_gets_views_and_the_table_of_values(version_3, clock):
    before = tables(version_3)
    assert count_call(version_3, clock) == 2
    assert use_budget(version_3, clock) == {"minute": 4, "day": 4}
    assert read(version_3, "SELECT task_id FROM task_completions WHERE task_id IS NOT NULL") == [("a",), ("b",)]
    assert [name for _, name, _ in tables(version_3) if name not in {name for _, name, _ in before}] == [
        "value_ends",
        "value",
    ]
    assert set(before) <= set(tables(version_3))
    assert version(version_3) == 3


@pytest.mark.parametrize("first", [count_call, use_budget])
def test_an_earlier_version_reads_files_of_this_one(path, first):
    clock = ManualClock(start=START)
    first(path, clock)
    with Limiter("5/1h sliding_log", store=EarlierStore(path), clock=clock) as limiter:
        assert limiter.try_acquire("k")
    assert version(path) == 3
    assert read(path, "SELECT count(*) FROM budget_open") == [(0,)]
    assert use_budget(path, clock)["day"] == (1 if first is count_call else 2)
