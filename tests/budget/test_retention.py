"""Completions are kept for 35 days; the size of the file stays bounded."""

import os
import sqlite3
from contextlib import closing

import pytest

from tests.budget.both_kinds import START, used
from tidegate.budget import TaskBudget
from tidegate.budget._storage.sqlite import MAX_REMOVED_PER_TRANSACTION
from tidegate.testing import ManualClock

DAY = 86_400
YEAR = 365


def rows(path, sql):
    with closing(sqlite3.connect(path)) as db:
        return db.execute(sql).fetchall()


def size(path):
    """Return the bytes in use, and the size of the file."""
    with closing(sqlite3.connect(path)) as db:
        pages, free, each = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in (
            "page_count", "freelist_count", "page_size"))  # fmt: skip
    return (pages - free) * each, pages * each


def test_completions_are_kept_for_35_days(open_budget, path, clock):
    budget = open_budget(per_month=1000)
    budget.record_completed_tasks(task_ids=["old"])
    clock.advance(35 * DAY)
    budget.record_completed_tasks(task_ids=["new"])
    assert rows(path, "SELECT task_id FROM task_completions") == [("old",), ("new",)]
    clock.advance(1)
    assert budget.reset_expired_windows() == 1
    assert rows(path, "SELECT task_id FROM task_completions") == [("new",)]
    assert budget.reset_expired_windows() == 0


def test_the_daily_removal_takes_a_few_rows_in_each_write(open_budget, path, clock):
    budget = open_budget(per_month=100_000)
    budget.record_completed_tasks(task_ids=[str(number) for number in range(5 * MAX_REMOVED_PER_TRANSACTION)])
    clock.advance(36 * DAY)
    left = [len(rows(path, "SELECT 1 FROM budget_completion"))]
    while left[-1] > len(left) - 1:
        budget.record_completed_tasks(1)
        left.append(len(rows(path, "SELECT 1 FROM budget_completion")))
        assert left[-2] - left[-1] <= MAX_REMOVED_PER_TRANSACTION
    assert len(left) == 6
    clock.advance(DAY / 2)
    budget.record_completed_tasks(1)
    assert len(rows(path, "SELECT 1 FROM budget_completion")) == left[-1] + 1  # once a day


def test_cleaning_up_uses_small_transactions(open_budget, clock):
    budget = open_budget(per_month=100_000)
    budget.record_completed_tasks(task_ids=[str(number) for number in range(5 * MAX_REMOVED_PER_TRANSACTION)])
    for _ in range(40):
        budget.check_all_limits(1)
    clock.advance(36 * DAY)
    before = budget.operations.store.metrics()["transactions"]
    assert budget.reset_expired_windows() == 5 * MAX_REMOVED_PER_TRANSACTION + 40
    after = budget.operations.store.metrics()["transactions"]
    assert after == before + 40 + 1 + 6, "each expired batch, a search for others, and the last finds nothing"


@pytest.mark.slow
def test_the_file_stays_small_in_a_year_of_100_000_tasks_a_month(path):
    """In large batches, one in ten with task IDs; TIDEGATE_YEAR_BATCH=20 uses a realistic size."""
    batch = int(os.environ.get("TIDEGATE_YEAR_BATCH", "800"))
    clock = ManualClock(start=START)
    tiers = {"per_minute": 5000, "per_hour": 5000, "per_day": 5000, "per_week": 30_000, "per_month": 110_000}
    a_day = 100_000 // 30 // batch
    sizes = []
    with TaskBudget(**tiers, store=path, clock=clock) as budget:
        for day in range(YEAR):
            for number in range(a_day):
                assert budget.check_all_limits(batch)
                with_ids = (day * a_day + number) % 10 == 0
                ids = [f"{day}-{number}-{i}" for i in range(batch)] if with_ids else None
                budget.record_completed_tasks(batch, task_ids=ids)
                clock.advance(DAY / a_day)
            if day in (80, YEAR - 1):
                sizes.append(size(path))
        # The first batch of the last 30 days has just expired.
        assert used(budget)["month"] == (30 * a_day - 1) * batch
        budget.reset_expired_windows()
    ((oldest, count),) = rows(path, "SELECT min(completed), sum(tasks) FROM budget_completion")
    now = clock.ns() // 1000
    assert now - oldest <= 35 * DAY * 1_000_000
    assert count == 35 * a_day * batch
    (early, early_file), (late, late_file) = sizes
    assert late <= 1.1 * early
    assert late_file <= 1.1 * early_file
    assert late_file < 20_000_000
