"""A Ledger: what calls and tasks have cost, summed by day, in an SQLite file that several processes share.

The ledger is for reports. Ceilings do not depend on it: a process that is killed loses up to a second of entries. A
process that ends normally writes its entries, even if the ledger was not closed.
"""

from __future__ import annotations

import atexit
import logging
import sqlite3
import threading
import weakref
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from zoneinfo import ZoneInfo

from tidegate._runtime.background_thread import BackgroundThread
from tidegate._runtime.clock import Clock, SystemClock
from tidegate._runtime.files import make_private_file
from tidegate._runtime.fork import at_fork
from tidegate.core._bounds import SECOND
from tidegate.errors import ConfigError, StoreUnavailable

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

log: logging.Logger = logging.getLogger("tidegate.spending")

FLUSH_INTERVAL: Final = SECOND  # between two writes of entries
BUSY_TIMEOUT: Final = 5.0  # seconds to wait for another process that writes
MAX_SUM: Final = 2**62 - 1  # of an entry: the sum of two is below 2**63, so SQLite adds them as integers
NO_SUMS: Final = (0, 0, 0)
COLUMNS: Final = ("day", "source", "member", "model", "team", "tag", "unit")
SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS spending (
    day TEXT NOT NULL, source TEXT NOT NULL, member TEXT NOT NULL, model TEXT NOT NULL, team TEXT NOT NULL,
    tag TEXT NOT NULL, unit TEXT NOT NULL, calls INTEGER NOT NULL, amount INTEGER NOT NULL, overrun INTEGER NOT NULL,
    PRIMARY KEY (day, source, member, model, team, tag, unit)
) WITHOUT ROWID
"""
INSERT_SPENDING: Final = f"""
INSERT INTO spending VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    calls = max(-{MAX_SUM}, min({MAX_SUM}, calls + excluded.calls)),
    amount = max(-{MAX_SUM}, min({MAX_SUM}, amount + excluded.amount)),
    overrun = max(-{MAX_SUM}, min({MAX_SUM}, overrun + excluded.overrun))
"""  # noqa: S608 - only a constant is inserted
# Earlier versions could store a sum of more than 2**63 as a floating-point number.
SELECT_SPENDING: Final = """
SELECT day, source, member, model, team, tag, unit,
    CAST(calls AS INTEGER), CAST(amount AS INTEGER), CAST(overrun AS INTEGER)
FROM spending WHERE day >= ? AND day <= ? ORDER BY day, source, member, model, team, tag, unit
"""
Sums = tuple[int, int, int]  # calls, amount, overrun


class SpendingEntry(NamedTuple):
    """What calls cost on a day.

    `source` is the name of a provider or task budget, `unit` what `amount` counts (`usd_micros`, `tasks`), `overrun` by
    how much calls exceeded what was reserved for them.
    """

    day: str
    source: str
    member: str = ""
    model: str = ""
    team: str = ""
    tag: str = ""
    unit: str = ""
    calls: int = 0
    amount: int = 0
    overrun: int = 0


def clean_text(text: str) -> str:
    """Return a string that SQLite can store: JSON can contain half of a surrogate pair, such as in a model's name."""
    return str(text).encode("utf-8", "replace").decode()


def add_sums(sums: Sums, more: Sums) -> Sums:
    """Add calls, amounts and overruns, up to what the file can store."""
    calls, amount, overrun = (max(-MAX_SUM, min(MAX_SUM, a + b)) for a, b in zip(sums, more, strict=True))
    return calls, amount, overrun


def read_ledger(path: str | os.PathLike[str], *, since: str = "", until: str = "9999") -> Iterator[SpendingEntry]:
    """Yield what a file has for the days from `since` to `until`, without changing the file."""
    if Path(path).is_file() and not Path(path).stat().st_size:
        return  # nothing was written yet
    try:
        connection = sqlite3.connect(f"{Path(path).resolve().as_uri()}?mode=ro", timeout=BUSY_TIMEOUT, uri=True)
        try:
            for row in connection.execute(SELECT_SPENDING, (since, until)):
                yield SpendingEntry(*row)
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise StoreUnavailable(f"cannot read the ledger {path}: {error}") from None


class Ledger:
    """Sums of what was spent, by day, in a time zone. Thread-safe; processes on one machine may share the file."""

    def __init__(self, path: str | os.PathLike[str], *, timezone: str = "UTC", clock: Clock | None = None) -> None:
        """Use an SQLite file, which is created if needed; raises ConfigError if it cannot be created."""
        self.path: str = str(path)
        try:
            self._zone = ZoneInfo(timezone)
        except (KeyError, ValueError, OSError):
            message = f"unknown time zone {timezone!r}: use an IANA name such as 'UTC' or 'Europe/Berlin'"
            raise ConfigError(message, field="timezone") from None
        self._clock: Clock = clock or SystemClock()
        self._writer = BackgroundThread(self._write, "tidegate-ledger", delay=FLUSH_INTERVAL / SECOND)
        self._start_over()
        at_fork(child=self._start_over)
        try:
            make_private_file(self.path)
        except OSError as error:
            advice = "give a path in a folder that exists and can be written"
            message = f"cannot create the ledger {self.path}: {error.strerror or error}: {advice}"
            raise ConfigError(message, field="ledger") from None
        connection = self._connect()
        try:
            with connection:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute(SCHEMA)
        except sqlite3.Error as error:
            raise StoreUnavailable(f"cannot open the ledger {self.path}: {error}") from None
        finally:
            connection.close()

    def _start_over(self) -> None:
        """Start without entries, also in a forked process: the parent writes those it has."""
        self._pending: dict[tuple[str, ...], Sums] = {}
        self._lock = threading.Lock()
        self._at_exit: Callable[[], None] | None = None
        self._failing = False

    def _connect(self) -> sqlite3.Connection:
        try:
            return sqlite3.connect(self.path, timeout=BUSY_TIMEOUT)
        except sqlite3.Error as error:
            raise StoreUnavailable(f"cannot open the ledger {self.path}: {error}") from None

    def today(self) -> str:
        """Return the current day, such as 2026-11-17."""
        return datetime.fromtimestamp(self._clock.ns() / 1e9, UTC).astimezone(self._zone).date().isoformat()

    def add(
        self,
        source: str,
        unit: str,
        amount: int,
        *,
        member: str = "",
        model: str = "",
        team: str = "",
        tag: str = "",
        calls: int = 1,
        overrun: int = 0,
    ) -> None:
        """Add what a call has cost, today; a thread writes it soon."""
        key = (self.today(), *(clean_text(each) for each in (source, member, model, team, tag, unit)))
        with self._lock:
            self._pending[key] = add_sums(self._pending.get(key, NO_SUMS), (calls, amount, overrun))
            if self._at_exit is None:  # in each process that has entries
                self._at_exit = partial(_close_at_exit, weakref.ref(self))
                atexit.register(self._at_exit)
        self._writer.start()

    def _write(self) -> int | None:
        self.flush()
        return SystemClock.steady() + FLUSH_INTERVAL if self._pending else None

    def flush(self) -> None:
        """Write what is kept in memory; if the file cannot be written, it stays in memory for the next time."""
        with self._lock:
            pending, self._pending = self._pending, {}
        if not pending:
            return
        try:
            make_private_file(self.path)  # it may have been removed since
            connection = self._connect()
            try:
                with connection:
                    connection.execute(SCHEMA)
                    connection.executemany(INSERT_SPENDING, [(*key, *sums) for key, sums in pending.items()])
            finally:
                connection.close()
            self._failing = False
        except (sqlite3.Error, StoreUnavailable, OSError) as error:
            if not self._failing:
                self._failing = True
                log.warning("cannot write the ledger %s, its entries are kept in memory: %s", self.path, error)
            with self._lock:
                for key, sums in pending.items():
                    self._pending[key] = add_sums(self._pending.get(key, NO_SUMS), sums)

    def read(self, since: str = "", *, until: str = "9999") -> Iterator[SpendingEntry]:
        """Yield the entries of the days from `since` to `until`, after writing what is kept in memory."""
        self.flush()
        yield from read_ledger(self.path, since=since, until=until)

    def close(self) -> None:
        """Write what is kept in memory, and end the thread."""
        with self._lock:
            at_exit, self._at_exit = self._at_exit, None
        if at_exit is not None:
            atexit.unregister(at_exit)
        self._writer.stop(BUSY_TIMEOUT)
        self.flush()


def _close_at_exit(reference: weakref.ref[Ledger]) -> None:
    ledger = reference()
    if ledger is not None:
        ledger.close()
