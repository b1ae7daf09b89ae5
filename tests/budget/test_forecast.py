"""When each tier runs out at the current pace."""

import pytest

from tests.budget.both_kinds import START
from tidegate.budget import TaskBudget
from tidegate.budget.alerts._forecast import forecast
from tidegate.testing import ManualClock

HOUR = 3600
DAY = 24 * HOUR


def read_forecast(budget, clock):
    return forecast(budget.operations.plan, budget.snapshot(), clock.ns() // 1000)


@pytest.fixture
def budget(path, clock):
    tiers = {"per_minute": 100, "per_hour": 60, "per_day": 500, "per_month": 40_000}
    with TaskBudget(**tiers, store=path, clock=clock) as budget:
        yield budget


def test_an_unused_budget_does_not_run_out(budget, clock):
    assert {(each.pace, each.runs_out_in) for each in read_forecast(budget, clock).values()} == {(0.0, None)}


def test_a_steady_pace_is_forecast(budget, clock):
    for _ in range(100):
        budget.record_completed_tasks(5)
        clock.advance(600)
        forecasts = read_forecast(budget, clock)
        if budget.snapshot()["day"].remaining == 0:
            break
    assert forecasts["hour"] == (25 / HOUR, None)  # 5 every ten minutes, one batch just expired
    assert forecasts["day"].runs_out_in == 0.0
    assert forecasts["month"].runs_out_in is None  # 25 an hour are 18,000 a month


def test_a_rolling_tier_runs_out_if_it_fills_faster_than_it_expires(budget, clock):
    budget.record_completed_tasks(50)
    forecasts = read_forecast(budget, clock)
    # 50 an hour are added, and 50 a day expire: (500 - 50) / (50/h - 50/24h)
    assert forecasts["day"].runs_out_in == pytest.approx(450 / (50 / HOUR - 50 / DAY))
    assert forecasts["hour"].runs_out_in is None
    assert forecasts["minute"].runs_out_in is None


def test_a_fixed_window_runs_out_only_before_its_end(path):
    clock = ManualClock(start=START)  # 15:06:40
    options = {"per_hour": 1000, "per_day": 120, "per_month": 40_000, "strategy": "fixed", "store": path}
    with TaskBudget(**options, clock=clock) as budget:
        budget.record_completed_tasks(40)
        forecasts = read_forecast(budget, clock)
        assert forecasts["hour"] == (40 / 400, None)  # since 15:00; it ends before it is full
        assert forecasts["day"].runs_out_in == pytest.approx(800)
        clock.advance(HOUR)
        assert read_forecast(budget, clock)["day"].runs_out_in is None  # nothing in this hour


def test_each_unit_has_its_own_pace(path, clock):
    tiers = {"per_hour": 60, "costs": {"tokens": {"hour": 10_000, "day": 50_000}}, "concurrency": 5}
    with TaskBudget(**tiers, store=path, clock=clock) as budget:
        budget.record_completed_tasks(2, cost={"tokens": 9000})
        forecasts = read_forecast(budget, clock)
        assert set(forecasts) == {"hour", "hour:tokens", "day:tokens"}
        assert forecasts["day:tokens"].pace == 9000 / HOUR
        assert forecasts["day:tokens"].runs_out_in == pytest.approx(41_000 / (9000 / HOUR - 9000 / DAY))
