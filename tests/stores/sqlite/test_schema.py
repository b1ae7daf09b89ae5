"""The first process that opens a file creates its tables; databases of other programs and versions are refused."""

import sqlite3

import pytest

from tidegate._policy import Policy
from tidegate.core._limit import Limit
from tidegate.errors import StoreUnavailable
from tidegate.stores._sqlite import SQLiteStore
from tidegate.stores._sqlite.database import APPLICATION_ID, SCHEMA_VERSION, PackageTables, statements

POLICY = Policy("default", (Limit(60, "1m", "fixed_window"), Limit(30, "1h", "sliding_log")))
NOW = 1_750_000_000_000_000


class ExtendedStore(SQLiteStore):
    """A store with an additional table."""

    script = "CREATE TABLE extra (id);"

    def _schemas(self):
        return [*super()._schemas(), PackageTables(self.script)]


def read(path, query):
    db = sqlite3.connect(path)
    try:
        return db.execute(query).fetchall()
    finally:
        db.close()


def test_a_schema_that_fails_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "limits.db"
    store = ExtendedStore(path)
    store.script = "CREATE TABLE extra (id);\nCREATE TABLE state (id);"
    with pytest.raises(StoreUnavailable, match="table state already exists"):
        store.apply_one("peek", POLICY, "a", (0, 0), NOW)
    assert read(path, "SELECT name FROM sqlite_master") == []
    store.script = ExtendedStore.script
    assert store.apply_one("peek", POLICY, "a", (0, 0), NOW).remaining
    store.close()


def test_a_subclass_adds_its_tables_to_a_file_of_the_store(tmp_path):
    path = tmp_path / "limits.db"
    charge_and_close(SQLiteStore(path))
    assert read(path, "SELECT name FROM sqlite_master WHERE name = 'extra'") == []
    for _ in range(2):
        charge_and_close(ExtendedStore(path))
        assert read(path, "SELECT name FROM sqlite_master WHERE name = 'extra'") == [("extra",)]
        charge_and_close(SQLiteStore(path))
        assert read(path, "PRAGMA user_version") == [(SCHEMA_VERSION,)]


def charge_and_close(store):
    """Charge a key, and close the store."""
    assert store.apply_one("acquire", POLICY, "a", (1, 1), NOW)
    store.close()


def test_scripts_are_split_at_statements():
    script = "-- a; comment\nCREATE TABLE a (b DEFAULT ';');\nINSERT INTO a VALUES ('x');\n"
    assert [statement.strip() for statement in statements(script)] == [
        "-- a; comment\nCREATE TABLE a (b DEFAULT ';');",
        "INSERT INTO a VALUES ('x');",
    ]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = 99", "by a newer tidegate .schema 99"),
        (
            f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = 3",
            "never released .schema 3.*move the file",
        ),
        ("CREATE TABLE customers (id)", "is the database of another program"),
        ("PRAGMA user_version = 1", "is the database of another program"),
    ],
)
def test_databases_of_other_programs_and_versions_are_refused(tmp_path, script, message):
    path = tmp_path / "limits.db"
    db = sqlite3.connect(path)
    db.executescript(script)
    db.close()
    store = SQLiteStore(path)
    with pytest.raises(StoreUnavailable, match=message):
        store.apply_one("acquire", POLICY, "a", (1, 1), NOW)
    store.close()
    assert read(path, "SELECT name FROM sqlite_master WHERE name = 'state'") == []
