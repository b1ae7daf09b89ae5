"""The first process that opens a file creates or migrates its schema; databases of other programs are refused."""

import sqlite3
from pathlib import Path

import pytest

from tidegate.core.limit import Limit
from tidegate.errors import StoreUnavailable
from tidegate.policy import Policy
from tidegate.stores.sqlite import SQLiteStore
from tidegate.stores.sqlite.database import SCHEMA_VERSION, Migration, read_migrations, statements

OLD = Path(__file__).with_name("schema_1.sql")
POLICY = Policy("default", (Limit(60, "1m", "fixed_window"), Limit(30, "1h", "sliding_log")))
NOW = 1_750_000_000_000_000
PACKAGE = "tidegate.stores.sqlite"


class ExtendedStore(SQLiteStore):
    """A store with an additional table."""

    script = "CREATE TABLE extra (id);"

    def _migrations(self):
        return [*super()._migrations(), Migration(SCHEMA_VERSION, self.script, "extra")]


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
    assert read(path, "PRAGMA user_version") == [(max(each.number for each in read_migrations(PACKAGE)),)]
    assert read(path, "SELECT domain, request_count FROM rate_limiter_state ORDER BY domain") == [("a", 20), ("b", 29)]


def test_a_migration_that_fails_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "limits.db"
    db = sqlite3.connect(path)
    db.executescript(OLD.read_text(encoding="utf-8"))
    db.close()
    store = ExtendedStore(path)
    store.script = "CREATE TABLE extra (id);\nCREATE TABLE state (id);"
    with pytest.raises(StoreUnavailable, match="table state already exists"):
        store.apply_one("peek", POLICY, "a", (0, 0), NOW)
    assert read(path, "PRAGMA user_version") == [(1,)]
    assert read(path, "SELECT name FROM sqlite_master WHERE name IN ('extra', 'rate_limits')") == []
    store.script = ExtendedStore.script
    assert store.apply_one("peek", POLICY, "a", (0, 0), NOW).remaining
    store.close()


def test_migrations_are_numbered_without_gaps():
    numbers = sorted(migration.number for migration in read_migrations(PACKAGE) if migration.creates is None)
    assert numbers == list(range(1, len(numbers) + 1))


def test_a_subclass_adds_its_tables_to_a_file_of_any_version(tmp_path):
    """Also to a file whose version already equals the number of its migration."""
    path = tmp_path / "limits.db"
    charge_and_close(SQLiteStore(path))
    assert read(path, "PRAGMA user_version") == [(2,)]
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    db.close()
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
        ("PRAGMA application_id = 0x74696465; PRAGMA user_version = 99", "written by a newer tidegate .schema 99"),
        ("CREATE TABLE customers (id)", "is the database of another program"),
        ("PRAGMA user_version = 1", "is the database of another program"),
    ],
)
def test_databases_of_other_programs_and_newer_versions_are_refused(tmp_path, script, message):
    path = tmp_path / "limits.db"
    db = sqlite3.connect(path)
    db.executescript(script)
    db.close()
    store = SQLiteStore(path)
    with pytest.raises(StoreUnavailable, match=message):
        store.apply_one("acquire", POLICY, "a", (1, 1), NOW)
    store.close()
    assert read(path, "SELECT name FROM sqlite_master WHERE name = 'state'") == []
