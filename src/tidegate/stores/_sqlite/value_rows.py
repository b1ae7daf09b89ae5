"""Reads and writes small values as rows; the caller manages transactions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate.errors import CollectionFull, ValueConflict
from tidegate.stores._sqlite.rows import storable
from tidegate.stores._values import MAX_LISTED, Value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from sqlite3 import Cursor

    from tidegate.stores._values import Collection, Write

    Execute = Callable[..., Cursor]

SELECT: Final = "SELECT data, written, ends FROM value WHERE collection = ? AND name = ? AND ends > ?"
LIST: Final = "SELECT name, data, written, ends FROM value WHERE collection = ? AND ends > ? ORDER BY name"
COUNT: Final = "SELECT count(*) FROM value WHERE collection = ? AND ends > ?"
INSERT: Final = "INSERT OR REPLACE INTO value (collection, name, data, written, ends) VALUES (?, ?, ?, ?, ?)"
DELETE: Final = "DELETE FROM value WHERE collection = ? AND name = ?"
SWEEP: Final = (
    "DELETE FROM value WHERE (collection, name) IN (SELECT collection, name FROM value WHERE ends <= ? LIMIT ?)"
)
SWEEP_ROWS: Final = 64  # values removed by one sweep
SHARES_OF_ROOM: Final = 16
MAX_COLLECTIONS: Final = 1000  # that are remembered with their room


def get_value(execute: Execute, collection: Collection, name: str, now: int) -> Value | None:
    """Read a value that has not ended."""
    row = execute(SELECT, (storable(collection.identity), storable(name), now)).fetchone()
    return None if row is None else Value(*row)


def list_values(execute: Execute, collection: Collection, now: int) -> dict[str, Value]:
    """Read all values of a collection that have not ended."""
    rows = execute(LIST, (storable(collection.identity), now)).fetchall()
    return {
        name if isinstance(name, str) else name.decode("utf-8", "surrogatepass"): Value(*row) for name, *row in rows
    }


def take_room(execute: Execute, room: dict[str, int], write: Write, added: int, now: int) -> None:
    """Take the place of a new value in a listed collection; raises CollectionFull.

    `room` is how many values may be added to each collection before its values are counted again, because counting
    takes time in proportion to their number. A count is good for a share of the values that are still free, so a
    process that counted long ago can exceed the maximum by that share; all values are listed even then. The step has
    `added` others, which are not written yet.
    """
    identity = write.collection.identity
    left = room.get(identity, 0)
    if left <= 0:
        size = execute(COUNT, (storable(identity), now)).fetchone()[0] + added
        if size >= MAX_LISTED:
            raise CollectionFull(write)
        left = max(1, (MAX_LISTED - size) // SHARES_OF_ROOM)
        if len(room) >= MAX_COLLECTIONS:
            room.clear()
    room[identity] = left - 1


def check_conditions(execute: Execute, room: dict[str, int], writes: Sequence[Write], now: int) -> None:
    """Raise ValueConflict if a condition does not hold, or CollectionFull."""
    added: dict[Collection, int] = {}  # by this step
    for write in writes:
        found = get_value(execute, write.collection, write.name, now)
        if not write.holds(found):
            raise ValueConflict(write, found)
        if write.collection.listed and isinstance(write.data, bytes) and found is None:
            before = added.get(write.collection, 0)
            take_room(execute, room, write, before, now)
            added[write.collection] = before + 1


def write_values(execute: Execute, writes: Sequence[Write], now: int) -> None:
    """Write values whose conditions were checked."""
    for collection, name, data, ttl, _ in writes:
        place = (storable(collection.identity), storable(name))
        if data is None:
            execute(DELETE, place)
        elif isinstance(data, bytes):
            execute(INSERT, (*place, data, now, now + ttl))


def sweep_values(execute: Execute, now: int) -> None:
    """Remove some values that have ended."""
    execute(SWEEP, (now, SWEEP_ROWS))
