"""The database is removed or replaced while budgets use it: noticed at once, and never replaced by an empty one."""

import json

import pytest

from tests.budget.both_kinds import used
from tests.budget.polling import wait_until
from tests.budget.receiver import run_receiver
from tests.servers.process import until
from tests.service.harness import serving
from tidegate.budget import TaskBudget


def remove(path):
    for name in path.parent.glob(f"{path.name}*"):
        name.unlink()


def errors(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def test_a_removed_database_is_an_outage_until_it_is_restored(open_budget, path, caplog, tmp_path):
    with TaskBudget(per_minute=40, per_month=100, store=path) as other:
        other.record_completed_tasks(2)
    backup = tmp_path / "backup"
    backup.write_bytes(path.read_bytes())
    budget = open_budget(per_minute=40, per_month=100, deadline=0.3)
    budget.record_completed_tasks(30)
    remove(path)
    result = budget.check_all_limits(2)
    assert (result.allowed, result.local) == (True, True)
    budget.record_completed_tasks(2, result=result)
    health = budget.health()
    assert (health["status"], health["database"]["connected"], health["database"]["losses"]) == ("degraded", False, 1)
    (line,) = errors(caplog)
    assert f"{path} was removed while it was in use" in line
    assert not path.exists()
    backup.replace(path)
    wait_until(lambda: not budget.lost and not budget.backlog, "the budget uses the restored file")
    assert used(budget)["month"] == 2 + 2  # of the backup, and recorded since


def test_a_removed_database_is_noticed_by_reading_usage(open_budget, path, caplog):
    budget = open_budget(per_month=100, deadline=0.3)
    budget.record_completed_tasks(32)
    remove(path)
    assert budget.health()["database"]["connected"] is False
    assert len(errors(caplog)) == 1
    assert not path.exists()


@pytest.mark.parametrize("before", ["opened", "recorded", "checked"])
@pytest.mark.parametrize("method", ["check_all_limits", "record_completed_tasks"])
def test_a_replaced_database_is_logged_and_counted_as_lost(open_budget, path, caplog, tmp_path, before, method):
    budget = open_budget(per_month=100, deadline=0.3)
    if before != "opened":
        getattr(budget, {"recorded": "record_completed_tasks", "checked": "check_all_limits"}[before])(32)
    with TaskBudget(per_month=100, store=tmp_path / "other.db") as other:
        other.check_all_limits(1)
    remove(path)
    (tmp_path / "other.db").replace(path)
    getattr(budget, method)(1)
    (line,) = errors(caplog)
    assert f"{path} was replaced by another file while it was in use" in line
    assert budget.operations.losses == 1
    wait_until(lambda: not budget.lost, "the budget uses the new file")


def test_a_webhook_gets_the_event_of_a_removed_database(open_budget, path):
    with run_receiver() as receiver:
        budget = open_budget(per_month=100, deadline=0.3, webhook=receiver.url)
        budget.record_completed_tasks(1)
        remove(path)
        budget.get_current_usage()
        wait_until(lambda: budget.operations.webhook.sent, "the event is posted")
    assert [json.loads(body)["event"] for _, body in receiver.requests] == ["database_lost"]


def test_a_service_that_only_reads_creates_no_database(tmp_path):
    path = tmp_path / "data" / "budget.db"
    variables = {"RATE_LIMIT_PER_DAY": "500", "RATE_LIMIT_STORAGE_PATH": str(path)}

    def connected(service):
        return service.get("/healthz").json()["budget"].get("database", {}).get("connected")

    with serving(tmp_path, "policies: {api: 2/1h}\n", "--budget", "true", **variables) as service:
        until(lambda: connected(service) is False, "the missing database is reported")
        assert "rate_limit_database_up 0" in service.get("/metrics").text
        assert not path.parent.exists()
        with TaskBudget(per_day=500, store=path) as budget:
            budget.record_completed_tasks(3)
            until(lambda: connected(service) is True, "the database is used once a program has created it")
            assert 'rate_limit_current_usage{period="day"} 3' in service.get("/metrics").text
        remove(path)
        until(lambda: connected(service) is False, "the removed database is reported")
        assert not path.exists()
