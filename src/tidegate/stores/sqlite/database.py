"""The file: opening it, bringing its schema up to date, and what its errors mean."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from importlib.resources import files
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.errors import StoreUnavailable
from tidegate.files import make_private_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

APPLICATION_ID: Final = 0x74696465  # "tide", in the file's header: what tells our user_version from another program's
SCHEMA_VERSION: Final = 3  # the newest version this program can read: 1 and 2 are the store's, 3 adds tables of budgets
CACHED_STATEMENTS: Final = 64
WAL_PAGES: Final = 4000  # written back into the file when the write-ahead log has so many
WAL_BYTES: Final = 16 * 2**20  # what the write-ahead log is cut down to afterwards, should a reader have held it up

BUSY_CODES: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
ADVICE: Final = {
    sqlite3.SQLITE_BUSY: "another connection kept it locked for too long: look for a program with a long transaction "
    "on it, or allow more time with ?busy_timeout=10s",
    sqlite3.SQLITE_FULL: "the disk is full: free some space; the next call tries again",
    sqlite3.SQLITE_READONLY: "it is read-only: make the file, its folder and its disk writable; the next call tries "
    "again",
    sqlite3.SQLITE_PERM: "it is not accessible: give this user the right to read and write the file and its folder",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened: the folder must exist, and this user must be able to read and write "
    "the file and its folder; the next call tries again",
    sqlite3.SQLITE_IOERR: "the disk reports an error: see the system's log for its state; the next call tries again",
    sqlite3.SQLITE_CORRUPT: "it is damaged: move it away, together with its -wal and -shm, to start afresh, or put a "
    "backup in its place; the next call tries again",
    sqlite3.SQLITE_NOTADB: "it is no SQLite database: give another path, or move it away to start afresh",
}
ADVICE[sqlite3.SQLITE_LOCKED] = ADVICE[sqlite3.SQLITE_BUSY]
DEFAULT_ADVICE: Final = "SQLite refused: see its message; the next call tries again"


def error_code(error: sqlite3.Error) -> int:
    """Give SQLite's primary code of an error; 0 for one that Python's driver raised by itself."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def explain(error: sqlite3.Error, attempt: str, path: Path) -> StoreUnavailable:
    """Say what was attempted, what went wrong and what to do about it."""
    advice = ADVICE.get(error_code(error), DEFAULT_ADVICE)
    return StoreUnavailable(f"could not {attempt} in {path}; nothing was charged. {error}: {advice}")


class Migration(NamedTuple):
    """A numbered step of the schema.

    A step of the store itself is missing from a file whose version is lower than its number. A step of a subclass names
    a table that it creates, and is missing from a file without this table, so files that the subclass does not use
    can get later steps of the store without it.
    """

    number: int
    script: str
    table: str | None = None


def connect(path: Path) -> sqlite3.Connection:
    """Open the file, and create it (for its owner alone) if it is not there; `prepare` comes next."""
    with suppress(OSError):  # SQLite says what is wrong
        make_private_file(path)
    return sqlite3.connect(
        f"{path.as_uri()}?mode=rwc",
        uri=True,
        timeout=0,  # who waits for a lock, and how, is the store's business
        isolation_level=None,
        check_same_thread=False,  # the store has a lock of its own
        cached_statements=CACHED_STATEMENTS,
    )


def prepare(db: sqlite3.Connection, path: Path, synchronous: str, migrations: Sequence[Migration]) -> None:
    """Set up a new connection, and bring the schema of its file up to date."""
    db.execute(f"PRAGMA synchronous = {synchronous}")
    db.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
    db.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
    if db.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        db.execute("PRAGMA journal_mode = WAL")
    migrate(db, path, migrations)


def discard(db: sqlite3.Connection) -> None:
    """End whatever transaction a connection is in, and close it. Nothing is lost by doing so twice."""
    with suppress(sqlite3.Error):  # it is closed already, or the disk is gone
        if db.in_transaction:
            db.execute("ROLLBACK")  # a statement that somebody still refers to would keep it open
    with suppress(sqlite3.Error):
        db.close()


def migrate(db: sqlite3.Connection, path: Path, migrations: Sequence[Migration]) -> None:
    """Apply the migrations that the file lacks, all in one transaction; the caller discards it on an error."""
    if not find_missing(db, find_version(db, path), migrations):
        return
    db.execute("BEGIN IMMEDIATE")
    version = find_version(db, path)  # another process may have been faster
    for migration in find_missing(db, version, migrations):
        for statement in statements(migration.script):
            db.execute(statement)
        version = max(version, migration.number)
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {version}")
    db.execute("COMMIT")


def find_missing(db: sqlite3.Connection, version: int, migrations: Sequence[Migration]) -> list[Migration]:
    """List the migrations that a file of this version lacks, in the order of their numbers."""
    missing = [
        migration
        for migration in migrations
        if (migration.number > version if migration.table is None else not has_table(db, migration.table))
    ]
    return sorted(missing, key=lambda migration: migration.number)


def has_table(db: sqlite3.Connection, name: str) -> bool:
    """Return whether the file has a table."""
    query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    return db.execute(query, (name,)).fetchone() is not None


def find_version(db: sqlite3.Connection, path: Path) -> int:
    """Read the version of the file's schema; refuse one that is newer than this program, or not ours."""
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        if version or db.execute("SELECT * FROM sqlite_master LIMIT 1").fetchone():
            raise StoreUnavailable(f"{path} is the database of another program: give a path of its own to the store")
        return 0
    if version > SCHEMA_VERSION:
        raise StoreUnavailable(
            f"{path} was written by a newer tidegate (schema {version}, this one knows {SCHEMA_VERSION}): upgrade this "
            "one, or give another path"
        )
    return version


def read_migrations(package: str, table: str | None = None) -> list[Migration]:
    """Read the migrations of a package, numbered by their file names: `0001_tables.sql` is number 1."""
    return [
        Migration(int(file.name.partition("_")[0]), file.read_text(encoding="utf-8"), table)
        for file in files(package).iterdir()
        if file.name.endswith(".sql")
    ]


def statements(script: str) -> Iterator[str]:
    """Split a script; `executescript` would commit the transaction it stands in."""
    start = 0
    for end in count(1):
        if end > len(script):
            return
        if script[end - 1] == ";" and sqlite3.complete_statement(script[start:end]):
            yield script[start:end]
            start = end
