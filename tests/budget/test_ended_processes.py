"""A batch in Redis or PostgreSQL whose process was killed is returned once, and that of a living process never."""

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count

import pytest

from tests.budget import programs
from tests.budget.both_kinds import KINDS, BlockingBudget, used
from tests.budget.polling import wait_until
from tests.budget.test_processes import start
from tests.budget.test_shared import redis_url
from tests.servers.valkey import ValkeyServer
from tidegate.budget import TaskBudget
from tidegate.budget._storage import open_values
from tidegate.stores import SQLiteStore

pytestmark = pytest.mark.once("redis")

__all__ = ["redis_url"]  # fixtures

NUMBERS = count()  # one for each test: the name of its budget


@pytest.fixture(params=["redis", "postgresql"])
def storage(request):
    return request.getfixturevalue("redis_url" if request.param == "redis" else "postgres_url")


@pytest.fixture
def number():
    return next(NUMBERS)


@pytest.fixture
def holder(storage, number):
    """A process inside a batch of 10 tasks, of which 3 are recorded; it is killed at the end of the test."""
    process = start("hold_shared", storage, 10, 3, number)
    assert process.stdout.readline() == "reserved\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture
def open_budget(storage, number, holder):
    """Open budgets that share the storage of the holder; they are closed at the end of the test."""
    with ExitStack() as opened:

        def open_one():
            name = f"shared-{number}"
            return opened.enter_context(TaskBudget(**programs.SHARED_TIERS, store=storage, name=name, deadline=5.0))

        yield open_one


def reserved(budget):
    return used(budget)["concurrency"]


def test_the_rest_of_a_killed_batch_is_usable_after_the_lease(open_budget, holder):
    budget = open_budget()
    assert used(budget) == {"hour": 10, "day": 10, "concurrency": 10}
    holder.kill()
    wait_until(lambda: reserved(budget) == 0, "the batch is returned")
    assert used(budget) == {"hour": 3, "day": 3, "concurrency": 0}  # three tasks were completed


def test_a_denied_check_returns_a_killed_batch(open_budget, holder):
    budget = open_budget()
    assert not budget.check_all_limits(97)
    holder.kill()
    wait_until(lambda: budget.check_all_limits(97), "a check uses the permits of the batch")


def test_the_batch_of_a_living_process_is_never_returned(open_budget):
    budget, other = open_budget(), open_budget()
    with budget.batch(5):
        began = other.operations.clock.steady()
        while other.operations.clock.steady() - began < 2_200_000 * programs.SHORT_LEASE:
            assert used(other) == {"hour": 15, "day": 15, "concurrency": 15}  # searches for ended processes, too
    assert used(other) == {"hour": 15, "day": 15, "concurrency": 10}


def test_a_killed_batch_is_returned_once_by_racing_processes(open_budget, holder):
    budgets = [open_budget() for _ in range(4)]
    budgets[0].record_completed_tasks(20)  # a second refund would return these, too
    holder.kill()
    barrier = threading.Barrier(len(budgets))

    def search(budget):
        barrier.wait()
        wait_until(lambda: reserved(budget) == 0, "the batch is returned")
        return used(budget)["day"]

    with ThreadPoolExecutor(len(budgets)) as threads:
        assert list(threads.map(search, budgets)) == [23] * len(budgets)


def test_a_suspended_process_that_was_taken_for_ended_returns_nothing_twice(open_budget, holder):
    budget = open_budget()
    budget.record_completed_tasks(20)  # a second refund would return these, too
    os.kill(holder.pid, signal.SIGSTOP)
    wait_until(lambda: reserved(budget) == 0, "the batch is returned")
    assert used(budget)["day"] == 23
    os.kill(holder.pid, signal.SIGCONT)
    os.kill(holder.pid, signal.SIGUSR1)
    assert holder.wait() == 0
    assert used(budget) == {"hour": 23, "day": 23, "concurrency": 0}


@pytest.mark.parametrize("kind", ["threads", "tasks"])
def test_a_batch_that_others_returned_is_charged_when_it_is_recorded(storage, monkeypatch, kind):
    """The first budget misses its renewals: its thread waits for longer than the lease that it wrote."""
    options = {"per_day": 100, "store": storage, "deadline": 5.0, "name": f"late-{kind}"}
    monkeypatch.setattr(open_values, "LEASE_SECONDS", 0.05)
    monkeypatch.setattr(open_values, "RENEWALS_PER_LEASE", 0.0001)
    with asyncio.Runner() as runner:
        late = TaskBudget(**options) if kind == "threads" else BlockingBudget(runner, lambda: KINDS[kind](**options))
        result = late.check_all_limits(10)
        with TaskBudget(**options) as other:
            wait_until(lambda: used(other)["day"] == 0, "the batch is returned")
            late.record_completed_tasks(4, result=result)
            assert used(other)["day"] == 4
        late.close()


def test_many_batches_of_several_threads_are_settled(storage):
    options = {"per_day": 1000, "store": storage, "deadline": 5.0, "name": "many"}
    with TaskBudget(**options) as budget, ThreadPoolExecutor(8) as threads:
        results = list(threads.map(budget.check_all_limits, [1 + number % 3 for number in range(90)]))
        assert all(result.allowed and not result.local for result in results)
        list(threads.map(lambda result: budget.record_completed_tasks(result.task_count, result=result), results[:45]))
        results += threads.map(budget.check_all_limits, [2] * 30)
        assert used(budget) == {"day": 240}
        with TaskBudget(**options) as other:
            assert used(other) == {"day": 240}
        for result in results[45:]:
            budget.record_completed_tasks(1, result=result)
        assert used(budget) == {"day": 90 + 75}


def test_a_cluster_returns_batches(monkeypatch):
    """The batches are values in the slot of the budget's key."""
    monkeypatch.setattr(open_values, "LEASE_SECONDS", 0.05)
    monkeypatch.setattr(open_values, "RENEWALS_PER_LEASE", 0.0001)
    with ValkeyServer(None, "--cluster-enabled", "yes") as server:
        assert server.ask("CLUSTER", "ADDSLOTSRANGE", "0", "16383").startswith(b"+OK")
        url = f"redis+cluster://127.0.0.1:{server.port}?deadline=5"
        wait_until(lambda: b"cluster_state:ok" in server.ask("CLUSTER", "INFO"), "the cluster is ready")
        with TaskBudget(per_day=10, store=url) as ended, TaskBudget(per_day=10, store=url) as budget:
            assert ended.check_all_limits(2).local is False
            wait_until(lambda: used(budget) == {"day": 0}, "the batch is returned")


def test_a_batch_that_begins_while_another_process_looks_for_ended_ones_is_kept(tmp_path, monkeypatch):
    """The other process stores its batch and its owner in one step, between the two looks."""
    with ExitStack() as opened:
        one, other = (opened.enter_context(TaskBudget(per_hour=100, store=tmp_path / "tasks.db")) for _ in range(2))
        assert one.check_all_limits(1)
        looks = []
        list_values = SQLiteStore.list_values

        def look(store, *arguments):
            found = list_values(store, *arguments)
            looks.append(found)
            if len(looks) == 1:
                assert other.check_all_limits(10)
            return found

        monkeypatch.setattr(SQLiteStore, "list_values", look)
        one.reset_expired_windows()
        assert looks
        assert used(one)["hour"] == 11
