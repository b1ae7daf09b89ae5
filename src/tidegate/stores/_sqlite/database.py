"""Opens the database file, creates its tables, and explains its errors."""

from __future__ import annotations

import re
import sqlite3
from contextlib import suppress
from importlib.resources import files
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate._runtime.files import make_private_file
from tidegate.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

APPLICATION_ID: Final = 0x74696465  # "tide", in the file's header: identifies files of tidegate
SCHEMA_VERSION: Final = 5  # of the files that can be read
CACHED_STATEMENTS: Final = 64
WAL_PAGES: Final = 4000  # size of the write-ahead log at which it is written back into the file
WAL_BYTES: Final = 16 * 2**20  # the write-ahead log is truncated to this size afterwards, if a reader delayed it

CREATED_TABLE: Final = re.compile(r"^CREATE TABLE (\w+)", re.MULTILINE)
BUSY_CODES: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
DAMAGED_CODES: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
ADVICE: Final = {
    sqlite3.SQLITE_BUSY: "another connection kept the file locked for too long: look for a program with a long "
    "transaction on it, or allow more time with ?busy_timeout=10s",
    sqlite3.SQLITE_FULL: "the disk is full: free some space; the next call retries",
    sqlite3.SQLITE_READONLY: "the file is read-only: make the file, its folder and its disk writable; the next call "
    "retries",
    sqlite3.SQLITE_PERM: "permission denied: allow this user to read and write the file and its folder",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened: its folder must exist, and this user must be able to read and "
    "write the file and its folder; the next call retries",
    sqlite3.SQLITE_IOERR: "the disk reports an error: see the system log; the next call retries",
    sqlite3.SQLITE_CORRUPT: "the file is damaged: restore a backup, or move the file away, together with its -wal and "
    "-shm files, to start with an empty store; the next call retries",
    sqlite3.SQLITE_NOTADB: "the file is not an SQLite database: use another path, or move the file away to start with "
    "an empty store",
}
ADVICE[sqlite3.SQLITE_LOCKED] = ADVICE[sqlite3.SQLITE_BUSY]
# Errors of opening a file that no retry repairs: the path is wrong, or this user may not use it.
WRONG_PATH_CODES: Final = (
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
)
DEFAULT_ADVICE: Final = "SQLite reported an error; the next call retries"


def error_code(error: sqlite3.Error) -> int:
    """Return SQLite's primary code of an error; 0 for an error of Python's driver itself."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def explain(error: sqlite3.Error, attempt: str, path: Path) -> StoreUnavailable:
    """Build an error that says what was attempted, what went wrong and what to do."""
    advice = ADVICE.get(error_code(error), DEFAULT_ADVICE)
    return StoreUnavailable(f"could not {attempt} in {path}; nothing was charged. {error}: {advice}")


class WrongFileError(StoreUnavailable):
    """The file is the database of another program, or of another version."""


class PackageTables(NamedTuple):
    """Tables and views that belong together: they are missing from a file that lacks the first of these tables.

    A subclass of the store has a schema of its own: only files that it uses have its tables.
    """

    script: str

    @property
    def first_table(self) -> str:
        """The name of the first table that the script creates."""
        found = CREATED_TABLE.search(self.script)
        assert found is not None  # noqa: S101 - each schema has a table
        return found[1]


def connect(path: Path, *, create: bool = True) -> sqlite3.Connection:
    """Open the file; call `prepare` next. With `create`, a missing file is created, readable only for its owner."""
    if create:
        with suppress(OSError):  # SQLite reports the error below
            make_private_file(path)
    return sqlite3.connect(
        f"{path.as_uri()}?mode={'rwc' if create else 'rw'}",
        uri=True,
        timeout=0,  # the store itself waits for locks
        isolation_level=None,
        check_same_thread=False,  # the store has its own lock
        cached_statements=CACHED_STATEMENTS,
    )


def prepare(db: sqlite3.Connection, path: Path, synchronous: str, schemas: Sequence[PackageTables]) -> None:
    """Configure a new connection, and create the tables that its file lacks."""
    db.execute(f"PRAGMA synchronous = {synchronous}")
    db.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
    db.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
    if db.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        db.execute("PRAGMA journal_mode = WAL")
    create_tables(db, path, schemas)


def discard(db: sqlite3.Connection) -> None:
    """Roll back any open transaction of a connection, and close it. May be called twice."""
    with suppress(sqlite3.Error):  # already closed, or the disk is unavailable
        if db.in_transaction:
            db.execute("ROLLBACK")  # else a statement that is still referenced keeps the transaction open
    with suppress(sqlite3.Error):
        db.close()


def create_tables(db: sqlite3.Connection, path: Path, schemas: Sequence[PackageTables]) -> None:
    """Create the tables that the file lacks, all in one transaction; the caller discards it on an error."""
    check_version(db, path)
    if all(has_object(db, schema.first_table) for schema in schemas):
        return
    db.execute("BEGIN IMMEDIATE")
    check_version(db, path)
    for schema in schemas:
        if not has_object(db, schema.first_table):  # another process may have been faster
            for statement in statements(schema.script):
                db.execute(statement)
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    db.execute("COMMIT")


def has_object(db: sqlite3.Connection, name: str) -> bool:
    """Return whether the file has a table or view."""
    query = "SELECT 1 FROM sqlite_master WHERE type IN ('table', 'view') AND name = ?"
    return db.execute(query, (name,)).fetchone() is not None


def check_version(db: sqlite3.Connection, path: Path) -> None:
    """Raise WrongFileError if the file is of another version, or of another program; an empty file is neither."""
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        if version or db.execute("SELECT * FROM sqlite_master LIMIT 1").fetchone():
            raise WrongFileError(f"{path} is the database of another program: use another path")
    elif version > SCHEMA_VERSION:
        raise WrongFileError(
            f"{path} was written by a newer tidegate (schema {version}, expected {SCHEMA_VERSION}): upgrade "
            "tidegate, or use another path"
        )
    elif version < SCHEMA_VERSION:
        raise WrongFileError(
            f"{path} was written by an older tidegate that was never released (schema {version}, expected "
            f"{SCHEMA_VERSION}): move the file away, together with its -wal and -shm files, to start with an empty file"
        )


def read_schema(package: str) -> PackageTables:
    """Read the schema of a package."""
    return PackageTables((files(package) / "schema.sql").read_text(encoding="utf-8"))


def statements(script: str) -> Iterator[str]:
    """Split a script into statements; `executescript` would commit the current transaction."""
    start = 0
    for end in count(1):
        if end > len(script):
            return
        if script[end - 1] == ";" and sqlite3.complete_statement(script[start:end]):
            yield script[start:end]
            start = end
