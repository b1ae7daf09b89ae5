"""The view `rate_limits` of budgets: which budget a row belongs to, and the rows of idle budgets."""

import sqlite3
from contextlib import closing

from tidegate import Limiter
from tidegate.budget import TaskBudget
from tidegate.stores._sqlite import SQLiteStore
from tidegate.stores._sqlite.store import CALLS_BETWEEN_SWEEPS

MONTHS = 90 * 86_400


def read(path, columns="budget, time_period, current_count"):
    with closing(sqlite3.connect(path)) as db:
        return db.execute(f"SELECT {columns} FROM rate_limits").fetchall()  # noqa: S608 - constants of this file


def use_other_keys(store, clock):
    """Make enough calls for a sweep of expired rows."""
    with Limiter("1000000/1m fixed_window", name="other", store=store, clock=clock) as limiter:
        for _ in range(CALLS_BETWEEN_SWEEPS + 2):
            limiter.try_acquire("key")


def test_each_row_says_which_budget_it_belongs_to(path, clock):
    for name, tasks in (("embeddings", 2), ("chat: team <a>", 5)):
        with TaskBudget(per_minute=20, per_day=500, name=name, store=path, clock=clock) as budget:
            budget.record_completed_tasks(tasks)
    with Limiter("5/1m sliding_log", name="other", store=SQLiteStore(path), clock=clock) as limiter:
        limiter.try_acquire("k")
    assert sorted(read(path), key=str) == [
        ("chat: team <a>", "day", 5),
        ("chat: team <a>", "minute", 5),
        ("embeddings", "day", 2),
        ("embeddings", "minute", 2),
        (None, "minute", 1),
    ]


def test_the_rows_of_an_idle_budget_are_kept(path, clock):
    with TaskBudget(per_minute=20, per_month=7500, name="idle", store=path, clock=clock) as budget:
        budget.record_completed_tasks(3)
    before = read(path, "*")
    clock.advance(MONTHS)
    use_other_keys(SQLiteStore(path), clock)
    with TaskBudget(per_minute=20, name="busy", store=path, clock=clock) as budget:
        for _ in range(CALLS_BETWEEN_SWEEPS + 2):
            budget.record_completed_tasks(1)
    assert [row for row in read(path, "*") if row[-1] == "idle"] == before
    with TaskBudget(per_minute=20, per_month=7500, name="idle", store=path, clock=clock) as budget:
        assert budget.get_current_usage()["month"].used == 0


def test_the_row_of_a_file_of_an_earlier_version_is_kept_too(path, clock):
    with TaskBudget(per_minute=20, name="idle", store=path, clock=clock) as budget:
        budget.record_completed_tasks(3)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE state SET due = updated + 60000000")
    clock.advance(MONTHS)
    with TaskBudget(per_minute=20, name="busy", store=path, clock=clock) as budget:
        for _ in range(CALLS_BETWEEN_SWEEPS + 2):
            budget.record_completed_tasks(1)
    assert ("idle", "minute", 3) in read(path)


def test_a_tier_without_permits_has_a_row(path, clock):
    options = {"per_minute": 20, "per_day": 500, "costs": {"tokens": {"day": 1000}}}
    with TaskBudget(**options, store=path, clock=clock) as budget:
        budget.record_completed_tasks(1)
        assert sorted(read(path)) == [("tasks", "day", 1), ("tasks", "day:tokens", 0), ("tasks", "minute", 1)]


def test_a_budget_whose_tasks_were_all_returned_has_rows(path, clock):
    with TaskBudget(per_minute=20, per_day=500, reserved={1: 0.2}, store=path, clock=clock) as budget:
        budget.cancel(budget.check_all_limits(4))
        clock.advance(5)
        budget.cancel(budget.check_all_limits(4))
    assert read(path, "*") == [(tier, 0, *("2025-06-15 15:06:45.000000Z",) * 3, "tasks") for tier in ("minute", "day")]
