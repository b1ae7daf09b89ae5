"""Names of costs and task types that nothing counts are errors."""

import pytest

from tests.budget.both_kinds import used
from tidegate import ConfigError

SETTINGS = {
    "per_day": 50,
    "types": {"embedding": {"day": 20}, "completion": {}},
    "costs": {"usd_micros": {"day": 5000}, "tokens": {}},
}


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"cost": {"usd_micro": 5}}, "cost", "unknown unit 'usd_micro': the budget counts usd_micros, tokens"),
        ({"cost": {"usd_micro": 5}}, "cost", "did you mean 'usd_micros'?"),
        ({"cost": {"tasks": 0}}, "cost", "unknown unit 'tasks'"),
        ({"task_type": "embeding"}, "task_type", "unknown task type 'embeding': the types of the budget are embedding"),
        ({"task_type": "embeding"}, "task_type", "did you mean 'embedding'?"),
    ],
)
def test_unknown_names_are_errors(open_budget, options, field, message):
    budget = open_budget(**SETTINGS)
    batch = budget.check_all_limits(3)
    for method in ("check_all_limits", "record_completed_tasks"):
        with pytest.raises(ConfigError) as caught:
            getattr(budget, method)(1, **options)
        assert caught.value.field == field
        assert message in str(caught.value)
    with pytest.raises(ConfigError), budget.batch(1, **options):
        pytest.fail("the batch was allowed")
    assert used(budget)["day"] == 3
    budget.record_completed_tasks(3, result=batch)  # the open batch was not settled by the failed record


def test_a_block_can_go_on_after_an_unknown_name(open_budget):
    budget = open_budget(**SETTINGS)
    with budget.batch(2) as batch:
        with pytest.raises(ConfigError, match="did you mean 'usd_micros'"):
            batch.record(1, cost={"usd_micro": 5})
        batch.record(1, cost={"usd_micros": 5})
    assert used(budget) == {"day": 1, "day:embedding": 0, "day:usd_micros": 5}


def test_names_without_limits_are_known(open_budget):
    budget = open_budget(**SETTINGS)
    assert budget.check_all_limits(1, task_type="completion", cost={"tokens": 5})
    budget.record_completed_tasks(1, task_type="completion", cost={"tokens": 5})


def test_a_task_type_is_free_text_if_no_types_are_configured(open_budget):
    assert open_budget(per_day=5).check_all_limits(1, task_type="anything")


def test_a_cost_is_an_error_if_the_budget_counts_none(open_budget):
    with pytest.raises(ConfigError, match="the budget counts no costs"):
        open_budget(per_day=5).check_all_limits(1, cost={"tokens": 5})


def test_a_ledger_records_units_without_limits(open_budget, tmp_path):
    budget = open_budget(**SETTINGS, ledger=tmp_path / "spending.db")
    assert budget.check_all_limits(1, cost={"requests": 5})
    with pytest.raises(ConfigError, match="did you mean 'usd_micros'"):
        budget.check_all_limits(1, cost={"usd_micro": 5})


def test_entries_without_quotas_are_no_limits(open_budget):
    with pytest.raises(ConfigError, match="the budget is enabled but has no limits"):
        open_budget(types={"embedding": {}})
