"""Many threads and tasks use one budget."""

import asyncio
import json
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from tests.budget.both_kinds import used
from tests.budget.programs import OPEN
from tidegate.budget import AsyncTaskBudget, TaskBudget


def rows(path, sql):
    with closing(sqlite3.connect(path)) as db:
        return db.execute(sql).fetchall()


def test_threads_are_admitted_exactly_the_quota(path):
    with TaskBudget(per_hour=100, per_day=300, store=path) as budget:

        def work(number):
            done = 0
            for _ in range(40):
                result = budget.check_all_limits(2)
                if result:
                    budget.record_completed_tasks(2 - number % 2, result=result)
                    done += 2 - number % 2
            return done

        with ThreadPoolExecutor(8) as pool:
            done = sum(pool.map(work, range(8)))
        assert used(budget) == {"hour": done, "day": done}
        assert 90 <= done <= 100  # a check may be denied while other threads hold the last permits
        assert budget.operations.monitor.recorded == done
    assert rows(path, "SELECT count(*) FROM task_completions") == [(done,)]
    assert rows(path, OPEN) == []


@pytest.mark.usefixtures("switching")
def test_threads_record_tasks_of_one_batch(path):
    with TaskBudget(per_hour=5000, costs={"tokens": {"hour": 500_000}}, store=path) as budget:
        with budget.batch(1600, cost={"tokens": 160_000}) as batch, ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda number: batch.record(task_ids=[str(number)], cost={"tokens": 90}), range(1500)))
            ((_, left),) = rows(path, OPEN)
            assert json.loads(left)[1] == {
                "hour": 100,
                "hour:tokens": 25000,
            }  # what would be returned if the process were killed now
        assert used(budget) == {"hour": 1500, "hour:tokens": 135_000}
    assert len(rows(path, "SELECT DISTINCT task_id FROM task_completions")) == 1500


async def test_a_cancelled_check_is_not_charged(path):
    async with AsyncTaskBudget(per_hour=1000, store=path) as budget:
        for pause in range(12):
            check = asyncio.create_task(budget.check_all_limits(10))
            for _ in range(pause):
                await asyncio.sleep(0)
            check.cancel()
            (result,) = await asyncio.gather(check, return_exceptions=True)
            if not isinstance(result, asyncio.CancelledError):
                await budget.cancel(result)
        usage = await budget.get_current_usage()
        while usage["hour"].used:  # the last check is being undone
            usage = await budget.get_current_usage()
        assert rows(path, OPEN) == []


async def test_a_record_goes_on_when_its_task_is_cancelled(path):
    async with AsyncTaskBudget(per_hour=1000, store=path) as budget:
        for pause in range(6):
            await budget.check_all_limits(10)
            record = asyncio.create_task(budget.record_completed_tasks(7))
            await asyncio.sleep(0)  # it starts
            for _ in range(pause):
                await asyncio.sleep(0)
            record.cancel()
            await asyncio.gather(record, return_exceptions=True)
        while rows(path, OPEN) != []:
            await asyncio.sleep(0)
        assert (await budget.get_current_usage())["hour"].used == 42


async def test_tasks_share_transactions(path):
    async with AsyncTaskBudget(per_hour=1000, store=path) as budget:

        async def work():
            result = await budget.check_all_limits(3)
            await budget.record_completed_tasks(2, result=result)

        await asyncio.gather(*(work() for _ in range(50)))
        assert (await budget.get_current_usage())["hour"].used == 100


async def test_batches_of_one_instant_are_told_apart(path, clock):
    """Checks that wait at the same time are decided in one transaction, at one instant."""
    async with AsyncTaskBudget(per_day=1000, store=path, clock=clock) as budget:
        sizes = [1, 2, 3, 4, 5] * 4
        results = await asyncio.gather(*(budget.check_all_limits(size) for size in sizes))
        blocks = [budget.batch(size) for size in sizes]
        await asyncio.gather(*(block.__aenter__() for block in blocks))
        await blocks[0].record(1)  # all of it
        await blocks[1].record(1)
        await asyncio.gather(*(block.__aexit__(None, None, None) for block in blocks[:10]))
        for result in results[::2]:
            await budget.cancel(result)
        assert len(rows(path, OPEN)) == 20
        expected = sum(sizes[1::2]) + 1 + 1 + sum(sizes[2:10]) + sum(sizes[10:])
        assert (await budget.get_current_usage())["day"].used == expected
        clock.advance(3600)
        assert (await budget.get_current_usage())["day"].used == 1 + 1 + sum(sizes[2:10])


@pytest.mark.parametrize("scale", ["20%", "300%"])
def test_a_schedule_changes_concurrency(open_budget, path, scale):
    budget = open_budget({
        "tiers": {"day": 100},
        "concurrency": 5,
        "reserved": {"1": "50%"},
        "schedule": [{"load_above": 0.5, "scale": scale}],
        "store": str(path),
    }, load=lambda: 1.0)  # fmt: skip
    result = budget.check_all_limits(10)
    assert result.current_usage["concurrency"] == (1 if scale == "20%" else 10)
