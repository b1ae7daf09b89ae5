"""`tidegate budget add`, `refund` and `reset`: the person on call corrects the counts of a budget."""

import asyncio
import json
import sqlite3
import sys

import pytest

from tests.budget.both_kinds import used
from tests.servers.valkey import ValkeyServer
from tests.service.harness import serving
from tidegate._cli import main
from tidegate.budget import TaskBudget
from tidegate.budget._corrections import refund
from tidegate.service._decisions.audit import AuditLog

FILE = """
tiers: {minute: 20, day: 500}
concurrency: 50
types: {embedding: {hour: 40}}
costs: {tokens: {day: 10000}}
"""


@pytest.fixture(scope="module")
def redis_url():
    with ValkeyServer() as server:
        yield server.url


@pytest.fixture(params=["sqlite", "redis"])
def file(request, tmp_path):
    storage = tmp_path / "rate_limits.db" if request.param == "sqlite" else request.getfixturevalue("redis_url")
    file = tmp_path / "budget.yaml"
    file.write_text(f"{FILE}store: {storage}\nname: {json.dumps(request.node.name)}\n")
    return file


@pytest.fixture
def budget(file):
    with TaskBudget.from_config(file) as budget:
        budget.record_completed_tasks(16, task_type="embedding", cost={"tokens": 900})
        yield budget


def correct(file, *arguments):
    return main(["budget", *arguments, "--config", str(file)])


def read_audit(budget):
    return asyncio.run(AuditLog(budget.operations.store).read())


def test_add_allows_more_tasks_in_one_tier(budget, file, capsys):
    budget.record_completed_tasks(4)
    assert budget.check_all_limits(1).tier == "minute"
    assert correct(file, "add", "5", "--tier", "minute") == 0
    assert capsys.readouterr().out == "minute: refunded 5; 15 of 20 tasks used, 5 left\n"
    assert used(budget)["day"] == 20
    assert not budget.check_all_limits(6)
    assert budget.check_all_limits(5)


def test_add_without_a_tier_adds_to_all_tiers_of_tasks(budget, file):
    assert correct(file, "add", "5") == 0
    assert used(budget) == {"minute": 11, "day": 11, "hour:embedding": 16, "day:tokens": 900, "concurrency": 0}


def test_add_says_that_it_cannot_add_more_than_was_counted(budget, file, capsys):
    assert correct(file, "add", "50", "--tier", "day") == 0
    reason = "because no more was counted by completed tasks"
    assert capsys.readouterr().out == f"day: refunded 16 of 50, {reason}; 0 of 500 tasks used, 500 left\n"


def test_refund_corrects_every_tier_that_counted_the_tasks(budget, file):
    assert correct(file, "refund", "3", "--type", "embedding", "--cost", "tokens=200") == 0
    assert used(budget) == {"minute": 13, "day": 13, "hour:embedding": 13, "day:tokens": 700, "concurrency": 0}
    assert correct(file, "refund", "--cost", "tokens=100") == 0
    assert used(budget) == {"minute": 13, "day": 13, "hour:embedding": 13, "day:tokens": 600, "concurrency": 0}


def test_reset_forgets_one_tier_or_all(budget, file):
    assert correct(file, "reset", "--tier", "minute", "--yes") == 0
    assert used(budget) == {"minute": 0, "day": 16, "hour:embedding": 16, "day:tokens": 900, "concurrency": 0}
    assert correct(file, "reset", "--yes") == 0
    assert used(budget) == dict.fromkeys(("minute", "day", "hour:embedding", "day:tokens", "concurrency"), 0)


def test_running_batches_stay_counted(budget, file):
    """Else the settlement of a failed batch would refund tasks that others completed after the reset."""
    running = budget.check_all_limits(4)
    assert correct(file, "reset", "--yes") == 0
    assert used(budget)["minute"] == used(budget)["concurrency"] == 4
    budget.record_completed_tasks(7, result=budget.check_all_limits(7))
    budget.cancel(running)
    assert used(budget)["minute"] == 7


def test_a_batch_that_left_the_window_of_a_tier_does_not_protect_it(clock, path):
    with TaskBudget(per_minute=20, per_day=500, store=path, clock=clock) as budget:
        budget.check_all_limits(10)
        clock.advance(61)
        budget.record_completed_tasks(8, result=budget.check_all_limits(8))
        corrections = refund(budget, lambda _: 100)
        assert {tier: each.refunded for tier, each in corrections.items()} == {"minute": 8, "day": 8}
        assert used(budget) == {"minute": 0, "day": 10}


@pytest.mark.parametrize("strategy", ["rolling", "fixed"])
def test_shares_that_are_reserved_for_priorities_are_refunded_too(tmp_path, path, strategy):
    file = tmp_path / "budget.yaml"
    file.write_text(f"tiers: {{day: 10}}\nreserved: {{1: 20%}}\nstrategy: {strategy}\nstore: {path}\n")
    with TaskBudget.from_config(file) as budget:
        budget.record_completed_tasks(8)
        assert not budget.check_all_limits(1)
        assert correct(file, "add", "2", "--tier", "day") == 0
        assert not budget.check_all_limits(3)
        assert budget.check_all_limits(2)


def test_each_correction_is_in_the_audit_log(budget, file):
    assert correct(file, "add", "5", "--tier", "day", "--reason", "backfill") == 0
    assert correct(file, "reset", "--yes") == 0
    newest, entry = [each for each in read_audit(budget) if each.policy == f"budget:{budget.settings.name}"]
    assert (entry.action, entry.key, entry.reason) == ("add", "day", "day 5: backfill")
    assert (newest.action, newest.key) == ("reset", ("minute", "day", "hour:embedding", "day:tokens"))
    assert newest.reason == "minute 16, day 11, hour:embedding 16, day:tokens 900"


def test_the_audit_log_is_not_in_the_view_of_the_document(tmp_path, path):
    with TaskBudget(per_day=5, store=path) as budget:
        budget.record_completed_tasks(5)
    file = tmp_path / "budget.yaml"
    file.write_text(f"tiers: {{day: 5}}\nstore: {path}\n")
    assert correct(file, "refund", "2") == 0
    db = sqlite3.connect(path)
    assert db.execute("SELECT time_period, current_count FROM rate_limits").fetchall() == [("day", 3)]
    db.close()


def test_a_service_shows_the_corrections_of_its_budget(tmp_path, path):
    file = tmp_path / "budget.yaml"
    file.write_text(f"tiers: {{day: 5}}\nstore: {path}\n")
    with TaskBudget.from_config(file) as budget:
        budget.record_completed_tasks(5)
    with serving(tmp_path, "policies: {api: 2/1h}\n", "--budget", str(file)) as service:
        assert correct(file, "add", "2", "--tier", "day", "--reason", "backfill") == 0
        [entry] = service.get("/v1/audit").json()["entries"]
        assert (entry["action"], entry["policy"], entry["key"]) == ("add", "budget:tasks", "day")
        assert entry["reason"] == "day 2: backfill"


def test_reset_asks_on_a_terminal(budget, file, monkeypatch, capsys):
    questions, answers = [], ["n", "y"]

    def answer(question):
        questions.append(question)
        return answers.pop(0)

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", answer)
    assert correct(file, "reset", "--tier", "day") == 0
    assert capsys.readouterr().out == "nothing was changed\n"
    assert used(budget)["day"] == 16
    assert correct(file, "reset", "--tier", "day") == 0
    assert used(budget)["day"] == 0
    assert questions[0].startswith(f"Reset the usage of day of the budget {budget.settings.name!r} in ")


def test_the_command_writes_json(budget, file, capsys):
    assert correct(file, "refund", "6", "--json") == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["action"], output["tiers"].keys()) == ("refund", {"minute", "day"})
    assert (output["tiers"]["day"]["refunded"], output["tiers"]["day"]["remaining"]) == (6, 490)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["add"], "N: expected how many permits to add, such as: tidegate budget add 50 --tier day"),
        (["refund"], "N: expected a number of tasks, or --cost, such as: tidegate budget refund 5"),
        (["add", "5", "--tier", "dya"], "--tier: unknown tier 'dya': the budget has minute, day, hour:embedding, "),
        (["add", "5", "--tier", "concurrency"], "--tier: concurrency counts running tasks, so it cannot be corrected"),
        (["refund", "5", "--tier", "day"], "--tier: is an option of 'tidegate budget add' and 'tidegate budget reset'"),
        (["refund", "5", "--type", "embeding"], "task_type: unknown task type 'embeding'"),
        (["refund", "--cost", "5"], "--cost: expected units such as tokens=1800, not '5'"),
        (["refund", "--cost", "token=5"], "cost: unknown unit 'token'"),
        (["reset"], "reset: would reset minute, day, hour:embedding, day:tokens; without a terminal to ask on, "),
        (["reset", "5"], "N: is an option of 'tidegate budget add' and 'tidegate budget refund'"),
        (["--reason", "x"], "--reason: is an option of 'tidegate budget add' and "),
        (["add", "5", "--watch"], "--watch: cannot be combined with add"),
        (["add", "5", "--store", "memory://"], "store: counts in the memory of each process"),
        (["add", "5", "--store", "missing.db"], "store: missing.db does not exist"),
    ],
)
def test_wrong_arguments_change_nothing(budget, file, capsys, arguments, message):
    before = used(budget)
    assert correct(file, *arguments) == 2
    assert message in capsys.readouterr().err
    assert used(budget) == before
    assert not [each for each in read_audit(budget) if each.policy == f"budget:{budget.settings.name}"]


def test_an_unavailable_storage_is_reported(tmp_path, capsys):
    file = tmp_path / "budget.yaml"
    file.write_text("tiers: {day: 5}\nstore: redis://:secret@127.0.0.1:1\ndeadline: 0.2\n")
    assert correct(file, "add", "5") == 3
    assert "cannot reach the store redis://…@127.0.0.1:1; nothing was changed" in capsys.readouterr().err
    assert correct(file) == 3
    assert "cannot read the store redis://…@127.0.0.1:1\n" in capsys.readouterr().err
