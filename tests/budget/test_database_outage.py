"""The database becomes unavailable and available again: which limits are enforced, and what is charged later."""

import sqlite3
from contextlib import closing, contextmanager

import pytest

from tests.budget.both_kinds import used
from tests.budget.polling import wait_until


@contextmanager
def locked(path):
    """Lock the file from another connection."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=60)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def completions(path):
    with closing(sqlite3.connect(path)) as db:
        return db.execute("SELECT completed_at, task_id FROM task_completions").fetchall()


def wait_for_database(budget):
    wait_until(lambda: not budget.lost and not budget.backlog, "the budget caught up")


def test_only_short_term_limits_stay_in_force(open_budget, path):
    budget = open_budget(per_minute=10, per_hour=20, per_day=5, deadline=0.3)
    budget.check_all_limits(4)
    budget.record_completed_tasks(4)
    with locked(path):
        allowed = budget.check_all_limits(6)  # beyond the limit per day, which is not checked
        assert (allowed.allowed, allowed.local) == (True, True)
        denied = budget.check_all_limits(1)
        assert (denied.tier, denied.wait, denied.local) == ("minute", 60.0, True)
        assert used(budget) == {"minute": 10, "hour": 10, "day": 4}  # the last known usage of the day
        budget.cancel(allowed)
        assert budget.check_all_limits(6)


@pytest.mark.parametrize(
    ("mode", "description"),
    [
        ("short-term", "only the limits per minute and hour, and concurrency, are enforced, in memory; reason: "),
        ("deny", "every check is denied; reason: "),
        ("local", "this process uses its local share of the limits; reason: "),
    ],
)
def test_one_log_line_says_what_holds_while_the_database_is_lost(open_budget, path, caplog, mode, description):
    budget = open_budget(per_minute=10, per_day=50, deadline=0.3, on_store_error=mode)
    budget.check_all_limits(1)
    caplog.clear()
    with locked(path):
        budget.check_all_limits(1)
        budget.check_all_limits(1)
        budget.get_current_usage()
        (line,) = [record.getMessage() for record in caplog.records if record.levelname != "INFO"]
    assert line.startswith(f"the database is unavailable: until it is available again, {description}")
    assert "another connection kept the file locked" in line
    wait_until(lambda: any("the database is available again" in each for each in caplog.messages), "the end is logged")
    (line, again) = [record.getMessage() for record in caplog.records if record.levelno >= 30]
    assert again.startswith("the database is available again")


def test_tasks_recorded_meanwhile_are_sent_to_the_database_later(open_budget, path, clock):
    budget = open_budget(per_minute=10, per_day=50, deadline=0.3)
    reserved = budget.check_all_limits(3)
    with locked(path):
        admitted = budget.check_all_limits(4)
        assert admitted.local
        budget.record_completed_tasks(task_ids=["a", "b"], result=reserved)
        clock.advance(5)
        budget.record_completed_tasks(task_ids=["c", "d", "e", "f"], result=admitted)
        budget.record_completed_tasks(1)
        with budget.batch(2) as batch:
            batch.record(task_ids=["g"])
        health = budget.health()
        assert (health["status"], health["database"]["connected"]) == ("degraded", False)
        assert health["database"]["waiting"] == budget.backlog == 4
        clock.advance(600)
    wait_for_database(budget)  # without a call of the budget
    assert used(budget) == {"minute": 0, "day": 8}  # as of when they were completed
    assert budget.health()["status"] == "ok"
    assert completions(path) == [
        ("2025-06-15 15:06:40.000000Z", "a"),
        ("2025-06-15 15:06:40.000000Z", "b"),
        *(("2025-06-15 15:06:45.000000Z", name) for name in ("c", "d", "e", "f", None, "g")),
    ]


def test_tasks_that_failed_meanwhile_are_returned(open_budget, path):
    budget = open_budget(per_day=50, deadline=0.3)
    reserved = budget.check_all_limits(10)
    with locked(path):
        budget.cancel(reserved)
        with pytest.raises(ZeroDivisionError), budget.batch(5):
            raise ZeroDivisionError
    wait_for_database(budget)
    assert used(budget) == {"day": 0}


def test_a_budget_can_be_opened_while_the_database_is_lost(open_budget, path):
    path.touch()
    with locked(path):
        budget = open_budget(per_minute=5, per_day=100, deadline=0.3)
        assert budget.check_all_limits(5).local
        assert not budget.check_all_limits(1)
        budget.record_completed_tasks(5)
    wait_for_database(budget)
    assert used(budget) == {"minute": 5, "day": 5}


def test_checks_are_denied_if_configured(open_budget, path):
    budget = open_budget(per_minute=5, deadline=0.3, on_store_error="deny")
    assert budget.check_all_limits(1)
    with locked(path):
        denied = budget.check_all_limits(1)
        assert (denied.allowed, denied.local, denied.tier, denied.exceeded) == (False, True, None, ())
        assert denied.wait <= 2
        assert "the database is unavailable: 1 task must wait" in denied.reason
        assert budget.operations.monitor.exceeded == {}
    wait_until(lambda: budget.check_all_limits(1), "checks are allowed again")


def test_the_local_share_decides_if_configured(open_budget, path):
    """This process is the only one: its share is the limit. What it admits is charged when the database is back."""
    budget = open_budget(per_minute=100, deadline=0.3, on_store_error="local")
    result = budget.check_all_limits(10)
    wait_until(lambda: budget.operations.store.metrics()["share_ppm"] == 10**6, "the share is known")
    with locked(path):
        admitted = [budget.check_all_limits(30) for _ in range(5)]
        assert 1 <= sum(each.allowed for each in admitted) <= 3
        for each in admitted:
            if each.allowed:
                budget.cancel(each)
        budget.record_completed_tasks(9, result=result)
    wait_for_database(budget)
    wait_until(lambda: used(budget) == {"minute": 9}, "the record is settled")


def test_queued_records_are_added_up_when_there_are_many(open_budget, path, monkeypatch):
    monkeypatch.setattr("tidegate.budget._storage.retry_queue.MAX_QUEUED", 3)
    budget = open_budget(per_day=500, deadline=0.3)
    budget.check_all_limits(1)
    with locked(path):
        budget.check_all_limits(1)
        for number in range(10):
            budget.record_completed_tasks(task_ids=[str(number)])
        assert budget.backlog == 3
    wait_for_database(budget)
    assert used(budget) == {"day": 10}
    assert len(completions(path)) == 10


def test_closing_ends_while_the_database_is_lost(open_budget, path):
    budget = open_budget(per_day=500, deadline=0.3)
    budget.check_all_limits(5)
    with locked(path):
        budget.check_all_limits(5)
        budget.close()
