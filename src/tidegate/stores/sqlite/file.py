"""The file: opening it, bringing its schema up to date, and what its errors mean."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from importlib.resources import files
from itertools import count
from typing import TYPE_CHECKING, Final

from tidegate.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

APPLICATION: Final = 0x74696465  # "tide", in the file's header: what tells our user_version from another program's
STATEMENTS: Final = 64
WAL_PAGES: Final = 4000  # written back into the file when the write-ahead log has so many
WAL_BYTES: Final = 16 * 2**20  # what the write-ahead log is cut down to afterwards, should a reader have held it up

BUSY: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
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
OTHERWISE: Final = "SQLite refused: see its message; the next call tries again"


def error_code(error: sqlite3.Error) -> int:
    """Give SQLite's primary code of an error; 0 for one that Python's driver raised by itself."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def explain(error: sqlite3.Error, attempt: str, path: Path) -> StoreUnavailable:
    """Say what was attempted, what went wrong and what to do about it."""
    advice = ADVICE.get(error_code(error), OTHERWISE)
    return StoreUnavailable(f"could not {attempt} in {path}; nothing was charged. {error}: {advice}")


def connect(path: Path) -> sqlite3.Connection:
    """Open the file, and create it if it is not there; `prepare` comes next."""
    return sqlite3.connect(
        f"{path.as_uri()}?mode=rwc",
        uri=True,
        timeout=0,  # who waits for a lock, and how, is the store's business
        isolation_level=None,
        check_same_thread=False,  # the store has a lock of its own
        cached_statements=STATEMENTS,
    )


def prepare(db: sqlite3.Connection, path: Path, synchronous: str) -> None:
    """Set up a new connection, and bring the schema of its file up to date."""
    db.execute(f"PRAGMA synchronous = {synchronous}")
    db.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
    db.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
    if db.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        db.execute("PRAGMA journal_mode = WAL")
    migrate(db, path)


def discard(db: sqlite3.Connection) -> None:
    """End whatever transaction a connection is in, and close it. Nothing is lost by doing so twice."""
    with suppress(sqlite3.Error):  # it is closed already, or the disk is gone
        if db.in_transaction:
            db.execute("ROLLBACK")  # a statement that somebody still refers to would keep it open
    with suppress(sqlite3.Error):
        db.close()


def migrate(db: sqlite3.Connection, path: Path) -> None:
    """Apply the steps that the file's schema lacks, all in one transaction; whoever calls discards it on an error."""
    steps = dict(schema())
    newest = max(steps)
    if (version := find_version(db, path, newest)) == newest:
        return
    db.execute("BEGIN IMMEDIATE")
    version = find_version(db, path, newest)  # another process may have been faster
    for number in range(version + 1, newest + 1):
        for statement in statements(steps[number]):
            db.execute(statement)
    db.execute(f"PRAGMA application_id = {APPLICATION}")
    db.execute(f"PRAGMA user_version = {newest}")
    db.execute("COMMIT")


def find_version(db: sqlite3.Connection, path: Path, newest: int) -> int:
    """Read the version of the file's schema; refuse one that is newer than this program, or not ours."""
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
        if version or db.execute("SELECT * FROM sqlite_master LIMIT 1").fetchone():
            raise StoreUnavailable(f"{path} is the database of another program: give a path of its own to the store")
        return 0
    if version > newest:
        raise StoreUnavailable(
            f"{path} was written by a newer tidegate (schema {version}, this one knows {newest}): upgrade this one, "
            "or give another path"
        )
    return version


def schema() -> Iterator[tuple[int, str]]:
    """Give the steps that make the schema, by number: `0001_tables.sql` is step 1."""
    folder = files("tidegate.stores.sqlite")
    for step in folder.iterdir():
        if step.name.endswith(".sql"):
            yield int(step.name.partition("_")[0]), step.read_text(encoding="utf-8")


def statements(script: str) -> Iterator[str]:
    """Split a script; `executescript` would commit the transaction it stands in."""
    start = 0
    for end in count(1):
        if end > len(script):
            return
        if script[end - 1] == ";" and sqlite3.complete_statement(script[start:end]):
            yield script[start:end]
            start = end
