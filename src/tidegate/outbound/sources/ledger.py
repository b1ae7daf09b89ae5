"""State that survives a crash, in one SQLite file: each source's next run and last result, and requests in flight.

Every step is written before it is performed: a source is `running` before its permit is requested, so after a kill -9
the next service knows which requests may have been sent without a response. The file contains no URL, header or key.
"""

from __future__ import annotations

import json
import sqlite3
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypedDict

from tidegate.errors import StoreUnavailable
from tidegate.files import make_private_file

if TYPE_CHECKING:
    from pathlib import Path

    from tidegate.policy import Key

VERSION: Final = 1
SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS sources (
    name TEXT PRIMARY KEY,
    due INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'idle' CHECK (state IN ('idle', 'queued', 'running')),
    account TEXT,
    attempt INTEGER NOT NULL DEFAULT 0,
    ok INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    skipped INTEGER NOT NULL DEFAULT 0,
    requeued INTEGER NOT NULL DEFAULT 0,
    last_at INTEGER,
    last_result TEXT
) STRICT;
CREATE TABLE IF NOT EXISTS unsettled (
    number INTEGER PRIMARY KEY,
    source TEXT NOT NULL,
    account TEXT NOT NULL,
    since INTEGER NOT NULL,
    charged_at INTEGER
) STRICT;
"""


class SourceRecord(NamedTuple):
    """The state of a source. Instants are microseconds since 1970."""

    name: str
    due: int
    state: str = "idle"
    attempt: int = 0
    ok: int = 0
    failed: int = 0
    skipped: int = 0
    requeued: int = 0
    last_at: int | None = None
    last_result: str | None = None


class SourceRow(TypedDict):
    """A source as `SourceRunner.describe` shows it: the fields of its SourceRecord, and some of its settings."""

    name: str
    due: int
    state: str
    attempt: int
    ok: int
    failed: int
    skipped: int
    requeued: int
    last_at: int | None
    last_result: str | None
    schedule: str
    priority: int
    url: str
    provider: str | None


class UnsettledRequest(NamedTuple):
    """A request that was in flight when a service was killed: its account, and when that was noticed.

    `charged_at` is when it was charged again.
    """

    number: int
    source: str
    domain: str
    key: Key
    since: int
    charged_at: int | None


COLUMNS: Final = ", ".join(SourceRecord._fields)


class SourceLedger:
    """The state file. Used from one thread; every method is one transaction."""

    def __init__(self, path: Path) -> None:
        """Open or create the file, readable by its owner only."""
        self.path = path
        try:
            make_private_file(path)
            self._db = sqlite3.connect(path, isolation_level=None, timeout=10)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version > VERSION:
                self._db.close()
                raise StoreUnavailable(
                    f"{path} was written by a newer version of tidegate: upgrade this one, or use another --data folder"
                )
            self._db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT")
        except (sqlite3.Error, OSError) as error:
            raise StoreUnavailable(f"cannot store the state of sources in {path}: {error}") from None

    def record(self, name: str) -> SourceRecord | None:
        """Return the record of a source; None: unknown."""
        row = self._db.execute(f"SELECT {COLUMNS} FROM sources WHERE name = ?", (name,)).fetchone()  # noqa: S608 - own names
        return None if row is None else SourceRecord(*row)

    def records(self) -> dict[str, SourceRecord]:
        """Return all sources, by name."""
        rows = self._db.execute(f"SELECT {COLUMNS} FROM sources").fetchall()  # noqa: S608 - own names
        return {row[0]: SourceRecord(*row) for row in rows}

    def add(self, name: str, due: int) -> SourceRecord:
        """Add a source; a known one keeps its record, but is due no later than `due`."""
        self._db.execute(
            "INSERT INTO sources (name, due) VALUES (?, ?)"
            " ON CONFLICT (name) DO UPDATE SET due = min(due, excluded.due)",
            (name, due),
        )
        return self.record(name)  # type: ignore[return-value]  # just added

    def set(self, name: str, **values: Any) -> None:  # noqa: ANN401 - columns
        """Update columns of a source."""
        words = ", ".join(f"{column} = ?" for column in values)
        self._db.execute(f"UPDATE sources SET {words} WHERE name = ?", (*values.values(), name))  # noqa: S608 - own names

    def count(self, name: str, column: str) -> None:
        """Increment a counter of a source."""
        self._db.execute(f"UPDATE sources SET {column} = {column} + 1 WHERE name = ?", (name,))  # noqa: S608 - own names

    def begin(self, name: str, account: tuple[str, Key] | None) -> None:
        """Record that a request is about to be sent, and its account."""
        self.set(name, state="running", account=None if account is None else json.dumps(account))

    # ---- after a crash -----------------------------------------------------------------------------------------------

    def recover(self, now: int) -> None:
        """Record requests that were in flight when the last service ended, and queue their sources again."""
        self._db.execute("BEGIN IMMEDIATE")
        self._db.execute(
            "INSERT INTO unsettled (source, account, since)"
            " SELECT name, account, ? FROM sources WHERE state = 'running' AND account IS NOT NULL",
            (now,),
        )
        self._db.execute("UPDATE sources SET state = 'idle', account = NULL WHERE state <> 'idle'")
        self._db.execute("COMMIT")

    def unsettled(self) -> list[UnsettledRequest]:
        """List requests of which it is unknown whether they arrived."""
        rows = self._db.execute("SELECT number, source, account, since, charged_at FROM unsettled").fetchall()
        return [
            UnsettledRequest(number, source, *_account(account), *instants)
            for number, source, account, *instants in rows
        ]

    def charged(self, number: int, at: int) -> None:
        """Record when such a request was charged again."""
        self._db.execute("UPDATE unsettled SET charged_at = ? WHERE number = ?", (at, number))

    def settle(self, number: int) -> None:
        """Delete such a request: it was charged late enough."""
        self._db.execute("DELETE FROM unsettled WHERE number = ?", (number,))

    def close(self) -> None:
        """Close the file."""
        self._db.close()


def _account(text: str) -> tuple[str, Key]:
    domain, key = json.loads(text)
    return domain, key if isinstance(key, str) else tuple(key)
