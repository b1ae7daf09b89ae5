"""Changing the strategy, or adding a tier, counts the completed tasks in the file: nothing is refilled."""

import pytest

from tests.budget.both_kinds import used
from tidegate.budget import TaskBudget

TIERS = {"per_hour": 50, "per_day": 10, "per_month": 100}
OTHER = {"rolling": "fixed", "fixed": "rolling"}


@pytest.mark.parametrize("strategy", ["rolling", "fixed"])
def test_a_changed_strategy_keeps_what_was_used(open_budget, strategy, clock):
    first = open_budget(**TIERS, strategy=strategy)
    first.record_completed_tasks(task_ids=["a", "b", "c"])
    clock.advance(7200)
    first.record_completed_tasks(4)
    first.close()
    second = open_budget(**TIERS, strategy=OTHER[strategy])
    assert used(second) == {"hour": 4, "day": 7, "month": 7}
    assert second.check_all_limits(4).tier == "day"
    second.record_completed_tasks(2)
    second.close()
    assert used(open_budget(**TIERS, strategy=strategy)) == {"hour": 6, "day": 9, "month": 9}  # and back


def test_an_open_batch_of_another_process_stays_reserved(open_budget, clock):
    running = open_budget(**TIERS)
    batch = running.check_all_limits(6)
    clock.advance(10)
    changed = open_budget(**TIERS, strategy="fixed")
    assert used(changed)["day"] == 6
    assert changed.check_all_limits(5).tier == "day"
    running.record_completed_tasks(6, result=batch)
    assert used(changed)["day"] == 6


def test_costs_and_types_are_counted_again(open_budget):
    settings = {"types": {"embedding": {"day": 20}}, "costs": {"tokens": {"day": 5000}}, "reserved": {1: 0.5}}
    first = open_budget(**TIERS, **settings)
    first.record_completed_tasks(3, task_type="embedding", cost={"tokens": 900})
    before = used(first)
    first.close()
    second = open_budget(**TIERS, **settings, strategy="fixed")
    assert used(second) == before == {"hour": 3, "day": 3, "month": 3, "day:embedding": 3, "day:tokens": 900}
    assert second.check_all_limits(3).tier == "day"  # half of it is reserved, as before


def test_an_added_tier_counts_the_completed_tasks(open_budget):
    first = open_budget(per_day=10)
    first.record_completed_tasks(7)
    first.close()
    assert used(open_budget(per_day=10, per_week=20)) == {"day": 7, "week": 7}


def test_a_tier_that_was_removed_for_a_while_is_complete_when_it_is_back(open_budget):
    for tiers, tasks in ((TIERS, 3), ({"per_month": 100}, 4)):
        budget = open_budget(**tiers)
        budget.record_completed_tasks(tasks)
        budget.close()
    assert used(open_budget(**TIERS))["day"] == 7


def test_a_restart_without_a_change_counts_nothing_again(open_budget, caplog):
    caplog.set_level("INFO")
    for _ in range(2):
        budget = open_budget(**TIERS)
        batch = budget.check_all_limits(2)
        budget.record_completed_tasks(1, result=batch)
        budget.close()
    assert used(open_budget(**TIERS))["day"] == 2
    assert "counted" not in caplog.text


def test_many_completions_are_counted_in_a_short_time(path, clock):
    with TaskBudget(per_day=200_000, per_month=200_000, store=path, clock=clock) as budget:
        for _ in range(300):
            clock.advance(60)
            budget.record_completed_tasks(task_ids=map(str, range(100)))
        assert used(budget) == {"day": 30_000, "month": 30_000}
    with TaskBudget(per_day=200_000, per_month=200_000, store=path, clock=clock, strategy="fixed") as budget:
        assert used(budget)["month"] == 30_000
