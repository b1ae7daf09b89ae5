"""Imports a database with the tables `rate_limits` and `task_completions` of the document "Multi-Tier Rate Limiting".

Opening the file renames its tables, so that the views of a budget can have their names. The first budget that counts
then inserts the completions into its own table, and drops the renamed ones. A count in `rate_limits` that is larger
than the number of completions in its window is completed with tasks without a type.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core._bounds import SECOND
from tidegate.stores._sqlite.database import APPLICATION_ID, SCHEMA_VERSION, has_object

if TYPE_CHECKING:
    import sqlite3

COLUMNS: Final = {
    "rate_limits": {"time_period", "current_count", "window_start", "window_end", "last_updated"},
    "task_completions": {"completed_at", "task_type", "task_id"},
}
COUNTS: Final = "imported_rate_limits"
COMPLETIONS: Final = "imported_task_completions"
COUNTED_PERIODS: Final = ("minute", "hour", "day", "week", "month")


class ImportedTasks(NamedTuple):
    """Completed tasks of an imported database: when, how many, their type and id."""

    completed: int  # microseconds since 1970
    tasks: int
    task_type: str | None = None
    task_id: str | None = None


def is_document_database(db: sqlite3.Connection) -> bool:
    """Return whether a file has the tables of the document, and no others but those of a migration system."""
    if db.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID:
        return False
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    others = {name for name in tables - COLUMNS.keys() if not name.startswith("sqlite_")}
    if not tables >= COLUMNS.keys() or any("version" not in name and "migration" not in name for name in others):
        return False
    return all(columns <= columns_of(db, table) for table, columns in COLUMNS.items())


def columns_of(db: sqlite3.Connection, table: str) -> set[str]:
    """Return the names of the columns of a table."""
    return {row[1] for row in db.execute(f"PRAGMA table_info({table})")}


def rename_tables(db: sqlite3.Connection) -> None:
    """Rename the tables of the document, in one transaction, so that those of a budget can be created."""
    db.execute("BEGIN IMMEDIATE")
    if is_document_database(db):  # another process may have been faster
        db.execute(f"ALTER TABLE rate_limits RENAME TO {COUNTS}")
        db.execute(f"ALTER TABLE task_completions RENAME TO {COMPLETIONS}")
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    db.execute("COMMIT")


def has_renamed_tables(db: sqlite3.Connection) -> bool:
    """Return whether the tables of the document were renamed and not imported yet."""
    return has_object(db, COMPLETIONS)


def take_renamed_tables(db: sqlite3.Connection, now: int) -> list[ImportedTasks]:
    """Read the renamed tables, and drop them."""
    query = f"SELECT completed_at, task_type, task_id FROM {COMPLETIONS}"  # noqa: S608 - a constant
    found = [ImportedTasks(read_instant(at, now), 1, kind, task_id) for at, kind, task_id in db.execute(query)]
    query = f"SELECT time_period, current_count, window_start, window_end, last_updated FROM {COUNTS}"  # noqa: S608 - a constant
    counts = {row[0]: row[1:] for row in db.execute(query).fetchall()}
    shorter_start: int | None = None
    for period in (period for period in COUNTED_PERIODS if period in counts):
        count, *instants = counts[period]
        start, end, updated = (read_instant(value, now) for value in instants)
        missing = (count or 0) - sum(each.tasks for each in found if start <= each.completed <= end)
        if missing > 0:
            latest = updated if shorter_start is None else shorter_start - 1
            found.append(ImportedTasks(max(start, min(latest, end, now)), missing))
        shorter_start = start
    db.execute(f"DROP TABLE {COMPLETIONS}")
    db.execute(f"DROP TABLE {COUNTS}")
    return found


def read_instant(value: object, now: int) -> int:
    """Read a timestamp, UTC unless it has an offset, or seconds since 1970; one that cannot be read counts as now."""
    if isinstance(value, (int, float)):
        return round(value * SECOND)
    try:
        parsed = datetime.fromisoformat(str(value))
    except ValueError:
        return now
    return round((parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp() * SECOND)
