"""State that survives a crash, in one SQLite file: each source's next run and last result, and requests in flight.

A request is written before it is performed: a source is `running` before its permit is requested, so after a kill -9
the next service knows which requests may have been sent without a response. The file contains no URL, header or key.

The records are in memory, and `save` writes those that changed, in a thread and in one transaction. If that fails,
because the disk is full or a backup has locked the file, they stay in memory, and the next `save` writes them.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypedDict

from tidegate._runtime.files import make_private_file
from tidegate.errors import StoreUnavailable

if TYPE_CHECKING:
    from pathlib import Path

    from tidegate._policy import Key

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
    skip_reason: str | None


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
VALUES: Final = ", ".join(f"excluded.{name}" for name in (*SourceRecord._fields, "account"))
WRITE_SOURCE: Final = (
    f"INSERT INTO sources ({COLUMNS}, account) VALUES ({', '.join('?' * (len(SourceRecord._fields) + 1))})"  # noqa: S608 - own names
    f" ON CONFLICT (name) DO UPDATE SET ({COLUMNS}, account) = ({VALUES})"
)
MAX_LOCK_WAIT: Final = 2.0  # seconds to wait for a lock of the file; then sources pause until it is free


class SourceLedger:
    """The records of sources, and their file. Used from one thread."""

    def __init__(self, path: Path) -> None:
        """Open or create the file, readable by its owner only, and read it."""
        self.path = path
        self._unsaved: dict[str | int, tuple[str, tuple[object, ...]]] = {}  # statements, by source or request
        self._saving = asyncio.Lock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tidegate-sources")
        try:
            make_private_file(path)
            self._db = sqlite3.connect(path, isolation_level=None, timeout=MAX_LOCK_WAIT, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version > VERSION:
                self._db.close()
                raise StoreUnavailable(
                    f"{path} was written by a newer version of tidegate: upgrade this one, or use another --data folder"
                )
            self._db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT")
            rows = self._db.execute(f"SELECT account, {COLUMNS} FROM sources").fetchall()  # noqa: S608 - own names
            self._opened = path.stat()
            self._unsettled = {each.number: each for each in self._read_unsettled()}
        except (sqlite3.Error, OSError) as error:
            raise self._unwritable(error) from None
        self._records = {row[1]: SourceRecord(*row[1:]) for row in rows}
        self._accounts: dict[str, str] = {row[1]: row[0] for row in rows if row[0] is not None}  # of requests in flight

    def record(self, name: str) -> SourceRecord | None:
        """Return the record of a source; None: unknown."""
        return self._records.get(name)

    def records(self) -> dict[str, SourceRecord]:
        """Return all sources, by name."""
        return dict(self._records)

    # ---- changes -----------------------------------------------------------------------------------------------------

    def add(self, name: str, due: int) -> SourceRecord:
        """Add a source; a known one keeps its record, but is due no later than `due`."""
        known = self._records.get(name)
        if known is None or due < known.due:
            self._records[name] = SourceRecord(name, due) if known is None else known._replace(due=due)
            self._write_later(name)
        return self._records[name]

    def set(self, name: str, **values: Any) -> None:  # noqa: ANN401 - columns
        """Update fields of a source."""
        self._records[name] = self._records[name]._replace(**values)
        if self._records[name].state != "running":
            self._accounts.pop(name, None)
        self._write_later(name)

    def note(self, name: str, **values: Any) -> None:  # noqa: ANN401 - columns
        """Update fields that are written with the next other change of the source: they do not need to survive."""
        self._records[name] = self._records[name]._replace(**values)

    def begin(self, name: str, account: tuple[str, Key] | None) -> None:
        """Record that a request is about to be sent, and its account."""
        if account is not None:
            self._accounts[name] = json.dumps(account)
        self.set(name, state="running")

    def _write_later(self, name: str) -> None:
        self._unsaved[name] = WRITE_SOURCE, (*self._records[name], self._accounts.get(name))

    # ---- the file ----------------------------------------------------------------------------------------------------

    @property
    def unsaved(self) -> int:
        """The number of changes that are not in the file yet."""
        return len(self._unsaved)

    def save_now(self) -> None:
        """Write what has changed, and wait for it in this thread; before the runner starts."""
        try:
            self._write(list(self._unsaved.values()))
        except (sqlite3.Error, OSError) as error:
            raise self._unwritable(error) from None
        self._unsaved.clear()

    def _unwritable(self, error: Exception) -> StoreUnavailable:
        return StoreUnavailable(f"cannot store the state of sources in {self.path}: {error}")

    async def save(self) -> None:
        """Write what has changed; returns when all changes made before the call are in the file.

        Raises StoreUnavailable if they cannot be written; they are kept for the next call.
        """
        async with self._saving:
            if not self._unsaved:
                return
            unsaved, self._unsaved = self._unsaved, {}
            try:
                await asyncio.get_running_loop().run_in_executor(self._writer, self._write, list(unsaved.values()))
            except BaseException as error:
                self._unsaved = {**unsaved, **self._unsaved}
                if isinstance(error, (sqlite3.Error, OSError)):
                    raise self._unwritable(error) from None
                raise

    def _check_file(self) -> None:
        """Raise OSError if the file was removed or replaced: nothing of what is written would be found again."""
        try:
            found = os.path.samestat(self.path.stat(), self._opened)
        except FileNotFoundError:
            found = False
        if not found:
            raise OSError("the file was removed or replaced while it was in use: move it back, or restart the service")

    def _write(self, statements: list[tuple[str, tuple[object, ...]]]) -> None:
        self._check_file()
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for statement, values in statements:
                self._db.execute(statement, values)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Close the file; what was not saved is lost."""
        self._writer.shutdown()
        self._db.close()

    # ---- after a crash -----------------------------------------------------------------------------------------------

    async def recover(self, now: int) -> None:
        """Record requests that were in flight when the last service ended, and queue their sources again.

        Raises StoreUnavailable if that cannot be written; then nothing has changed.
        """
        if all(record.state == "idle" for record in self._records.values()):
            return
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, self._recover, now)
        except (sqlite3.Error, OSError) as error:
            raise self._unwritable(error) from None
        self._unsettled = {each.number: each for each in self._read_unsettled()}
        for name, record in self._records.items():
            if record.state != "idle":
                self._accounts.pop(name, None)
                self._records[name] = record._replace(state="idle")
                if name in self._unsaved:
                    self._write_later(name)

    def _recover(self, now: int) -> None:
        insert = (
            "INSERT INTO unsettled (source, account, since)"
            " SELECT name, account, ? FROM sources WHERE state = 'running' AND account IS NOT NULL"
        )
        update = "UPDATE sources SET state = 'idle', account = NULL WHERE state <> 'idle'"
        self._write([(insert, (now,)), (update, ())])

    def _read_unsettled(self) -> list[UnsettledRequest]:
        rows = self._db.execute("SELECT number, source, account, since, charged_at FROM unsettled").fetchall()
        return [
            UnsettledRequest(number, source, *_account(account), *instants)
            for number, source, account, *instants in rows
        ]

    def unsettled(self) -> list[UnsettledRequest]:
        """List requests of which it is unknown whether they arrived."""
        return list(self._unsettled.values())

    def charged(self, number: int, at: int) -> None:
        """Record when such a request was charged again."""
        self._unsettled[number] = self._unsettled[number]._replace(charged_at=at)
        self._unsaved[number] = "UPDATE unsettled SET charged_at = ? WHERE number = ?", (at, number)

    def settle(self, number: int) -> None:
        """Delete such a request: it was charged late enough."""
        self._unsettled.pop(number, None)
        self._unsaved[number] = "DELETE FROM unsettled WHERE number = ?", (number,)


def _account(text: str) -> tuple[str, Key]:
    domain, key = json.loads(text)
    return domain, key if isinstance(key, str) else tuple(key)
