"""How the states of a policy's key stand in one row.

`limits` tells which limits wrote the states, `numbers` holds the integers of each: those of `core.codec`, with

    calendar_window                the end of the window behind them, for those who read SQL
    sliding_log, concurrency       once there are more than a few entries, [[...]]: the numbers of a Log
"""

from __future__ import annotations

import json
import sqlite3
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.core.codec import dump, limit_of, load
from tidegate.core.limit import Limit
from tidegate.stores.sqlite.log_rows import MAX_REMOVED_PER_TRANSACTION, LogRows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate.core.algorithms import State
    from tidegate.core.decision import Decision, States
    from tidegate.policy import Policy

    Limits = tuple[Limit, ...]

MAX_INLINE_ENTRIES: Final = 24  # entries of a log that stand in its state's row
MIN_SWEEP_SHIFT: Final = 16  # rows are looked at in steps no finer than 2**16 microseconds, or a 32nd of their lifetime
SWEEP_ROWS: Final = 64  # rows looked at in one sweep
MAX_SHAPES: Final = 1024  # sets of limits remembered
UNMARKED_NUMBERS: Final = 3  # numbers of a bucket without marks
PLAIN_WINDOW: Final = 3  # numbers of a window that carries no older ones, at most
LOG_NUMBERS: Final = 5  # parts of a log's state; no other has as many
LOG_ALGORITHMS: Final = ("sliding_log", "concurrency")

SELECT_STATE: Final = "SELECT id, limits, numbers FROM state WHERE policy = ? AND key = ?"
INSERT_STATE: Final = "INSERT INTO state (policy, key, limits, numbers, updated, due) VALUES (?, ?, ?, ?, ?, ?)"
UPDATE_STATE: Final = "UPDATE state SET numbers = ?, updated = ? WHERE id = ?"
UPDATE_STATE_AND_LIMITS: Final = "UPDATE state SET limits = ?, numbers = ?, updated = ? WHERE id = ?"

# What `json.loads` is made of, without a look for white space around it.
scan: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # it has one


class KeyRow(NamedTuple):
    """What was read for a key: the states of the policy's limits, and all that stands there."""

    id: int  # 0: no row
    states: Sequence[State | None]
    limits: Limits
    stored: Sequence[State | None]  # one for each of `limits`
    logs: Sequence[int] = ()  # of the stored states that have rows of their own


class RowShape(NamedTuple):
    """What reading and writing the states of some limits needs, worked out once."""

    limits: Limits
    text: str
    read: tuple[Callable[[Limit, list[int]], State | None], ...]
    plain: bool  # no state of them is a log
    nothing: KeyRow


class StateRows:
    """The rows of a file, read and written through one cursor, within the transactions of others."""

    def __init__(self, cursor: sqlite3.Cursor) -> None:
        """Use this cursor."""
        self.cursor = cursor
        self.execute = cursor.execute
        self._shapes: dict[int, RowShape] = {}  # by identity: to hash limits would take longer than to decide

    def read(self, policy: Policy, key: str | bytes) -> KeyRow:
        """Read the states of the policy's limits, known by name and algorithm."""
        limits = policy.limits
        shape = self._shapes.get(id(limits)) or self._shape(limits)
        row = self.execute(SELECT_STATE, (storable(policy.name), key)).fetchone()
        if row is None:
            return shape.nothing
        place, text, numbers = row
        if text == shape.text:
            states, logs = self._read_states(shape, numbers)
            return KeyRow(place, states, limits, states, logs)
        mine = {(limit.name, limit.algorithm): limit for limit in limits}
        pairs = ((limit, mine.get((limit.name, limit.algorithm))) for limit in read_limits(text))
        owners = tuple(now if now is not None and now == then else then for then, now in pairs)
        stored, logs = self._read_states(make_shape(owners), numbers)
        known = {(limit.name, limit.algorithm): state for limit, state in zip(owners, stored, strict=True)}
        return KeyRow(place, [known.get(name) for name in mine], owners, stored, logs)

    def _read_states(self, shape: RowShape, text: str) -> tuple[list[State | None], Sequence[int]]:
        """Read states, and which logs they have."""
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
            raise sqlite3.DatabaseError(f"a state cannot be read: {text!r}") from error
        return states, logs

    def write(
        self, policy: Policy, key: str | bytes, row: KeyRow, states: States, now: int, inline: int | None = None
    ) -> None:
        """Write the states of the policy's limits, keeping live ones of limits that are not in the policy (any more).

        Logs of up to `inline` entries stand in the row.
        """
        limits = policy.limits
        if row.limits is not limits:
            limits, states = self._merge(row, limits, states, now)
        logs: Sequence[int] = ()
        if self._shape(limits).plain:
            numbers = [write_state(state) for state in states]
        else:
            numbers, logs = self._write_logs(states, MAX_INLINE_ENTRIES if inline is None else inline)
        place = row.id
        if not any(numbers):
            self.delete(row)
            return
        if place and limits is row.limits:
            self.execute(UPDATE_STATE, (str(numbers), now, place))
        elif place:
            self.execute(UPDATE_STATE_AND_LIMITS, (self._shape(limits).text, str(numbers), now, place))
        else:
            due = due_at(max(limit_of(state).rules.expires(state) for state in states if state), now)
            self.execute(INSERT_STATE, (storable(policy.name), key, self._shape(limits).text, str(numbers), now, due))
            place = self.cursor.lastrowid or 0
        if logs != row.logs:
            self._keep_logs(place, row.logs, logs)

    def _write_logs(self, states: States, inline: int) -> tuple[list[list[Any]], list[int]]:
        """Write states of which some are logs; tell which of those have rows of their own."""
        logs: list[int] = []
        numbers = [
            self._write_log(state, logs, inline)
            if state is not None and len(state) == LOG_NUMBERS
            else write_state(state)
            for state in states
        ]
        return numbers, logs

    def _write_log(self, state: State, logs: list[int], inline: int) -> list[Any]:
        """Write a log: as numbers, or as rows once there are many."""
        _, log, head, tail, base = state
        if log.__class__ is not LogRows:
            if tail - head <= inline:
                return dump(state)
            log = LogRows.write(self.cursor, log, head, tail, base)
        logs.append(log.id)
        return [log.save(head, tail, base)]

    def delete(self, row: KeyRow) -> None:
        """Forget a key."""
        self.execute("DELETE FROM state WHERE id = ?", (row.id,))
        self._keep_logs(row.id, row.logs, ())

    def _merge(self, row: KeyRow, limits: Limits, states: States, now: int) -> tuple[Limits, States]:
        """Tell under which limits each state is written: one left as it was may be of a limit changed since."""
        names = {(limit.name, limit.algorithm) for limit in limits}
        owners = [limit if state is None else limit_of(state) for limit, state in zip(limits, states, strict=True)]
        all_states = list(states)
        for limit, state in zip(row.limits, row.stored, strict=True):
            if state is not None and (limit.name, limit.algorithm) not in names and limit.rules.expires(state) > now:
                owners.append(limit)
                all_states.append(state)
        same = len(owners) == len(limits) and all(a is b for a, b in zip(owners, limits, strict=True))
        return limits if same else tuple(owners), all_states

    def _keep_logs(self, place: int, before: Sequence[int], after: Sequence[int]) -> None:
        """Leave the entries of logs that ended to the sweep, and note whose the new ones are."""
        for log in before:
            if log not in after:
                self.execute("UPDATE log SET state = NULL WHERE id = ?", (log,))
        for log in after:
            if log not in before:
                self.execute("UPDATE log SET state = ? WHERE id = ?", (place, log))

    def label(
        self, policy: Policy, key: str | bytes, at: int, task_type: str | None, task_id: str | None, now: int
    ) -> list[Decision]:
        """Name what was charged to a key's logs at the instant `at`; only entries with rows of their own have names."""
        row = self.read(policy, key)
        if row.id:
            self.write(policy, key, row, row.states, now, inline=0)
            for state in self.read(policy, key).states:
                if state is not None and isinstance(state[1], LogRows):
                    state[1].label(at, task_type, task_id, *state[2:4])
        return []

    def sweep(self, now: int) -> None:
        """Look at some of the rows that are due, drop those that ended, and some entries of logs that did."""
        query = "SELECT id, limits, numbers FROM state WHERE due <= ? ORDER BY due LIMIT ?"
        for place, text, numbers in self.execute(query, (now, SWEEP_ROWS)).fetchall():
            try:
                states, _ = self._read_states(make_shape(read_limits(text)), numbers)
                ends = max(limit_of(state).rules.expires(state) for state in states if state)
            except (sqlite3.DatabaseError, ValueError):  # nobody can read it, and it should have ended
                ends = now
            if ends > now:
                self.execute("UPDATE state SET due = ? WHERE id = ?", (due_at(ends, now), place))
            else:
                self.execute("DELETE FROM state WHERE id = ?", (place,))
                self.execute("UPDATE log SET state = NULL WHERE state = ?", (place,))
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
    """Work out what reading and writing the states of these limits needs."""
    nothing = (None,) * len(limits)
    read = tuple(READERS.get(limit.algorithm, read_other) for limit in limits)
    plain = all(limit.algorithm not in LOG_ALGORITHMS for limit in limits)
    return RowShape(limits, write_limits(limits), read, plain, KeyRow(0, nothing, limits, nothing))


def read_bucket(limit: Limit, numbers: list[int]) -> State | None:
    """Read a bucket; most have no marks."""
    return (limit, numbers[0], numbers[1]) if len(numbers) == UNMARKED_NUMBERS else read_other(limit, numbers)


def read_window(limit: Limit, numbers: list[int]) -> State | None:
    """Read a window, which may have its end noted; few carry more."""
    return (limit, numbers[0], numbers[1]) if 0 < len(numbers) <= PLAIN_WINDOW else read_other(limit, numbers)


def read_other(limit: Limit, numbers: list[int]) -> State | None:
    """Read any state that stands in its row."""
    return load(limit, numbers) if numbers else None


def write_state(state: State | None) -> list[int]:
    """Write a state that is no log."""
    if state is None:
        return []
    limit = state[0]
    if limit.__class__ is Limit:
        if limit.algorithm == "token_bucket":
            return [state[1], state[2], limit.scale]
        if limit.calendar is not None:
            return [state[1], state[2], limit.calendar.window(state[2])[1]]
    return dump(state)


READERS: Final = {"token_bucket": read_bucket, "fixed_window": read_window, "calendar_window": read_window}


def storable(text: str) -> str | bytes:
    """Give text as SQLite takes it; what no encoding has (a lone surrogate) as bytes, which are equal to no text."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


def due_at(ends: int, now: int) -> int:
    """Choose an instant soon after a state ends, from a coarse grid, so that a row seldom moves in the index."""
    step = max(MIN_SWEEP_SHIFT, (ends - now).bit_length() - 5)
    return ((ends >> step) + 1) << step


def write_limits(limits: Limits) -> str:
    """Write limits such that they can be built again exactly, and read with SQL."""
    fields = [
        (m.name, m.algorithm, m.quota, m.length, m.unit, m.burst, m.period, m.timezone, m.reset_day, m.reset_hour)
        for m in limits
    ]
    return json.dumps(fields, separators=(",", ":"))


@lru_cache(maxsize=MAX_SHAPES)
def read_limits(text: str) -> Limits:
    """Build limits again from their text."""
    try:
        return tuple(
            Limit(quota, period, algorithm, unit, burst, name, timezone, day, hour)
            for name, algorithm, quota, _, unit, burst, period, timezone, day, hour in scan(text, 0)[0]
        )
    except (ValueError, TypeError, StopIteration) as error:
        raise sqlite3.DatabaseError(f"limits cannot be read: {text!r}") from error
