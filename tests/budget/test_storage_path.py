"""Paths that can never work are refused when the budget is opened; folders are created; other tables are imported."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from tests.budget.both_kinds import START, used
from tidegate import ConfigError
from tidegate._cli import main
from tidegate.budget import TaskBudget
from tidegate.testing import ManualClock

DOCUMENT = """
CREATE TABLE rate_limits (
    time_period TEXT PRIMARY KEY,
    current_count INTEGER DEFAULT 0,
    window_start TIMESTAMP NOT NULL,
    window_end TIMESTAMP NOT NULL,
    last_updated TIMESTAMP DEFAULT CURRENT_TIMESTAMP
);
CREATE TABLE task_completions (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    completed_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP,
    task_type TEXT,
    task_id TEXT
);
CREATE INDEX idx_task_completions_timestamp ON task_completions(completed_at);
CREATE INDEX idx_rate_limits_period ON rate_limits(time_period);
"""
NOW = datetime.fromtimestamp(START, UTC)


def directory(path):
    path.mkdir()


def other_program(path):
    with closing(sqlite3.connect(path)) as db:
        db.executescript("CREATE TABLE users (name TEXT); CREATE TABLE rate_limits (user TEXT)")


def text_file(path):
    path.write_text("tiers: {day: 5}\n" * 100)


def newer_version(path):
    with TaskBudget(per_day=5, store=path):
        pass
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 99")


def folder_is_a_file(path):
    path.parent.rmdir()
    path.parent.write_text("")


WRONG = [
    (directory, "is a directory: expected the path of a file, such as "),
    (other_program, "is the database of another program: use another path"),
    (text_file, "the file is not an SQLite database: use another path"),
    (newer_version, "was written by a newer tidegate (schema 99, expected 5)"),
    (folder_is_a_file, "cannot create the directory "),
]


@pytest.fixture(params=WRONG, ids=lambda case: case[0].__name__)
def wrong(request, tmp_path):
    """Return a path that can never work, and what the error says."""
    path = tmp_path / "data" / "rate_limits.db"
    path.parent.mkdir()
    make, message = request.param
    make(path)
    return path, message


def environment(path):
    return {"RATE_LIMIT_ENABLED": "true", "RATE_LIMIT_PER_DAY": "5", "RATE_LIMIT_STORAGE_PATH": str(path)}


def test_every_way_to_open_a_budget_refuses_a_wrong_path(open_budget, wrong, tmp_path):
    path, message = wrong
    config = tmp_path / "budget.yaml"
    config.write_text(f"tiers: {{day: 5}}\nstore: {path}\n")
    ways = (
        (lambda: open_budget(per_day=5, store=path), "store"),
        (lambda: open_budget(per_day=5, store=f"sqlite:///{path}"), "store"),
        (lambda: open_budget(environment(path)), "RATE_LIMIT_STORAGE_PATH"),
        (lambda: open_budget(str(config)), "store"),
    )
    for start, field in ways:
        with pytest.raises(ConfigError) as caught:
            start()
        assert caught.value.field == field
        assert message in str(caught.value)


@pytest.mark.slow
def test_the_commands_refuse_a_wrong_path(wrong, tmp_path, capsys):
    path, message = wrong
    config = tmp_path / "budget.yaml"
    config.write_text(f"tiers: {{day: 5}}\nstore: {path}\n")
    assert main(["validate", str(config)]) == 2
    assert message in capsys.readouterr().err
    service = tmp_path / "service.yaml"
    service.write_text(f"policies: {{api: 2/1h}}\nbudget: {config}\nlisten: 127.0.0.1:0\n")
    assert main(["doctor", str(service)]) != 0
    assert message in capsys.readouterr().out
    command = [sys.executable, "-m", "tidegate", "start", str(service)]
    started = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert started.returncode == 2
    assert message in started.stderr


def test_validate_and_doctor_create_nothing(tmp_path, capsys):
    config, folder = tmp_path / "budget.yaml", tmp_path / "data"
    config.write_text(f"tiers: {{day: 5}}\nstore: {folder / 'x.db'}\n")
    assert main(["validate", str(config)]) == 0
    service = tmp_path / "service.yaml"
    service.write_text(f"policies: {{api: 2/1h}}\nbudget: {config}\nlisten: 127.0.0.1:0\n")
    main(["doctor", str(service)])
    assert "the database of the budget does not exist yet" in capsys.readouterr().out
    assert not folder.exists()


@pytest.mark.parametrize("way", ["arguments", "environment", "file"])
def test_the_folder_and_the_file_are_created_when_the_budget_is_opened(open_budget, tmp_path, way):
    path = tmp_path / "a" / "b" / "rate_limits.db"
    config = tmp_path / "budget.yaml"
    config.write_text(f"tiers: {{day: 5}}\nstore: {path}\n")
    if way == "arguments":
        open_budget(per_day=5, store=path)
    else:
        open_budget(environment(path) if way == "environment" else str(config))
    assert path.exists()


# ---- the tables of the document --------------------------------------------------------------------------------------


@pytest.fixture
def document(path):
    """Create a database of a program that followed the document."""

    def create(ages, counts=()):
        with closing(sqlite3.connect(path)) as db, db:
            db.executescript(DOCUMENT)
            for number, age in enumerate(ages):
                at = f"{NOW - age:%Y-%m-%d %H:%M:%S}"
                query = "INSERT INTO task_completions (completed_at, task_type, task_id) VALUES (?, 'embedding', ?)"
                db.execute(query, (at, f"task-{number}"))
            for period, count, start, end in counts:
                query = "INSERT INTO rate_limits VALUES (?, ?, ?, ?, ?)"
                db.execute(query, (period, count, str(start), str(end), str(NOW)))
        return path

    return create


HOURS = timedelta(hours=1)
DAYS = timedelta(days=1)


def test_completions_of_the_document_are_counted(open_budget, document, path):
    document([0.5 * HOURS] * 3 + [2 * HOURS] * 4 + [3 * DAYS] * 5 + [20 * DAYS] * 6 + [34 * DAYS] * 7)
    budget = open_budget(per_minute=5, per_hour=50, per_day=50, per_week=50, per_month=100)
    assert used(budget) == {"minute": 0, "hour": 3, "day": 7, "week": 12, "month": 18}
    budget.record_completed_tasks(1)
    with closing(sqlite3.connect(path)) as db:
        rows = db.execute("SELECT task_type, task_id FROM task_completions ORDER BY completed_at").fetchall()
    assert len(rows) == 26
    assert rows[-2:] == [("embedding", "task-2"), (None, None)]
    budget.close()
    assert used(open_budget(per_minute=5, per_hour=50, per_day=50, per_week=50, per_month=100))["month"] == 19


def test_counts_of_fixed_windows_are_taken_over(open_budget, document):
    """The program wrote no completions: it counted fixed windows. The day is a Sunday, the 15th."""
    midnight = NOW.replace(hour=0, minute=0, second=0)
    document(
        [],
        [
            ("day", 8, midnight, midnight + DAYS),
            ("week", 20, midnight - 6 * DAYS, midnight + DAYS),
            ("month", 60, midnight - 14 * DAYS, midnight + 15 * DAYS),
        ],
    )
    budget = open_budget(per_day=10, per_week=50, per_month=100, strategy="fixed")
    assert used(budget) == {"day": 8, "week": 20, "month": 60}
    assert budget.check_all_limits(3).tier == "day"


def test_a_database_of_the_document_passes_validation_unchanged(document, tmp_path, capsys):
    path = document([HOURS])
    before = path.read_bytes()
    config = tmp_path / "budget.yaml"
    config.write_text(f"tiers: {{day: 5}}\nstore: {path}\n")
    assert main(["validate", str(config)]) == 0
    with TaskBudget.to_read(TaskBudget(per_day=5, enabled=False, store=path).settings) as reader:
        assert reader.get_current_usage() == {}
    assert path.read_bytes() == before


def test_a_reader_does_not_import_a_database_of_the_document(document):
    path = document([HOURS])
    before = path.read_bytes()
    settings = TaskBudget(per_day=5, store="memory://").settings
    with TaskBudget.to_read(replace(settings, store=path), clock=ManualClock(start=START)) as reader:
        assert reader.health()["database"]["connected"] is False
    assert path.read_bytes() == before
