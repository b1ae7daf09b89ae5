"""`tidegate budget`."""

import json

import pytest

from tests.budget.both_kinds import START
from tidegate.budget import TaskBudget
from tidegate.cli import main
from tidegate.cli.budget import format_duration, show
from tidegate.cli.output import Output
from tidegate.testing import ManualClock


@pytest.fixture
def environ(monkeypatch, path):
    """Set the variables of a budget that is partly used."""
    monkeypatch.setenv("RATE_LIMIT_PER_MINUTE", "20")
    monkeypatch.setenv("RATE_LIMIT_PER_DAY", "500")
    monkeypatch.setenv("RATE_LIMIT_STORAGE_PATH", str(path))
    with TaskBudget(per_minute=20, per_day=500, storage=path) as budget:
        budget.record_completed_tasks(16)
    return monkeypatch


def test_the_command_draws_bars(environ, capsys, path):
    assert main(["budget"]) == 0
    title, minute, day = capsys.readouterr().out.splitlines()
    assert title == f"tasks, rolling windows, in {path}"
    assert minute.startswith("minute  " + "█" * 24 + "░" * 6 + "   16 / 20   80 %  ")
    assert day.startswith("day     █" + "░" * 29 + "  16 / 500    3 %  runs out in ")


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
    file.write_text(f"tiers: {{hour: 50}}\nenabled: false\nstorage: {tmp_path / 'other.db'}\n")
    assert main(["budget", "--config", str(file), "--storage", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tiers"]["hour"]["quota"] == 50


def test_the_command_changes_nothing(environ, path, capsys):
    with TaskBudget(per_minute=20, per_day=500, storage=path) as budget:
        budget.check_all_limits(3)
        main(["budget"])
        assert budget.get_current_usage()["day"].used == 19


@pytest.mark.parametrize(
    ("arguments", "variables", "code", "message"),
    [
        (["--storage", "missing.db"], {}, 2, "storage: missing.db does not exist"),
        (["--watch", "0"], {}, 2, "--watch: expected a number of seconds above 0, not 0"),
        ([], {"RATE_LIMIT_PER_DAY": "x", "RATE_LIMIT_STRATEGY": "y"}, 2, "2 settings of the budget are invalid"),
        (["--config", "missing.yaml"], {}, 2, "missing.yaml: "),
        (["--storage", "."], {}, 3, "cannot read the storage ."),
    ],
)
def test_wrong_arguments_and_settings_are_reported(environ, capsys, arguments, variables, code, message):
    for name, value in variables.items():
        environ.setenv(name, value)
    assert main(["budget", *arguments]) == code
    assert message in capsys.readouterr().err


def test_the_command_repeats_with_watch(path, capsys):
    clock = ManualClock(start=START)
    with TaskBudget(per_minute=10, storage=path, clock=clock) as budget:
        budget.record_completed_tasks(10)
        show(budget, Output(), clock, 30.0, rounds=3)
    lines = capsys.readouterr().out.splitlines()[1::2]
    assert [line.split("%")[1].strip() for line in lines] == [
        "used up; completely reset in 1 min",
        "used up; completely reset in 30 s",
        "not in use",
    ]
    assert clock.now() == START + 60


def test_watching_on_a_terminal_redraws_in_place(path, capsys):
    clock = ManualClock(start=START)
    output = Output()
    output.live = True
    with TaskBudget(per_minute=10, storage=path, clock=clock) as budget:
        show(budget, output, clock, 1.0, rounds=2)
    assert capsys.readouterr().out.count("\x1b[2A\x1b[J") == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 s"), (59, "59 s"), (60, "1 min"), (3661, "1 h 1 min"), (90_000, "1 d 1 h"), (86_460, "1 d")],
)
def test_durations_are_written_in_two_units(seconds, text):
    assert format_duration(seconds) == text
