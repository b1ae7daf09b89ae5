"""When each tier runs out at the present pace."""

import pytest

from tests.budget.faces import START
from tidegate.budget import TaskBudget
from tidegate.budget.forecast import forecast
from tidegate.testing import ManualClock

HOUR = 3600
DAY = 24 * HOUR


def look(budget, clock):
    return forecast(budget.plan, budget.snapshot(), clock.ns() // 1000)


@pytest.fixture
def budget(path, clock):
    tiers = {"per_minute": 100, "per_hour": 60, "per_day": 500, "per_month": 40_000}
    with TaskBudget(**tiers, storage=path, clock=clock) as budget:
        yield budget


def test_nothing_used(budget, clock):
    assert {(each.pace, each.runs_out_in) for each in look(budget, clock).values()} == {(0.0, None)}


def test_a_steady_pace(budget, clock):
    for _ in range(100):
        budget.record_completed_tasks(5)
        clock.advance(600)
        ahead = look(budget, clock)
        if budget.snapshot()["day"].remaining == 0:
            break
    assert ahead["hour"] == (25 / HOUR, None)  # 5 every ten minutes, one batch just left
    assert ahead["day"].runs_out_in == 0.0
    assert ahead["month"].runs_out_in is None  # 25 an hour are 18,000 a month


def test_a_tier_that_fills_faster_than_it_empties(budget, clock):
    budget.record_completed_tasks(50)
    ahead = look(budget, clock)
    # 50 an hour come, and 50 a day leave again: (500 - 50) / (50/h - 50/24h)
    assert ahead["day"].runs_out_in == pytest.approx(450 / (50 / HOUR - 50 / DAY))
    assert ahead["hour"].runs_out_in is None
    assert ahead["minute"].runs_out_in is None


def test_fixed_windows(path):
    clock = ManualClock(start=START)  # 15:06:40
    options = {"per_hour": 1000, "per_day": 120, "per_month": 40_000, "strategy": "fixed", "storage": path}
    with TaskBudget(**options, clock=clock) as budget:
        budget.record_completed_tasks(40)
        ahead = look(budget, clock)
        assert ahead["hour"] == (40 / 400, None)  # since 15:00; it ends before it is full
        assert ahead["day"].runs_out_in == pytest.approx(800)
        clock.advance(HOUR)
        assert look(budget, clock)["day"].runs_out_in is None  # nothing in this hour


def test_costs_have_a_pace_of_their_own(path, clock):
    tiers = {"per_hour": 60, "costs": {"tokens": {"hour": 10_000, "day": 50_000}}, "concurrency": 5}
    with TaskBudget(**tiers, storage=path, clock=clock) as budget:
        budget.record_completed_tasks(2, cost={"tokens": 9000})
        ahead = look(budget, clock)
        assert set(ahead) == {"hour", "hour:tokens", "day:tokens"}
        assert ahead["day:tokens"].pace == 9000 / HOUR
        assert ahead["day:tokens"].runs_out_in == pytest.approx(41_000 / (9000 / HOUR - 9000 / DAY))
