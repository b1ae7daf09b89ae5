"""Reads and writes the states of a key as one row.

The column `limits` describes the limits that wrote the states, `numbers` holds the integers of each state, as
`core.codec` writes them, except:

    calendar_window                followed by the end of the window, for SQL queries
    sliding_log, concurrency       with more than MAX_INLINE_ENTRIES entries, [[...]]: the numbers of a LogRows

This module has two fast paths that take states apart and build them by position. `read_bucket`, `read_window` and
`write_state` do the same as `load` and `dump` for usual states: a decision on one limit takes 7 % less time. A LogRows
replaces the entries in the state of a log: `load` and `dump` would read all of its rows.
"""

from __future__ import annotations

import json
import sqlite3
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.core._algorithms import ALGORITHMS
from tidegate.core._limit import Limit, parse_period
from tidegate.core.codec import dump, limit_of, load
from tidegate.stores._sqlite.log_rows import MAX_REMOVED_PER_TRANSACTION, LogRows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate._policy import Policy
    from tidegate.core._algorithms import State
    from tidegate.core._decision import Decision, States

    Limits = tuple[Limit, ...]

MAX_INLINE_ENTRIES: Final = 24  # longer logs get rows of their own
MIN_SWEEP_SHIFT: Final = 16  # rows are swept in steps of at least 2**16 microseconds, or 1/32 of their lifetime
SWEEP_ROWS: Final = 64  # rows checked in one sweep
MAX_SHAPES: Final = 1024  # cached sets of limits
UNMARKED_NUMBERS: Final = 3  # numbers of a bucket without marks
PLAIN_WINDOW: Final = 3  # numbers of a window without older windows, at most

NEVER: Final = 2**62  # when the row of a kept policy is due

SELECT_STATE: Final = "SELECT id, limits, numbers FROM state WHERE policy = ? AND key = ?"
INSERT_STATE: Final = "INSERT INTO state (policy, key, limits, numbers, updated, due) VALUES (?, ?, ?, ?, ?, ?)"
UPDATE_STATE: Final = "UPDATE state SET numbers = ?, updated = ? WHERE id = ?"
UPDATE_STATE_AND_LIMITS: Final = "UPDATE state SET limits = ?, numbers = ?, updated = ? WHERE id = ?"

# The scanner of `json.loads`, without the search for surrounding white space.
scan: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # missing in typeshed


class KeyRow(NamedTuple):
    """The row of a key: the states of the policy's limits, and all stored states."""

    id: int  # 0: no row
    states: Sequence[State | None]
    limits: Limits
    stored: Sequence[State | None]  # one for each of `limits`
    logs: Sequence[int] = ()  # ids of the stored logs that have rows of their own


class RowShape(NamedTuple):
    """What is needed to read and write the states of a set of limits, computed once."""

    limits: Limits
    text: str
    read: tuple[Callable[[Limit, list[int]], State | None], ...]
    plain: bool  # none of the states is a log
    no_states: KeyRow


class StateRows:
    """The rows of a file, read and written through one cursor; the caller manages transactions."""

    def __init__(self, cursor: sqlite3.Cursor, kept: str | None = None) -> None:
        """Use this cursor. Rows of policies whose names begin with `kept` are emptied instead of deleted."""
        self.cursor = cursor
        self._kept = kept
        self.execute: Callable[..., sqlite3.Cursor] = cursor.execute
        self.room: dict[str, int] = {}  # of listed collections, see `value_rows.take_room`
        self._shapes: dict[int, RowShape] = {}  # by id(): hashing limits would take longer than a decision

    def read(self, policy: Policy, key: str | bytes) -> KeyRow:
        """Read the states of the policy's limits, matched by name and algorithm."""
        limits = policy.limits
        shape = self._shapes.get(id(limits)) or self._shape(limits)
        row = self.execute(SELECT_STATE, (storable(policy.name), key)).fetchone()
        if row is None:
            return shape.no_states
        row_id, text, numbers = row
        if text == shape.text:
            states, logs = self._read_states(shape, numbers)
            return KeyRow(row_id, states, limits, states, logs)
        mine = {limit.identity: limit for limit in limits}
        pairs = ((limit, mine.get(limit.identity)) for limit in read_limits(text))
        owners = tuple(now if now is not None and now == then else then for then, now in pairs)
        stored, logs = self._read_states(make_shape(owners), numbers)
        known = {limit.identity: state for limit, state in zip(owners, stored, strict=True)}
        return KeyRow(row_id, [known.get(name) for name in mine], owners, stored, logs)

    def _read_states(self, shape: RowShape, text: str) -> tuple[list[State | None], Sequence[int]]:
        """Read states, and the ids of their logs."""
        states: list[State | None] = []
        logs: list[int] = []
        try:
            triples = zip(shape.limits, shape.read, scan(text, 0)[0], strict=True)
            if shape.plain:
                return [read(limit, numbers) for limit, read, numbers in triples], ()
            for limit, read, numbers in triples:
                if numbers and numbers[0].__class__ is list:
                    log = LogRows(self.cursor, numbers[0])
                    logs.append(log.id)
                    states.append((limit, log, *numbers[0][2:5]))
                else:
                    states.append(read(limit, numbers))
        except (ValueError, TypeError, LookupError, StopIteration) as error:
            raise sqlite3.DatabaseError(f"a stored state cannot be read: {text!r}") from error
        return states, logs

    def write(
        self, policy: Policy, key: str | bytes, row: KeyRow, states: States, now: int, inline: int | None = None
    ) -> None:
        """Write the states of the policy's limits, keeping live states of limits that are no longer in the policy.

        Logs of up to `inline` entries are written into the row.
        """
        limits = policy.limits
        if row.limits is not limits:
            limits, states = self._merge(row, limits, states, now)
        logs: Sequence[int] = ()
        if self._shape(limits).plain:
            numbers = [write_state(state) for state in states]
        else:
            numbers, logs = self._write_logs(states, MAX_INLINE_ENTRIES if inline is None else inline)
        row_id = row.id
        if not any(numbers) and not (row_id and self._keeps(policy.name)):
            self.delete(row)
            return
        if row_id and limits is row.limits:
            self.execute(UPDATE_STATE, (str(numbers), now, row_id))
        elif row_id:
            self.execute(UPDATE_STATE_AND_LIMITS, (self._shape(limits).text, str(numbers), now, row_id))
        else:
            due = NEVER
            if not self._keeps(policy.name):
                due = due_at(max(limit_of(state).rules.expires(state) for state in states if state), now)
            self.execute(INSERT_STATE, (storable(policy.name), key, self._shape(limits).text, str(numbers), now, due))
            row_id = self.cursor.lastrowid or 0
        if logs != row.logs:
            self._update_logs(row_id, row.logs, logs)

    def _write_logs(self, states: States, inline: int) -> tuple[list[list[Any]], list[int]]:
        """Write states of which some are logs; returns their numbers, and the ids of logs with rows of their own."""
        logs: list[int] = []
        numbers = [
            self._write_log(state, logs, inline)
            if state is not None and limit_of(state).rules.logged
            else write_state(state)
            for state in states
        ]
        return numbers, logs

    def _write_log(self, state: State, logs: list[int], inline: int) -> list[Any]:
        """Write a log: inside the row, or as rows if it has more than `inline` entries."""
        _, log, head, tail, base = state  # as in `tidegate.core._log`
        if log.__class__ is not LogRows:
            if tail - head <= inline:
                return dump(state)
            log = LogRows.write(self.cursor, log, head, tail, base)
        logs.append(log.id)
        return [log.save(head, tail, base)]

    def reset(self, policy: Policy, key: str | bytes, row: KeyRow, now: int) -> None:
        """Remove the states of a key."""
        if row.id and self._keeps(policy.name):
            states = (None,) * len(policy.limits)
            self.write(policy, key, KeyRow(row.id, states, (), (), row.logs), states, now)
        else:
            self.delete(row)

    def _keeps(self, policy: str) -> bool:
        return self._kept is not None and policy.startswith(self._kept)

    def delete(self, row: KeyRow) -> None:
        """Delete a key."""
        self.execute("DELETE FROM state WHERE id = ?", (row.id,))
        self._update_logs(row.id, row.logs, ())

    def _merge(self, row: KeyRow, limits: Limits, states: States, now: int) -> tuple[Limits, States]:
        """Return the limits and states to write: an unchanged state may belong to an older version of a limit."""
        names = {limit.identity for limit in limits}
        owners = [limit if state is None else limit_of(state) for limit, state in zip(limits, states, strict=True)]
        all_states = list(states)
        for limit, state in zip(row.limits, row.stored, strict=True):
            if state is not None and limit.identity not in names and limit.rules.expires(state) > now:
                owners.append(limit)
                all_states.append(state)
        same = len(owners) == len(limits) and all(a is b for a, b in zip(owners, limits, strict=True))
        return limits if same else tuple(owners), all_states

    def _update_logs(self, row_id: int, before: Sequence[int], after: Sequence[int]) -> None:
        """Mark removed logs for the sweep, and record the row of new ones."""
        for log in before:
            if log not in after:
                self.execute("UPDATE log SET state = NULL WHERE id = ?", (log,))
        for log in after:
            if log not in before:
                self.execute("UPDATE log SET state = ? WHERE id = ?", (row_id, log))

    def label(
        self, policy: Policy, key: str | bytes, at: int, task_type: str | None, task_id: str | None, now: int
    ) -> list[Decision]:
        """Set the task type and id of entries charged at `at`; only entries with rows of their own can have these."""
        row = self.read(policy, key)
        if row.id:
            self.write(policy, key, row, row.states, now, inline=0)
            for state in self.read(policy, key).states:
                if state is not None and isinstance(state[1], LogRows):
                    state[1].label(at, task_type, task_id, *state[2:4])
        return []

    def sweep(self, now: int) -> None:
        """Check some of the due rows and delete those that expired, and some entries of removed logs."""
        query = "SELECT id, policy, limits, numbers FROM state WHERE due <= ? ORDER BY due LIMIT ?"
        for row_id, policy, text, numbers in self.execute(query, (now, SWEEP_ROWS)).fetchall():
            try:
                states, _ = self._read_states(make_shape(read_limits(text)), numbers)
                ends = max(limit_of(state).rules.expires(state) for state in states if state)
            except (sqlite3.DatabaseError, ValueError):  # unreadable, and due to expire
                ends = now
            if self._keeps(str(policy)):  # inserted by a version that did not keep it
                self.execute("UPDATE state SET due = ? WHERE id = ?", (NEVER, row_id))
            elif ends > now:
                self.execute("UPDATE state SET due = ? WHERE id = ?", (due_at(ends, now), row_id))
            else:
                self.execute("DELETE FROM state WHERE id = ?", (row_id,))
                self.execute("UPDATE log SET state = NULL WHERE state = ?", (row_id,))
        ended = self.execute("SELECT id FROM log WHERE state IS NULL LIMIT 1").fetchone()
        if ended is not None:
            query = "DELETE FROM entry WHERE log = ? AND seq < ? + (SELECT min(seq) FROM entry WHERE log = ?)"
            if (
                self.execute(query, (*ended, MAX_REMOVED_PER_TRANSACTION, *ended)).rowcount
                < MAX_REMOVED_PER_TRANSACTION
            ):
                query = "DELETE FROM log WHERE id = ? AND NOT EXISTS (SELECT * FROM entry WHERE log = ?)"
                self.execute(query, (*ended, *ended))

    def _shape(self, limits: Limits) -> RowShape:
        shape = self._shapes.get(id(limits))
        if shape is None:
            if len(self._shapes) >= MAX_SHAPES:
                self._shapes.clear()
            shape = self._shapes[id(limits)] = make_shape(limits)
        return shape


def make_shape(limits: Limits) -> RowShape:
    """Compute what is needed to read and write the states of these limits."""
    no_states = (None,) * len(limits)
    read = tuple(reader_of(limit) for limit in limits)
    plain = not any(limit.rules.logged for limit in limits)
    return RowShape(limits, write_limits(limits), read, plain, KeyRow(0, no_states, limits, no_states))


def read_bucket(limit: Limit, numbers: list[int]) -> State | None:
    """Read a bucket; the usual one has no marks."""
    return (limit, numbers[0], numbers[1], ()) if len(numbers) == UNMARKED_NUMBERS else read_other(limit, numbers)


def read_window(limit: Limit, numbers: list[int]) -> State | None:
    """Read a window, which may be followed by its end; others have older windows."""
    return (limit, numbers[0], numbers[1]) if 0 < len(numbers) <= PLAIN_WINDOW else read_other(limit, numbers)


def read_other(limit: Limit, numbers: list[int]) -> State | None:
    """Read any state that is stored in the row itself."""
    return load(limit, numbers) if numbers else None


def write_state(state: State | None) -> list[int]:
    """Write a state that is not a log; the usual ones by position, as `dump` would."""
    if state is None:
        return []
    limit = state[0]
    if limit.__class__ is Limit:
        if limit.rules.refills and not state[3]:
            return [state[1], state[2], limit.scale]
        if limit.calendar is not None:
            return [state[1], state[2], limit.calendar.window(state[2])[1]]
    return dump(state)


def reader_of(limit: Limit) -> Callable[[Limit, list[int]], State | None]:
    """Return the function that reads the states of a limit: most states are shorter than the algorithm allows."""
    if limit.rules.refills:
        return read_bucket
    return read_window if limit.rules.windowed else read_other


def storable(text: str) -> str | bytes:
    """Return a string as SQLite stores it; one with a lone surrogate as bytes, which equal no string."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


def due_at(ends: int, now: int) -> int:
    """Return a time soon after a state expires, on a coarse grid, so that a row rarely moves in the index."""
    step = max(MIN_SWEEP_SHIFT, (ends - now).bit_length() - 5)
    return ((ends >> step) + 1) << step


def write_limits(limits: Limits) -> str:
    """Write limits as JSON, from which `read_limits` restores them exactly, readable with SQL."""
    fields = [
        (m.name, m.algorithm, m.quota, m.length, m.unit, m.burst, m.period, m.timezone, m.reset_day, m.reset_hour)
        for m in limits
    ]
    return json.dumps(fields, separators=(",", ":"))


@lru_cache(maxsize=MAX_SHAPES)
def read_limits(text: str) -> Limits:
    """Restore limits from their JSON."""
    try:
        return tuple(
            Limit(quota, period, algorithm, unit, burst, name, timezone, day, hour, _margin(algorithm, length, period))
            for name, algorithm, quota, length, unit, burst, period, timezone, day, hour in scan(text, 0)[0]
        )
    except (ValueError, TypeError, StopIteration) as error:
        raise sqlite3.DatabaseError(f"stored limits cannot be read: {text!r}") from error


def _margin(algorithm: str, length: int, period: str) -> int:
    """Return how much longer than its period a limit counts its permits."""
    return length - parse_period(period) if ALGORITHMS[algorithm].rolling else 0
