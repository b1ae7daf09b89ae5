"""The limits of a budget are reloaded while it is in use; usage is kept."""

import logging
import signal
import threading

import pytest

from tests.budget.both_kinds import used
from tests.budget.polling import wait_until
from tests.servers.process import until
from tests.service.harness import serving
from tidegate.budget import TaskBudget
from tidegate.errors import ConfigError


@pytest.fixture
def file(tmp_path):
    return tmp_path / "budget.yaml"


@pytest.fixture
def write(file, path):
    """Write the file of the budget."""

    def write_file(text):
        file.write_text(f"{text}\nstore: {path}\n")

    return write_file


def test_a_raised_and_a_lowered_limit_take_effect_and_usage_is_kept(open_budget, file, write):
    write("tiers: {minute: 20, day: 500}")
    budget = open_budget(str(file))
    budget.record_completed_tasks(20)
    assert budget.check_all_limits(1).tier == "minute"
    write("tiers: {minute: 25, day: 22}")
    assert budget.reload() is True
    assert used(budget) == {"minute": 20, "day": 20}
    denied = budget.check_all_limits(3)
    assert (denied.tier, denied.limits) == ("day", {"minute": 25, "day": 22})
    assert budget.check_all_limits(2)
    assert budget.settings.per_minute == 25


def test_a_file_without_changes_is_not_a_reload(open_budget, file, write, caplog):
    write("tiers: {day: 500}")
    budget = open_budget(str(file))
    assert budget.reload() is False
    assert not caplog.records


def test_types_costs_shares_and_schedules_are_reloaded(open_budget, file, write):
    write(
        "tiers: {day: 10}\ntypes: {embedding: {day: 5}, completion: {day: 5}}\n"
        "costs: {tokens: {day: 100}}\nreserved: {1: 20%}"
    )
    budget = open_budget(str(file))
    running = budget.check_all_limits(2, task_type="embedding", cost={"tokens": 60})
    write(
        "tiers: {day: 20}\ntypes: {completion: {day: 7}, embedding: {day: 6}}\n"  # in another order
        "costs: {tokens: {day: 200}}\nreserved: {1: 50%}\n"
        'schedule: [{between: "00:00-24:00", limits: {"day:tokens": 150}}]'
    )
    assert budget.reload() is True
    assert not budget.check_all_limits(1, cost={"tokens": 91}, priority=1)
    budget.record_completed_tasks(1, cost={"tokens": 50}, result=running)
    assert used(budget) == {"day": 1, "day:embedding": 1, "day:completion": 0, "day:tokens": 50}
    assert budget.get_current_usage()["day:tokens"].quota == 150
    assert not budget.check_all_limits(6, task_type="embedding", priority=1)
    assert budget.check_all_limits(5, task_type="embedding", priority=1)
    assert not budget.check_all_limits(10)  # ten of twenty are reserved for priority 1
    assert budget.check_all_limits(9)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tiers: {minute: many}", "minute"),
        ("tiers: [", "budget.yaml"),
        ("tiers: {minute: 30, day: 500, week: 900}", "adds the tier week: restart the programs that use the budget"),
        ("tiers: {minute: 30}", "removes the tier day: restart the programs that use the budget"),
        ("tiers: {minute: 30, day: 500}\nreserved: {1: 20%}", "the priorities with a share are not the same"),
        ("tiers: {minute: 30, day: 500}\nschedule: [{days: mon, limits: {hour: 5}}]", "unknown tier 'hour'"),
    ],
)
def test_an_invalid_file_leaves_the_previous_limits_and_is_logged(open_budget, file, write, caplog, text, reason):
    write("tiers: {minute: 20, day: 500}")
    budget = open_budget(str(file))
    budget.record_completed_tasks(5)
    write(text)
    assert budget.reload() is False
    [record] = caplog.records
    assert (record.name, record.levelno) == ("tidegate.budget", logging.ERROR)
    assert record.getMessage().startswith("reload refused, the previous limits of the budget stay in effect: ")
    assert reason in record.getMessage()
    assert {tier: (each.used, each.quota) for tier, each in budget.get_current_usage().items()} == {
        "minute": (5, 20),
        "day": (5, 500),
    }
    write("tiers: {minute: 30, day: 500}")
    assert budget.reload() is True
    assert budget.get_current_usage()["minute"].quota == 30


def test_a_missing_file_leaves_the_previous_limits(open_budget, file, write, caplog):
    write("tiers: {minute: 20}")
    budget = open_budget(str(file))
    file.unlink()
    assert budget.reload() is False
    assert "reload refused" in caplog.text
    assert budget.get_current_usage()["minute"].quota == 20


def test_other_settings_need_a_restart(open_budget, file, write, caplog):
    write("tiers: {minute: 20}")
    budget = open_budget(str(file))
    write("tiers: {minute: 30}\nstrategy: fixed\nbatch_ttl: 5m")
    assert budget.reload() is True
    assert "changed settings of the budget that need a restart: strategy, batch_ttl" in caplog.text
    assert (budget.settings.strategy, budget.settings.per_minute) == ("rolling", 30)


def test_the_file_of_the_environment_is_reloaded(open_budget, file, write):
    write("tiers: {minute: 20}")
    budget = open_budget({"RATE_LIMIT_ENABLED": "true", "RATE_LIMIT_CONFIG": str(file)})
    write("tiers: {minute: 30}")
    assert budget.reload() is True
    assert budget.get_current_usage()["minute"].quota == 30


def test_a_budget_from_keywords_has_nothing_to_reload(open_budget):
    budget = open_budget(per_minute=20)
    with pytest.raises(ConfigError, match="was not built from a file or the environment"):
        budget.reload()


def test_a_waiting_batch_uses_the_raised_limit(file, path, write):
    write("tiers: {day: 5}")
    with TaskBudget.from_config(file) as budget:
        budget.record_completed_tasks(5)
        done = []

        def work():
            with budget.batch(2, timeout=60):
                done.append(True)

        thread = threading.Thread(target=work)
        thread.start()
        wait_until(lambda: budget.operations.limiter.waiting == 1, "the batch waits")
        write("tiers: {day: 8}")
        assert budget.reload()
        thread.join(timeout=20)
        assert done == [True]
        assert used(budget) == {"day": 7}


def shown(service, quota):
    return f'rate_limit_max_allowed{{period="minute"}} {quota}' in service.get("/metrics").text


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_service_shows_the_limits_of_a_changed_file(tmp_path, file, write, workers):
    write("tiers: {minute: 20}")
    with TaskBudget.from_config(file) as budget:
        budget.record_completed_tasks(7)
    flags = ("--budget", str(file), "--workers", workers, "--store", f"sqlite:///{tmp_path / 'limits.db'}")

    with serving(tmp_path, "policies: {api: 2/1h}\n", *flags) as service:
        assert shown(service, 20)
        write("tiers: {minute: many}")
        refused = "reload refused, the previous limits of the budget stay in effect"
        until(lambda: service.logged(refused), "the refusal is logged")
        assert shown(service, 20)
        write("tiers: {minute: 30}")
        until(lambda: all(shown(service, 30) for _ in range(10)), "all workers show the new limit")
        assert 'rate_limit_current_usage{period="minute"} 7' in service.get("/metrics").text


def test_the_service_reads_the_file_at_sighup(tmp_path, file, write):
    write("tiers: {minute: 20}")
    TaskBudget.from_config(file).close()
    with serving(tmp_path, "policies: {api: 2/1h}\nreload_every: 1h\n", "--budget", str(file)) as service:
        assert shown(service, 20)
        write("tiers: {minute: 30}")
        service.process.send_signal(signal.SIGHUP)
        until(lambda: shown(service, 30), "the service shows the new limit")
