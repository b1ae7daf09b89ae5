"""The schema: made and brought up to date by whoever opens the file first, in one step; not what is not ours."""

import sqlite3
from pathlib import Path

import pytest

from tidegate.core.limit import Limit
from tidegate.errors import StoreUnavailable
from tidegate.policy import Policy
from tidegate.stores.sqlite import SQLiteStore, file

OLD = Path(__file__).with_name("schema_1.sql")
POLICY = Policy("default", (Limit(60, "1m", "fixed_window"), Limit(30, "1h", "sliding_log")))
NOW = 1_750_000_000_000_000


def read(path, query):
    db = sqlite3.connect(path)
    try:
        return db.execute(query).fetchall()
    finally:
        db.close()


def test_a_file_of_an_older_version_is_migrated_and_keeps_its_states(tmp_path):
    path = tmp_path / "limits.db"
    db = sqlite3.connect(path)
    db.executescript(OLD.read_text(encoding="utf-8"))
    db.close()
    assert read(path, "PRAGMA user_version") == [(1,)]
    store = SQLiteStore(path)
    # 20 calls each by two keys, made just before; one of them has a log of 28 entries as rows.
    assert store.apply_one("peek", POLICY, "a", (0, 0), NOW).views[:1] == [(40, 0, 59_000_000)]
    assert store.apply_one("acquire", POLICY, "b", (1, 1), NOW).views == [
        (31, 0, 59_000_000),
        (1, 0, 3_600_000_000),
    ]
    store.close()
    assert read(path, "PRAGMA user_version") == [(max(dict(file.schema())),)]
    assert read(path, "SELECT domain, request_count FROM rate_limiter_state ORDER BY domain") == [("a", 20), ("b", 29)]


def test_a_migration_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "limits.db"
    db = sqlite3.connect(path)
    db.executescript(OLD.read_text(encoding="utf-8"))
    db.close()
    steps = dict(file.schema())
    broken = [*steps.items(), (max(steps) + 1, "CREATE TABLE later (id);\nCREATE TABLE state (id);")]
    monkeypatch.setattr(file, "schema", lambda: iter(broken))
    store = SQLiteStore(path)
    with pytest.raises(StoreUnavailable, match="table state already exists"):
        store.apply_one("peek", POLICY, "a", (0, 0), NOW)
    assert read(path, "PRAGMA user_version") == [(1,)]
    assert read(path, "SELECT name FROM sqlite_master WHERE name IN ('later', 'rate_limits')") == []
    monkeypatch.undo()
    assert store.apply_one("peek", POLICY, "a", (0, 0), NOW).remaining
    store.close()


def test_steps_are_numbered_without_gaps():
    assert sorted(dict(file.schema())) == list(range(1, len(dict(file.schema())) + 1))


def test_scripts_are_split_at_statements():
    script = "-- a; comment\nCREATE TABLE a (b DEFAULT ';');\nINSERT INTO a VALUES ('x');\n"
    assert [statement.strip() for statement in file.statements(script)] == [
        "-- a; comment\nCREATE TABLE a (b DEFAULT ';');",
        "INSERT INTO a VALUES ('x');",
    ]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("PRAGMA application_id = 0x74696465; PRAGMA user_version = 99", "written by a newer tidegate .schema 99"),
        ("CREATE TABLE customers (id)", "is the database of another program"),
        ("PRAGMA user_version = 1", "is the database of another program"),
    ],
)
def test_what_is_not_ours_is_left_alone(tmp_path, script, message):
    path = tmp_path / "limits.db"
    db = sqlite3.connect(path)
    db.executescript(script)
    db.close()
    store = SQLiteStore(path)
    with pytest.raises(StoreUnavailable, match=message):
        store.apply_one("acquire", POLICY, "a", (1, 1), NOW)
    store.close()
    assert read(path, "SELECT name FROM sqlite_master WHERE name = 'state'") == []
