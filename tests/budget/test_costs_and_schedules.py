"""Task types, costs, schedules by time of day and load, priorities."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.budget.both_kinds import START, used
from tidegate import ConfigError
from tidegate.budget import TaskBudget
from tidegate.budget._settings.model import BudgetSettings
from tidegate.budget._settings.schedule import ScheduleRule, read_between, read_days
from tidegate.testing import ManualClock


def test_limits_for_each_task_type(open_budget):
    budget = open_budget(per_hour=100, types={"embedding": {"hour": 10}, "completion": {"hour": 30}, "other": {}})
    assert budget.check_all_limits(10, task_type="embedding")
    denied = budget.check_all_limits(1, task_type="embedding")
    assert (denied.tier, denied.limits["hour:embedding"]) == ("hour:embedding", 10)
    assert budget.check_all_limits(30, task_type="completion")
    assert budget.check_all_limits(60)  # of no type
    assert budget.check_all_limits(1, task_type="other").tier == "hour"
    assert used(budget) == {"hour": 100, "hour:embedding": 10, "hour:completion": 30}


def test_a_type_given_only_when_recording_is_counted(open_budget):
    budget = open_budget(per_hour=100, types={"embedding": {"hour": 10}})
    budget.check_all_limits(5)
    budget.record_completed_tasks(4, task_type="embedding")
    assert used(budget) == {"hour": 4, "hour:embedding": 4}
    budget.record_completed_tasks(3, task_type="embedding")
    assert used(budget) == {"hour": 7, "hour:embedding": 7}


def test_costs_are_limited_by_unit(open_budget):
    budget = open_budget(
        per_hour=100, costs={"usd_micros": {"day": 1_000_000}, "tokens": {"minute": 9000}, "anything": {}}
    )
    result = budget.check_all_limits(10, cost={"usd_micros": 600_000, "tokens": 4000})
    assert result.current_usage == {"hour": 10, "day:usd_micros": 600_000, "minute:tokens": 4000}
    budget.record_completed_tasks(10, cost={"usd_micros": 750_000, "tokens": 4800})
    assert used(budget) == {"hour": 10, "day:usd_micros": 750_000, "minute:tokens": 4800}
    denied = budget.check_all_limits(1, cost={"usd_micros": 250_001})
    assert denied.tier == "day:usd_micros"
    assert used(budget)["hour"] == 10  # charged nowhere
    assert budget.check_all_limits(1, cost={"usd_micros": 250_000, "anything": 5})


def test_the_estimate_of_a_batch_is_divided_among_its_tasks(open_budget):
    budget = open_budget(per_hour=100, costs={"tokens": {"hour": 9000}})
    budget.check_all_limits(10, cost={"tokens": 1005})
    budget.record_completed_tasks(4)  # without their cost
    assert used(budget) == {"hour": 4, "hour:tokens": 402}
    with budget.batch(3, cost={"tokens": 900}) as batch:
        batch.record(1, cost={"tokens": 100})
        assert used(budget) == {"hour": 7, "hour:tokens": 402 + 900}
        batch.record(1)
    assert used(budget) == {"hour": 6, "hour:tokens": 402 + 100 + 300}


def test_a_task_may_cost_more_than_the_rest_of_its_batch(open_budget):
    budget = open_budget(per_hour=100, costs={"tokens": {"hour": 9000}})
    with budget.batch(2, cost={"tokens": 100}) as batch:
        batch.record(1, cost={"tokens": 700})
    assert used(budget) == {"hour": 1, "hour:tokens": 700}


def test_high_priorities_can_use_their_reserved_share(open_budget):
    budget = open_budget(per_hour=100, reserved={1: "20%", 5: 0.1})
    assert budget.check_all_limits(70)
    denied = budget.check_all_limits(1)
    assert (denied.tier, denied.exceeded) == ("hour", ("hour",))
    assert denied.current_usage == {"hour": 70}
    assert budget.check_all_limits(20, priority=1)
    assert not budget.check_all_limits(1, priority=4)
    assert budget.check_all_limits(10, priority=5)
    assert not budget.check_all_limits(1, priority=9)
    assert used(budget) == {"hour": 100}


def test_high_priorities_use_their_reserved_share_first(open_budget):
    budget = open_budget(per_hour=100, reserved={1: 0.2})
    assert budget.check_all_limits(20, priority=1)
    assert budget.check_all_limits(80)
    assert not budget.check_all_limits(1, priority=1)


def test_permits_returned_by_a_high_priority_are_free_for_all(open_budget):
    budget = open_budget(per_hour=10, reserved={1: 0.5})
    budget.check_all_limits(10, priority=1)
    budget.record_completed_tasks(2)
    assert budget.check_all_limits(5)
    assert not budget.check_all_limits(1)


NIGHT = ScheduleRule("night", between=(22 * 60, 6 * 60), limits={"minute": 60})
BUSY = ScheduleRule("busy", load_above=0.8, scale=0.5)


def test_limits_by_time_of_day(open_budget, clock):
    budget = open_budget(per_minute=20, per_day=500, schedule=(NIGHT,))
    assert budget.check_all_limits(20).limits == {"minute": 20, "day": 500}
    assert not budget.check_all_limits(1)
    clock.advance(7 * 3600)  # 22:06:40
    assert budget.check_all_limits(60).limits == {"minute": 60, "day": 500}
    clock.advance(8 * 3600)  # 06:06:40
    assert not budget.check_all_limits(21)


def test_a_changed_limit_refills_nothing(open_budget, clock):
    clock.advance(7 * 3600 - 410)  # 21:59:50
    budget = open_budget(per_minute=20, schedule=(NIGHT,))
    budget.check_all_limits(20)
    clock.advance(20)
    assert budget.check_all_limits(41).wait == 40.0
    assert budget.check_all_limits(40)


def test_limits_by_load(open_budget, clock):
    load = [0.2]
    budget = open_budget(per_minute=20, per_day=500, schedule=(BUSY,), load=lambda: load[0])
    assert budget.check_all_limits(15)
    load[0] = 0.9
    clock.advance(1)
    denied = budget.check_all_limits(1)
    assert (denied.tier, denied.limits) == ("minute", {"minute": 10, "day": 250})
    load[0] = 0.8
    clock.advance(1)
    assert budget.check_all_limits(5)


def test_schedule_rules_in_a_file(open_budget, path, clock):
    config = {
        "tiers": {"minute": 20},
        "store": str(path),
        "timezone": "America/New_York",  # 11:06 there
        "schedule": [
            {"between": "9:00-17:00", "days": "mon-fri", "scale": "50%"},
            {"between": "11:00-11:30", "days": "sun", "limits": {"minute": 7}},
        ],
    }
    assert open_budget(config).check_all_limits(1).limits == {"minute": 7}


@given(st.integers(0, 7 * 1440 - 1), st.integers(0, 1439), st.integers(1, 1440), st.sets(st.integers(0, 6), min_size=1))
def test_a_time_span_belongs_to_the_day_it_starts_on(minute, start, length, days):
    end = (start + length) % 1440
    rule = ScheduleRule("r", between=(start, end or 1440), days=frozenset(days))
    if start == end:
        return
    monday = int(datetime(2025, 6, 16, tzinfo=UTC).timestamp())
    begins = [(day * 1440 + start, day * 1440 + start + length) for week in (-7, 0) for day in (d + week for d in days)]
    expected = any(begin <= minute < last for begin, last in begins)
    assert rule.applies((monday + minute * 60) * 1_000_000, "UTC", 0.0) == expected


@pytest.mark.parametrize(
    ("text", "days"),
    [("mon-fri", {0, 1, 2, 3, 4}), ("sat, sun", {5, 6}), ("fri-mon", {4, 5, 6, 0}), ("Wednesday", {2})],
)
def test_weekdays_are_read(text, days):
    assert read_days(text) == days


def test_time_spans_are_read():
    assert read_between("9:00 - 17:30") == (540, 1050)
    assert read_between("22:00-24:00") == (1320, 1440)


def test_all_tiers_are_decided_in_one_transaction(path):
    clock = ManualClock(start=START)
    options = {
        "per_minute": 20, "per_month": 7500, "concurrency": 20, "types": {"a": {"day": 15}},
        "costs": {"tokens": {"hour": 1000}}, "reserved": {1: 0.1}, "store": path, "clock": clock,
    }  # fmt: skip
    with TaskBudget(**options) as budget:
        before = budget.operations.store.metrics()["transactions"]
        assert budget.check_all_limits(5, task_type="a", cost={"tokens": 100})
        assert budget.operations.store.metrics()["transactions"] == before + 1
        budget.record_completed_tasks(5)
        assert budget.operations.store.metrics()["transactions"] == before + 2


def test_a_rule_for_the_load_needs_a_function_that_returns_it(open_budget, path):
    with pytest.raises(ConfigError, match=r"the rule 'busy' has load_above, .* pass load="):
        open_budget(per_minute=20, schedule=(BUSY,))
    settings = BudgetSettings(per_minute=20, schedule=(BUSY,), store=path)
    TaskBudget(settings, load=lambda: 0.9).close()
    with TaskBudget.to_read(settings) as shown:  # a view assumes no load
        assert shown.get_current_usage()["minute"].quota == 20
