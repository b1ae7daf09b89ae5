"""Arguments that a budget cannot use are refused before anything is charged."""

import pytest

from tests.budget.both_kinds import used
from tidegate import ConfigError
from tidegate.budget import TaskBudget


def test_a_result_of_another_budget_is_refused(open_budget, tmp_path):
    """It was settled in the wrong database: completed tasks were not counted, and others were refunded."""
    budget = open_budget(per_day=50)
    budget.record_completed_tasks(7)
    with TaskBudget(per_day=50, store=tmp_path / "other.db") as other:
        result = other.check_all_limits(2)
        for call in (lambda: budget.record_completed_tasks(1, result=result), lambda: budget.cancel(result)):
            with pytest.raises(ConfigError, match=r"result: it is of the budget tasks in .+: give it to the"):
                call()
        assert used(budget)["day"] == 7
        other.record_completed_tasks(1, result=result)
        assert other.get_current_usage()["day"].used == 1


def test_a_result_may_be_recorded_by_another_object_of_the_same_budget(open_budget):
    first, second = open_budget(per_day=50), open_budget(per_day=50)
    result = first.check_all_limits(3)
    second.record_completed_tasks(2, result=result)
    assert used(first)["day"] == used(second)["day"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task_ids": ["good", "\ud800"]}, "task_ids: contains half of a character"),
        ({"task_type": "\udfff"}, "task_type: contains half of a character"),
        ({"task_type": 5}, "task_type: must be a string, not 5"),
    ],
)
def test_a_text_that_no_store_can_keep_is_refused(open_budget, arguments, message):
    budget = open_budget(per_day=50)
    result = budget.check_all_limits(2)
    with pytest.raises(ConfigError, match=message):
        budget.record_completed_tasks(2, result=result, **arguments)
    assert used(budget)["day"] == 2
    budget.record_completed_tasks(1, result=result)  # the batch is still open
    assert used(budget)["day"] == 1


@pytest.mark.parametrize("priority", [float("nan"), 101, -101, "high"])
def test_a_priority_that_no_task_can_have_is_refused(open_budget, priority):
    budget = open_budget(per_day=50, reserved={1: 0.5})
    with pytest.raises(ConfigError, match="priority: "):
        budget.check_all_limits(1, priority=priority)
    assert used(budget)["day"] == 0
