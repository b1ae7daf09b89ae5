"""`tidegate budget`."""

import json
import os

import pytest

from tests.budget.both_kinds import START
from tests.cases import cases
from tidegate._cli import main
from tidegate._cli.budget import show
from tidegate._cli.durations import read_duration
from tidegate._cli.live import watch
from tidegate._cli.output import CLEAR_SCREEN, Output
from tidegate._policy.durations import format_duration
from tidegate.budget import TaskBudget
from tidegate.testing import ManualClock


@pytest.fixture
def environ(monkeypatch, path):
    """Set the variables of a budget that is partly used."""
    monkeypatch.setenv("RATE_LIMIT_PER_MINUTE", "20")
    monkeypatch.setenv("RATE_LIMIT_PER_DAY", "500")
    monkeypatch.setenv("RATE_LIMIT_STORAGE_PATH", str(path))
    with TaskBudget(per_minute=20, per_day=500, store=path) as budget:
        budget.record_completed_tasks(16)
    return monkeypatch


def test_the_command_draws_bars(environ, capsys, path):
    assert main(["budget"]) == 0
    title, head, minute, day, note = capsys.readouterr().out.splitlines()
    assert title == f"tasks, rolling windows, in {path}"
    assert head.split() == ["tier", "used", "of", "forecast"]
    assert minute.startswith("minute  " + "█" * 24 + "░" * 6 + "    16   20  80 %  ")
    assert day.startswith("day     █" + "░" * 29 + "    16  500   3 %  runs out in ")
    assert note == "The settings do not enable this budget: programs that use them are not limited."
    environ.setenv("RATE_LIMIT_ENABLED", "true")
    assert main(["budget"]) == 0
    assert "enable" not in capsys.readouterr().out


def test_the_command_logs_no_milestones(environ, caplog, capsys):
    environ.setenv("RATE_LIMIT_ENABLED", "true")
    environ.setenv("RATE_LIMIT_PER_MINUTE", "16")
    assert main(["budget"]) == 0
    assert "100 %" in capsys.readouterr().out
    assert not caplog.records


def test_the_command_writes_json(environ, capsys):
    assert main(["budget", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["budget"], output["strategy"]) == ("tasks", "rolling")
    day = output["tiers"]["day"]
    assert (day["used"], day["quota"], day["remaining"], day["unit"]) == (16, 500, 484, "tasks")
    assert day["pace"] == pytest.approx(16 / 60)
    assert day["runs_out_in"] == pytest.approx(484 / (16 / 60 - 16 / 86_400))


def test_a_file_replaces_the_variables(tmp_path, path, capsys, environ):
    file = tmp_path / "budget.yaml"
    file.write_text(f"tiers: {{hour: 50}}\nenabled: false\nstore: {tmp_path / 'other.db'}\n")
    assert main(["budget", "--config", str(file), "--store", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tiers"]["hour"]["quota"] == 50


def test_the_command_changes_nothing(environ, path, capsys):
    with TaskBudget(per_minute=20, per_day=500, store=path) as budget:
        budget.check_all_limits(3)
        main(["budget"])
        assert budget.get_current_usage()["day"].used == 19


@pytest.mark.parametrize(
    ("arguments", "variables", "code", "message"),
    [
        (["--store", "missing.db"], {}, 2, "store: missing.db does not exist"),
        ([], {"RATE_LIMIT_PER_DAY": "x", "RATE_LIMIT_STRATEGY": "y"}, 2, "2 settings of the budget are invalid"),
        (["--config", "missing.yaml"], {}, 2, "missing.yaml: "),
        (["--store", "."], {}, 2, "is a directory: expected the path of a file"),
    ],
)
def test_wrong_arguments_and_settings_are_reported(environ, capsys, arguments, variables, code, message):
    for name, value in variables.items():
        environ.setenv(name, value)
    assert main(["budget", *arguments]) == code
    assert message in capsys.readouterr().err


def test_the_command_repeats_with_watch(path, capsys):
    clock = ManualClock(start=START)
    with TaskBudget(per_minute=10, store=path, clock=clock) as budget:
        budget.record_completed_tasks(10)
        output = Output()
        watch(lambda: show(budget, output), output, 30.0, clock=clock, rounds=3)
    lines = capsys.readouterr().out.splitlines()[2::3]
    assert [line.split("%")[1].strip() for line in lines] == [
        "used up; completely reset in 1m",
        "used up; completely reset in 30s",
        "not in use",
    ]
    assert clock.now() == START + 60


def test_watching_on_a_terminal_redraws_in_place(path, capsys):
    clock = ManualClock(start=START)
    output = Output()
    output.live = True
    with TaskBudget(per_minute=10, store=path, clock=clock) as budget:
        watch(lambda: show(budget, output), output, 1.0, clock=clock, rounds=2)
    assert capsys.readouterr().out.count(CLEAR_SCREEN) == 2


@cases(
    ("seconds", "text"),
    [
        (0.0, "1ms"),
        (0.2, "200ms"),
        (0.9999, "1s"),
        (59, "59s"),
        (59.01, "1m"),
        (60, "1m"),
        (3661, "1h2m"),
        (90_000, "1d1h"),
        (86_460, "1d1h"),
        (7199, "2h"),
        (172_801, "2d1h"),
    ],
)
def test_durations_are_written_in_two_units_rounded_up(seconds, text):
    assert format_duration(seconds) == text
    assert read_duration(text) > 0


def test_the_command_does_not_claim_that_an_unset_variable_is_true(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("RATE_LIMIT_")]:
        monkeypatch.delenv(name)
    assert main(["budget"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("tidegate: no budget is configured: set RATE_LIMIT_PER_MINUTE, ")
    assert "enabled" not in message
    monkeypatch.setenv("RATE_LIMIT_ENABLED", "true")
    assert main(["budget"]) == 2
    assert "RATE_LIMIT_PER_MINUTE: the budget is enabled but has no limits" in capsys.readouterr().err
