"""A log stored as rows of the table `entry`, with the interface of `core.algorithms.LogEntries`.

An entry is identified by its `seq`, which has gaps where entries were refunded. Times and sums increase with it, so
one b-tree serves every search: searches by time and by sum bisect it, starting where the result usually is: near the
head for entries that expire, near the tail for those that are corrected. The state's own row holds the last entry and
the oldest live one, so most decisions read no entries at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterator

    from tidegate.core._algorithms import Changes, LogEntries

FIRST_READ: Final = 8  # entries read at once at the start of a search
MAX_EXPIRED_ENTRIES: Final = 64  # expired entries are kept until there are this many
MAX_REMOVED_PER_TRANSACTION: Final = 256  # so that no transaction takes long
MAX_SUM: Final = 2**60  # sums beyond this are rebased, so that 64 bits suffice for every cost

INSERT_ENTRY: Final = "INSERT OR REPLACE INTO entry (log, seq, time, sum, cost) VALUES (?, ?, ?, ?, ?)"
SELECT_ENTRIES: Final = "SELECT seq, time, sum, cost FROM entry WHERE log = ? AND seq >= ? AND seq < ?"
SELECT_NEXT: Final = f"{SELECT_ENTRIES} ORDER BY seq LIMIT ?"
SELECT_LAST: Final = f"{SELECT_ENTRIES} ORDER BY seq DESC LIMIT ?"
SHIFT_SUMS: Final = "UPDATE entry SET sum = sum + ? WHERE log = ? AND seq >= ? AND seq < ?"
CHANGE_ENTRY: Final = "UPDATE entry SET sum = sum + ?, cost = ? WHERE log = ? AND seq = ?"

Row = tuple[int, int, int, int]  # seq, time, sum, cost


class CachedColumn(dict[int, int]):
    """One column of a log by seq: cached values, and others read on access."""

    __slots__ = ("column", "cursor", "log")
    column: str
    cursor: sqlite3.Cursor
    log: int

    def __missing__(self, seq: int) -> int:
        """Read the value of an entry."""
        query = f"SELECT {self.column} FROM entry WHERE log = ? AND seq = ?"  # noqa: S608 - one of our two columns
        self[seq] = value = self.cursor.execute(query, (self.log, seq)).fetchone()[0]
        return int(value)


class LogRows:
    """A log as rows, within one transaction.

    Its numbers, in the state's row: id, first seq present, head, tail, base, time and sum of the last entry, time of
    the entry at head.
    """

    __slots__ = ("added", "cursor", "first", "id", "known_costs", "sums", "times")
    first: int
    id: int

    def __init__(self, cursor: sqlite3.Cursor, numbers: list[int]) -> None:
        """Read the numbers of the state's row."""
        self.cursor: sqlite3.Cursor = cursor
        self.id, self.first, head, tail, _, last, total, oldest = numbers
        self.times: CachedColumn = CachedColumn({head: oldest, tail - 1: last})
        self.times.column, self.times.cursor, self.times.log = "time", cursor, self.id
        self.sums: CachedColumn = CachedColumn({tail - 1: total})
        self.sums.column, self.sums.cursor, self.sums.log = "sum", cursor, self.id
        self.known_costs: dict[int, int] = {}  # of entries that were read
        self.added: int = -1

    @classmethod
    def write(cls, cursor: sqlite3.Cursor, entries: LogEntries, head: int, tail: int, base: int) -> Self:
        """Write a log as rows that was inside its state's row so far."""
        cursor.execute(
            "INSERT INTO log (state) VALUES (0)"
        )  # `StateRows` sets the id of the state's row once it is known
        log = int(cursor.lastrowid or 0)
        before = base
        for seq in range(head, tail):
            total = entries.sums[seq]
            cursor.execute(INSERT_ENTRY, (log, seq, entries.times[seq], total, total - before))
            before = total
        return cls(cursor, [log, head, head, tail, base, entries.times[tail - 1], before, entries.times[head]])

    def save(self, head: int, tail: int, base: int) -> list[int]:
        """Write appended entries, remove some expired ones, and return the numbers for the state's row."""
        last, total = self.times[tail - 1], self.sums[tail - 1]
        if self.added == tail - 1:
            # The entry before it was the last one so far, so its sum is cached, even if it has expired.
            cost = total - self.sums[tail - 2]
            self.cursor.execute(INSERT_ENTRY, (self.id, self.added, last, total, cost))
        if head - self.first >= MAX_EXPIRED_ENTRIES:
            end = min(head, self.first + MAX_REMOVED_PER_TRANSACTION)
            self.cursor.execute("DELETE FROM entry WHERE log = ? AND seq >= ? AND seq < ?", (self.id, self.first, end))
            self.first = end
        if base <= -MAX_SUM or total >= MAX_SUM:
            self.cursor.execute("UPDATE entry SET sum = sum - ? WHERE log = ? AND seq >= ?", (base, self.id, head))
            base, total = 0, total - base
        return [self.id, self.first, head, tail, base, last, total, self.times[head]]

    def label(self, at: int, task_type: str | None, task_id: str | None, head: int, tail: int) -> None:
        """Set the task type and id of the entries made at the time `at`."""
        span = (self.since(at, head, tail), self.since(at + 1, head, tail))
        query = "UPDATE entry SET task_type = ?, task_id = ? WHERE log = ? AND seq >= ? AND seq < ?"
        self.cursor.execute(query, (task_type, task_id, self.id, *span))

    # ---- the interface of LogEntries ---------------------------------------------------------------------------------

    def until(self, instant: int, head: int, tail: int) -> tuple[int, int]:
        """Return the first entry after `instant`, or `tail`, and the sum before it; `head` is not after `instant`."""
        found, before = self._search(lambda row: row[1] > instant, head, tail)
        return found, before

    def since(self, instant: int, head: int, tail: int) -> int:
        """Return the first entry at or after `instant`, or `tail`: searches from the end that is closer in time."""
        if head >= tail or self.times[tail - 1] < instant:
            return tail
        if instant - self.times[head] < self.times[tail - 1] - instant:
            return self._search(lambda row: row[1] >= instant, head, tail)[0]
        return self._search_backwards(instant, head, tail)

    def _search_backwards(self, instant: int, head: int, tail: int) -> int:
        """Return the first entry at or after `instant`: reads the last few entries, skips back, then bisects."""
        execute, found = self.cursor.execute, tail
        near = execute(SELECT_LAST, (self.id, head, tail, FIRST_READ)).fetchall()
        for row in near:
            if row[1] < instant:
                return found
            found = self._found(row)
        if len(near) < FIRST_READ:
            return found
        low, high, step, bracketed = head, found, FIRST_READ, False
        while low < high:
            middle = (low + high) // 2 if bracketed else max(low, high - step)
            row = execute(SELECT_NEXT, (self.id, middle, high, 1)).fetchone()
            if row is None:
                high = middle
            elif row[1] >= instant:
                high, found = middle, self._found(row)
            else:
                low, bracketed = row[0] + 1, True
            step *= 2
        return found

    def reaching(self, total: int, head: int, tail: int) -> int:
        """Return the first entry whose sum reaches `total`."""
        return self._search(lambda row: row[2] >= total, head, tail)[0]

    def _search(self, reached: Callable[[Row], bool], low: int, high: int) -> tuple[int, int]:
        """Return the first entry for which `reached` is true, or the end; and the sum of the entry before, 0 if none.

        Reads the first few entries, then skips ahead in growing steps, then bisects: `reached` is false for entries
        before `low`, and true from `high` on.
        """
        found, before, step = high, 0, FIRST_READ
        near = self.cursor.execute(SELECT_NEXT, (self.id, low, high, FIRST_READ)).fetchall()
        for row in near:
            if reached(row):
                return self._found(row), before
            low, before = row[0] + 1, row[2]
        if len(near) < FIRST_READ:
            return found, before
        while low < high:
            middle = low + min(step, (high - low) // 2)
            row = self.cursor.execute(SELECT_NEXT, (self.id, middle, high, 1)).fetchone()
            if row is None:
                high = middle
            elif reached(row):
                high, found = middle, self._found(row)
            else:
                low, before = row[0] + 1, row[2]
                step *= 2
        return found, before

    def _found(self, row: Row) -> int:
        seq, self.times[seq], self.sums[seq], self.known_costs[seq] = row
        return seq

    def append(self, tail: int, time: int, total: int) -> None:
        """Add an entry at `tail`; it is written together with the state."""
        self.added = tail
        self.times[tail] = time
        self.sums[tail] = total

    def costs(self, span: range, head: int, base: int) -> Iterator[tuple[int, int]]:
        """Yield the entries of a range, in its order, with the cost of each."""
        del head, base
        if len(span) == 1 and span[0] in self.known_costs:
            yield span[0], self.known_costs[span[0]]
            return
        rising = span.step > 0
        ends = (span.start, span.stop) if rising else (span.stop + 1, span.start + 1)
        order = "ASC" if rising else "DESC"
        query = f"SELECT seq, cost FROM entry WHERE log = ? AND seq >= ? AND seq < ? ORDER BY seq {order}"  # noqa: S608 - one of two words
        yield from self.cursor.connection.execute(query, (self.id, *ends))

    def change(self, changes: Changes, head: int, tail: int, base: int) -> tuple[LogRows, int, int, int]:
        """Change the costs of some entries, and remove entries whose cost becomes 0.

        The sums on one side of each entry are updated: those before it, together with the base, or those from it on.
        Changes are written at once: only `adjust` makes them, and it is never denied.
        """
        execute, removed = self.cursor.execute, False
        for seq, difference, cost in changes:
            if seq - head < tail - seq:
                base -= difference
                start, end, shift, own_shift = head, seq, -difference, 0
            else:
                start, end, shift, own_shift = seq + 1, tail, difference, difference
            if start < end:
                execute(SHIFT_SUMS, (shift, self.id, start, end))
            if cost:
                execute(CHANGE_ENTRY, (own_shift, cost, self.id, seq))
            else:
                execute("DELETE FROM entry WHERE log = ? AND seq = ?", (self.id, seq))
                removed = True
            for known in self.sums:
                if start <= known < end:
                    self.sums[known] += shift
                elif known == seq:
                    self.sums[known] += own_shift
            self.known_costs[seq] = cost
        if not removed:
            return self, head, tail, base
        self.times.clear()
        self.sums.clear()
        self.known_costs.clear()
        last = execute(SELECT_LAST, (self.id, head, tail, 1)).fetchone()
        if last is None:
            return self, tail, tail, base
        first = execute(SELECT_NEXT, (self.id, head, tail, 1)).fetchone()
        return self, self._found(first), self._found(last) + 1, base

    def trim(self, head: int, tail: int, base: int) -> tuple[LogRows, int, int, int]:
        """Return the log unchanged: `save` removes expired entries."""
        return self, head, tail, base
