"""Check, record, return: what each operation does to the tiers."""

import sqlite3
from datetime import UTC, datetime, timedelta

import pytest

from tests.budget.both_kinds import START, used
from tests.cases import cases
from tidegate.budget import AsyncTaskBudget, TaskBudget, Usage
from tidegate.errors import Closed, ConfigError, Denied, RateLimitError

ALL = {"per_minute": 20, "per_hour": 100, "per_day": 500, "per_week": 2000, "per_month": 7500}
TIERS = ["minute", "hour", "day", "week", "month"]


def test_a_check_reserves_on_every_tier_and_returns_the_usage(open_budget):
    budget = open_budget(**ALL)
    result = budget.check_all_limits(5)
    assert result
    assert (result.allowed, result.tier, result.exceeded, result.wait) == (True, None, (), 0.0)
    assert result.current_usage == dict.fromkeys(TIERS, 5)
    assert result.limits == {"minute": 20, "hour": 100, "day": 500, "week": 2000, "month": 7500}
    assert result.remaining["minute"] == 15
    now = datetime.fromtimestamp(START, UTC)
    assert result.reset_times["minute"] == now + timedelta(minutes=1)
    assert result.reset_times["month"] == now + timedelta(days=30)
    assert used(budget) == dict.fromkeys(TIERS, 5)
    assert budget.get_current_usage()["day"] == Usage(500, 5, 495, 86_400.0, "tasks")


def test_two_batches_do_not_pass_the_same_check(open_budget):
    budget = open_budget(per_minute=20)
    assert budget.check_all_limits(12)
    denied = budget.check_all_limits(12)
    assert not denied
    assert (denied.tier, denied.wait, denied.current_usage) == ("minute", 60.0, {"minute": 12})


def test_a_refused_batch_is_charged_nowhere(open_budget):
    budget = open_budget(per_minute=5, per_hour=100)
    assert not budget.check_all_limits(6)
    assert used(budget) == {"minute": 0, "hour": 0}


def test_the_tier_with_the_longest_wait_is_named(open_budget, clock):
    budget = open_budget(per_minute=10, per_hour=10)
    budget.check_all_limits(10)
    clock.advance(30)
    denied = budget.check_all_limits(1)
    assert (denied.tier, denied.exceeded, denied.wait) == ("hour", ("minute", "hour"), 3570.0)
    assert "10 of 10 tasks per hour are used: 1 task must wait, try again in 3570.000 s" in denied.reason


def test_a_batch_that_never_fits_has_no_wait(open_budget):
    denied = open_budget(per_minute=5, per_day=100).check_all_limits(6)
    assert (denied.tier, denied.wait) == ("minute", None)
    assert denied.reason == "0 of 5 tasks per minute are used: 6 tasks are more than the limit can ever allow"


def test_recording_commits_completed_tasks_and_returns_the_others(open_budget):
    budget = open_budget(**ALL)
    budget.check_all_limits(5)
    budget.record_completed_tasks(3)
    assert used(budget) == dict.fromkeys(TIERS, 3)
    budget.check_all_limits(4)
    budget.cancel()
    assert used(budget) == dict.fromkeys(TIERS, 3)
    budget.check_all_limits(2)
    budget.record_completed_tasks(0)
    assert used(budget) == dict.fromkeys(TIERS, 3)


def test_tasks_recorded_one_by_one_are_all_counted(open_budget):
    budget = open_budget(per_day=100)
    budget.check_all_limits(3)
    for _ in range(3):
        budget.record_completed_tasks()
    assert used(budget) == {"day": 3}


def test_tasks_beyond_the_reservation_are_counted(open_budget):
    budget = open_budget(per_day=10)
    budget.check_all_limits(2)
    budget.record_completed_tasks(5)
    assert used(budget) == {"day": 5}
    budget.record_completed_tasks(20)  # not reserved, and beyond the quota: they were completed
    assert used(budget) == {"day": 25}
    assert not budget.check_all_limits(1)


def test_unreserved_tasks_expire_from_their_windows(open_budget, clock):
    budget = open_budget(per_minute=10)
    budget.record_completed_tasks(4)
    clock.advance(30)
    budget.record_completed_tasks(8)
    assert not budget.check_all_limits(1)
    clock.advance(30)
    assert used(budget) == {"minute": 8}
    assert budget.check_all_limits(2)


def test_the_batch_of_a_result_is_settled(open_budget):
    budget = open_budget(per_day=100)
    first, second = budget.check_all_limits(10), budget.check_all_limits(30)
    budget.record_completed_tasks(25, result=second)
    assert used(budget) == {"day": 35}
    budget.cancel(first)
    assert used(budget) == {"day": 25}


def test_the_batch_with_the_same_task_count_is_settled_first(open_budget):
    budget = open_budget(per_day=100)
    budget.check_all_limits(10)
    budget.check_all_limits(3)
    budget.record_completed_tasks(3)
    assert used(budget) == {"day": 13}


def test_a_block_records_at_its_end(open_budget):
    budget = open_budget(**ALL)
    with budget.batch(4) as batch:
        assert used(budget) == dict.fromkeys(TIERS, 4)
        batch.fail()
    assert used(budget) == dict.fromkeys(TIERS, 3)
    assert batch.completed == 3


def test_a_block_that_raises_returns_unrecorded_tasks(open_budget):
    budget = open_budget(**ALL)
    with pytest.raises(ZeroDivisionError), budget.batch(4) as batch:  # noqa: PT012 - the block is what is tested
        batch.record(1, task_ids=["a"])
        raise ZeroDivisionError
    assert used(budget) == dict.fromkeys(TIERS, 1)


def test_a_block_that_records_single_tasks_counts_only_these(open_budget):
    budget = open_budget(per_day=100)
    with budget.batch(4) as batch:
        batch.record(task_ids=["a", "b"])
        assert used(budget) == {"day": 4}
        batch.record(task_ids=["c"])
    assert used(budget) == {"day": 3}


def test_a_batch_serves_one_block_at_a_time(path, clock):
    with TaskBudget(per_day=100, store=path, clock=clock) as budget:
        batch = budget.batch(4)
        with batch:
            with pytest.raises(RateLimitError, match="in use by another block"):
                batch.__enter__()
            assert used(budget) == {"day": 4}
            batch.fail(4)
        assert used(budget) == {"day": 0}, "the only reservation was settled"


async def test_a_batch_serves_one_task_at_a_time(path, clock):
    async with AsyncTaskBudget(per_day=100, store=path, clock=clock) as budget:
        batch = budget.batch(4)
        async with batch:
            with pytest.raises(RateLimitError, match="in use by another block"):
                await batch.__aenter__()
            batch.fail(4)
        async with batch:
            assert (await budget.get_current_usage())["day"].used == 4


def test_a_denied_block_raises_with_the_result(open_budget):
    budget = open_budget(per_minute=5)
    with pytest.raises(Denied, match="0 of 5 tasks per minute") as denied, budget.batch(6):
        pass
    assert denied.value.decision.tier == "minute"
    assert denied.value.decision.retry_after is None


def test_a_block_waits_until_it_fits(open_budget, clock):
    budget = open_budget(per_minute=5)
    budget.check_all_limits(5)
    before = clock.now()
    with budget.batch(2, timeout=120):
        assert clock.now() == before + 60


def test_a_record_outside_a_block_does_not_settle_its_batch(open_budget):
    budget = open_budget(per_day=100)
    with budget.batch(5):
        budget.record_completed_tasks(2)  # of no batch
        assert used(budget) == {"day": 7}
    assert used(budget) == {"day": 7}


def test_an_expired_batch_is_returned(open_budget, clock):
    budget = open_budget(per_hour=100, per_day=500, batch_ttl="5m")
    budget.check_all_limits(40)
    clock.advance(299)
    assert used(budget) == {"hour": 40, "day": 40}
    clock.advance(1)
    assert used(budget) == {"hour": 0, "day": 0}


def test_a_batch_recorded_after_it_expired_is_counted(open_budget, clock):
    budget = open_budget(per_hour=100, batch_ttl=300)
    result = budget.check_all_limits(40)
    with budget.batch(10):
        clock.advance(301)
        budget.check_all_limits(1)
        assert used(budget) == {"hour": 1}  # both batches have expired
    budget.record_completed_tasks(30, result=result)
    assert used(budget) == {"hour": 41}


def test_closing_returns_open_batches(open_budget):
    budget = open_budget(per_day=100)
    budget.check_all_limits(30)
    budget.close()
    assert used(open_budget(per_day=100)) == {"day": 0}
    with pytest.raises(Closed):
        budget.check_all_limits(1)


def test_any_tier_may_be_left_out(open_budget, clock):
    budget = open_budget(per_week=10)
    assert budget.check_all_limits(10)
    budget.record_completed_tasks(10)
    clock.advance(86_400 * 6)
    assert budget.check_all_limits(1).tier == "week"


def test_fixed_windows_follow_the_calendar(open_budget, clock):
    budget = open_budget(**ALL, strategy="fixed")
    result = budget.check_all_limits(20)  # 15:06:40 on a Sunday
    assert result.reset_times == {
        "minute": datetime(2025, 6, 15, 15, 7, tzinfo=UTC),
        "hour": datetime(2025, 6, 15, 16, tzinfo=UTC),
        "day": datetime(2025, 6, 16, tzinfo=UTC),
        "week": datetime(2025, 6, 16, tzinfo=UTC),
        "month": datetime(2025, 7, 1, tzinfo=UTC),
    }
    budget.record_completed_tasks(20)
    assert budget.check_all_limits(1).wait == 20.0
    clock.advance(20)
    assert used(budget) == {"minute": 0, "hour": 20, "day": 20, "week": 20, "month": 20}
    clock.advance(8 * 3600 + 53 * 60)
    assert used(budget) == {"minute": 0, "hour": 0, "day": 0, "week": 0, "month": 20}


def test_fixed_windows_in_a_time_zone(open_budget):
    budget = open_budget(per_day=10, strategy="fixed", timezone="Asia/Tokyo")
    assert budget.check_all_limits(1).reset_times == {"day": datetime(2025, 6, 16, 15, tzinfo=UTC)}


def test_all_tiers_survive_a_restart(open_budget, clock):
    budget = open_budget(**ALL)
    budget.check_all_limits(7)
    budget.record_completed_tasks(7)
    budget.close()
    clock.advance(59)
    again = open_budget(**ALL)
    assert used(again) == dict.fromkeys(TIERS, 7)
    clock.advance(1)
    assert used(again) == {"minute": 0, "hour": 7, "day": 7, "week": 7, "month": 7}


def test_a_changed_limit_keeps_the_usage(open_budget):
    open_budget(per_day=100).record_completed_tasks(60)
    lowered = open_budget(per_day=30)
    assert not lowered.check_all_limits(1)
    assert open_budget(per_day=100).check_all_limits(40)


def test_concurrency_limits_running_tasks(open_budget):
    budget = open_budget(per_day=100, concurrency=5)
    first = budget.check_all_limits(3)
    denied = budget.check_all_limits(3)
    assert denied.tier == "concurrency"
    assert "3 of 5 tasks are running" in denied.reason
    assert used(budget) == {"day": 3, "concurrency": 3}
    budget.record_completed_tasks(3, result=first)
    assert used(budget) == {"day": 3, "concurrency": 0}
    larger = budget.check_all_limits(20)  # runs five tasks at a time
    assert larger.current_usage == {"day": 23, "concurrency": 5}


def test_recorded_tasks_can_be_read_with_sql(open_budget, path, clock):
    budget = open_budget(**ALL)
    budget.check_all_limits(5)
    clock.advance(10)
    budget.record_completed_tasks(task_ids=["t-1", "t-2"], task_type="embedding")
    with budget.batch(3, task_type="completion"):
        pass
    budget.check_all_limits(4)  # open: not completed
    db = sqlite3.connect(path)
    tasks = db.execute("SELECT id, completed_at, task_type, task_id FROM task_completions").fetchall()
    periods = dict(db.execute("SELECT time_period, current_count FROM rate_limits").fetchall())
    db.close()
    assert tasks == [
        (1, "2025-06-15 15:06:50.000000Z", "embedding", "t-1"),
        (2, "2025-06-15 15:06:50.000000Z", "embedding", "t-2"),
        *((number, "2025-06-15 15:06:50.000000Z", "completion", None) for number in (3, 4, 5)),
    ]
    assert periods == dict.fromkeys(TIERS, 9)


def test_a_disabled_budget_allows_everything_and_creates_no_file(open_budget, path):
    budget = open_budget(per_minute=1, enabled=False)
    assert budget.check_all_limits(1000)
    budget.record_completed_tasks(1000)
    budget.cancel()
    with budget.batch(1000):
        pass
    assert budget.get_current_usage() == budget.snapshot() == {}
    assert (budget.lost, budget.backlog, budget.catch_up()) == (False, 0, True)
    assert budget.reset_expired_windows() == 0
    assert budget.health()["status"] == "disabled"
    assert not path.exists()


@cases(
    ("call", "message"),
    [
        (lambda budget: budget.check_all_limits(-1), "task_count: must be"),
        (lambda budget: budget.check_all_limits(1.5), "task_count: must be"),
        (lambda budget: budget.check_all_limits(1, cost=5), "cost: expected a mapping of units"),
        (lambda budget: budget.check_all_limits(1, cost={"tokens": -5}), "cost.tokens: must be"),
        (
            lambda budget: budget.record_completed_tasks(2, task_ids=["a"]),
            "task_ids: expected one ID for each of 2 tasks, not 1 IDs",
        ),
    ],
)
def test_invalid_arguments_are_refused(open_budget, call, message):
    with pytest.raises(ConfigError, match=message):
        call(open_budget(per_day=10))


def test_settings_cannot_be_combined_with_their_fields():
    with pytest.raises(ConfigError, match="settings: cannot be combined with per_day"):
        TaskBudget(TaskBudget(per_day=1, enabled=False).settings, per_day=3)


def test_health_describes_the_database_and_the_tiers(open_budget):
    budget = open_budget(per_minute=5, per_day=100)
    assert budget.health() == {
        "status": "ok",
        "database": {"connected": True, "losses": 0, "waiting": 0, "on_error": "short-term"},
        "exhausted": [],
        "tiers": {
            "minute": {"quota": 5, "used": 0, "remaining": 5, "reset_after": 0.0, "unit": "tasks"},
            "day": {"quota": 100, "used": 0, "remaining": 100, "reset_after": 0.0, "unit": "tasks"},
        },
    }
    budget.check_all_limits(5)
    health = budget.health()
    assert (health["status"], health["exhausted"]) == ("limited", ["minute"])
