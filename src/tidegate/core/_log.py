"""sliding_log and concurrency: (limit, entries, head, tail, base).

Entries [head, tail) are live; `base` is the running sum before them. A transition appends at `tail`, which older states
do not read, so a discarded state has changed nothing; only the latest state may be extended. Running sums make every
look-up a bisection. A store may keep the entries elsewhere, in an object with the members of LogEntries. Its indices
may have gaps, but `head` and `tail - 1` must be entries if the log is not empty.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.core._bounds import MAX_INTEGER
from tidegate.core._state import NEVER, State, View, current

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tidegate.core._limit import Limit

Changes = list[tuple[int, int, int]]  # of a log: the entry, the change of its cost, its new cost
Log = tuple[Any, int, int, int, int]  # entries, head, tail, base, and the instant, never before the last entry
CHUNK_SHIFT: Final = 7
CHUNK_LENGTH: Final = 1 << CHUNK_SHIFT  # sums that a correction copies


class CorrectedSums:
    """The running sums of a log with corrected entries, in chunks, each with an offset that is added to its sums.

    A correction copies one chunk and the list of chunks; the log before it shares all others. So corrections take
    about the same time in a long log as in a short one, and older states stay as they were.
    """

    __slots__ = ("_chunks", "_offsets")

    def __init__(self, chunks: list[array[int]], offsets: list[int]) -> None:
        """Take chunks of `CHUNK_LENGTH` sums, of which only the last may be shorter, and their offsets."""
        self._chunks = chunks
        self._offsets = offsets

    @classmethod
    def of(cls, sums: array[int], tail: int) -> CorrectedSums:
        """Copy the first `tail` sums."""
        ends = range(CHUNK_LENGTH, tail + CHUNK_LENGTH, CHUNK_LENGTH)
        return cls([sums[end - CHUNK_LENGTH : min(end, tail)] for end in ends], [0] * len(ends))

    def __getitem__(self, place: int) -> int:
        """Return one sum."""
        chunk = place >> CHUNK_SHIFT
        return self._chunks[chunk][place & CHUNK_LENGTH - 1] + self._offsets[chunk]

    def copy(self, head: int, tail: int) -> array[int]:
        """Return the sums of a range."""
        sums = array("q")
        for chunk, offset in zip(self._chunks, self._offsets, strict=True):
            sums.extend([each + offset for each in chunk] if offset else chunk)
        return sums[head:tail]

    def correct(self, place: int, difference: int) -> CorrectedSums:
        """Return the sums after the cost of one entry has changed."""
        number = place >> CHUNK_SHIFT
        chunks, offsets = self._chunks[:], self._offsets[:]
        chunks[number] = chunk = chunks[number][:]
        for i in range(place & CHUNK_LENGTH - 1, len(chunk)):
            chunk[i] += difference
        for i in range(number + 1, len(offsets)):
            offsets[i] += difference
        return CorrectedSums(chunks, offsets)

    def append(self, total: int) -> None:
        """Add a sum at the end."""
        if not self._chunks or len(self._chunks[-1]) == CHUNK_LENGTH:
            self._chunks.append(array("q"))
            self._offsets.append(0)
        self._chunks[-1].append(total - self._offsets[-1])

    def truncate(self, tail: int) -> None:
        """Drop the sums from `tail` on, and what an interrupted `append` left."""
        kept = tail + CHUNK_LENGTH - 1 >> CHUNK_SHIFT
        del self._chunks[kept:], self._offsets[kept:]
        if kept:
            del self._chunks[-1][tail - (kept - 1 << CHUNK_SHIFT) :]


class LogEntries(NamedTuple):
    """The times of admitted calls, and the running sums of their costs."""

    times: array[int]
    sums: array[int] | CorrectedSums

    def until(self, instant: int, head: int, tail: int) -> tuple[int, int]:
        """Return the first entry after `instant` (or `tail`), and the sum before it; `head` must not be after it."""
        first = bisect_right(self.times, instant, head, tail)
        return first, self.sums[first - 1]

    def since(self, instant: int, head: int, tail: int) -> int:
        """Return the first entry at or after `instant`, or `tail`."""
        return bisect_left(self.times, instant, head, tail)

    def reaching(self, total: int, head: int, tail: int) -> int:
        """Return the first entry whose sum reaches `total`."""
        return bisect_left(self.sums, total, head, tail)

    def append(self, tail: int, time: int, total: int) -> None:
        """Write an entry at `tail`, and drop entries that a discarded state left there.

        `times` shrinks last and grows first, so its length reveals an interrupted append or truncation.
        """
        times, sums = self
        if len(times) > tail:
            if isinstance(sums, CorrectedSums):
                sums.truncate(tail)
            else:
                del sums[tail:]
            del times[tail:]
        times.append(time)
        sums.append(total)

    def costs(self, span: range, head: int, base: int) -> Iterator[tuple[int, int]]:
        """Yield the entries of a range, in its order, and the cost of each."""
        for i in span:
            yield i, self.sums[i] - (self.sums[i - 1] if i > head else base)

    def correct_one(self, place: int, delta: int, head: int, tail: int, base: int) -> LogEntries | None:
        """Return the log with the cost of one entry changed, as `change` does; None if it would do more than that."""
        times, sums = self
        before = sums[place - 1] if place > head else base
        if place == head or sums[place] - before <= -delta or delta > MAX_INTEGER - sums[tail - 1] + base:
            return None
        corrected = CorrectedSums.of(sums, tail) if isinstance(sums, array) else sums
        return LogEntries(times, corrected.correct(place, delta))

    def change(self, changes: Changes, head: int, tail: int, base: int) -> tuple[Any, int, int, int]:
        """Return the log with the costs of neighbouring entries changed; entries with a cost of 0 are removed."""
        total = gone = 0
        front = head
        for i, difference, cost in changes:
            total += difference
            gone += not cost
            front += i == front
        if total < 0 and front == head + len(changes):
            return self, head + gone, tail, base - total  # at the front, nothing needs to be copied
        if not gone:  # the times are the same: both logs share them, since only the newer one will be extended
            corrected = CorrectedSums.of(self.sums, tail) if isinstance(self.sums, array) else self.sums
            for i, difference, _ in changes:
                corrected = corrected.correct(i, difference)
            return LogEntries(self.times, corrected), head, tail, base
        old, times, sums, shift, last = self.copied_sums(0, tail), array("q"), array("q"), 0, head
        for i, difference, cost in sorted(changes):  # neighbours: only before the first are there entries to copy
            times += self.times[last : i + (cost > 0)]
            sums += old[last:i]
            shift += difference
            if cost:
                sums.append(old[i] + shift)
            last = i + 1
        times += self.times[last:tail]
        sums += array("q", [before + shift for before in old[last:tail]])
        return LogEntries(times, sums), 0, tail - head - gone, base

    def copied_sums(self, head: int, tail: int) -> array[int]:
        """Return the sums of a range of entries."""
        return self.sums[head:tail] if isinstance(self.sums, array) else self.sums.copy(head, tail)

    def trim(self, head: int, tail: int, base: int) -> tuple[Any, int, int, int]:
        """Return the log without its expired entries."""
        sums = array("q", [total - base for total in self.copied_sums(head, tail)])
        return LogEntries(self.times[head:tail], sums), 0, tail - head, 0


def charge_log(state: State | None, limit: Limit, cost: int, now: int) -> State | None:
    """Count every admitted call until exactly one period later."""
    if state is not None and state[0] is limit:  # the common state: no entry has expired
        _, entries, head, tail, base = state
        times, last = entries.times, tail - 1
        if times[head] > now - limit.length and times[last] <= now:
            total = entries.sums[last] + cost
            if total - base > limit.quota:
                return None
            entries.append(tail, now, total)
            return (limit, entries, head, tail + 1, base)
    entries, head, tail, base, now = _log(state, limit, now)
    total = entries.sums[tail - 1] if tail > head else base
    if cost > limit.quota - (total - base):
        return None
    entries.append(tail, now, total + cost)
    return _logged(limit, entries, head, tail + 1, base)


def view_log(state: State | None, limit: Limit, cost: int, now: int) -> View:
    """Compute the view of a log."""
    entries, head, tail, base, _ = _log(state, limit, now)
    if state is None or head == tail:
        return View((limit.quota, NEVER if cost > limit.quota else 0, 0))
    total = entries.sums[tail - 1]
    left = limit.quota - (total - base)
    ends = entries.times[tail - 1] + limit.length
    if state[0] is not limit:
        ends = min(ends, limit.rules.expires(state))  # if that limit was shorter, its entries expire sooner
    retry = 0
    if cost > limit.quota:
        retry = NEVER
    elif cost > max(0, left):
        entry = entries.reaching(total + cost - limit.quota, head, tail)
        retry = min(ends, entries.times[entry] + limit.length) - now
    return View((left, retry, ends - now))


def _log(state: State | None, limit: Limit, now: int) -> Log:
    """Return the entries that count, and the instant."""
    if state is None or state[0] is not limit:
        state = current(state, limit, now)
    if state is None:
        return LogEntries(array("q"), array("q")), 0, 0, 0, now
    _, entries, head, tail, base = state
    times = entries.times
    if now < times[tail - 1]:  # noqa: PLR1730 - max() would cost a tenth of the view
        now = times[tail - 1]
    if times[head] <= now - limit.length:
        head, base = entries.until(now - limit.length, head, tail)
    return entries, head, tail, base, now


def _logged(limit: Limit, entries: Any, head: int, tail: int, base: int) -> State | None:  # noqa: ANN401 - any log
    """Build a state; expired entries are dropped once they are the larger part."""
    if head == tail:
        return None
    if head > 16 and head * 2 > tail:  # noqa: PLR2004 - small logs are not worth copying
        entries, head, tail, base = entries.trim(head, tail, base)
    return (limit, entries, head, tail, base)


def adjust_log(state: State | None, limit: Limit, delta: int, now: int, at: int | None) -> State | None:
    """Correct the entry made at `at`, while it is in the log; by default refund the latest entries first."""
    log = entries, head, tail, base, now = _log(state, limit, now)
    if at is None:
        return _correct(limit, log, delta, range(tail - 1, head - 1, -1))
    # An entry made while the clock had stepped back has the latest instant seen before: the next one in the log.
    first = entries.since(at, head, tail) if at > now - limit.length else tail
    if first == tail:
        return state
    if entries.__class__ is LogEntries and (first + 1 == tail or entries.times[first + 1] > entries.times[first]):
        corrected = entries.correct_one(first, delta, head, tail, base)
        if corrected is not None:
            return (limit, corrected, head, tail, base)
    last = tail if first + 1 == tail else entries.until(entries.times[first], first, tail)[0]
    return _correct(limit, log, delta, range(last - 1, first - 1, -1))


def adjust_slots(state: State | None, limit: Limit, delta: int, now: int, at: int | None) -> State | None:
    """Release the slots taken at `at`; by default those whose lease ends first, so that the others last longest."""
    if at is not None:
        return adjust_log(state, limit, delta, now, at)
    log = _, head, tail, _, _ = _log(state, limit, now)
    return _correct(limit, log, delta, range(head, tail))


def _correct(limit: Limit, log: Log, delta: int, order: range) -> State | None:
    """Change the costs of entries, in the given order, by `delta` in total; entries with a cost of 0 are removed.

    A positive delta on an empty log adds an entry.
    """
    entries, head, tail, base, now = log
    if head == tail:
        if delta < 0:
            return None
        entries.append(tail, now, base + delta)
        return _logged(limit, entries, head, tail + 1, base)
    used = entries.sums[tail - 1] - base
    changes: Changes = []
    for i, cost in entries.costs(order, head, base):
        change = min(max(delta, -cost), MAX_INTEGER - used)
        changes.append((i, change, cost + change))
        delta -= change
        if delta >= 0:  # done, or the bound is reached
            break
    return _logged(limit, *entries.change(changes, head, tail, base))


def expires_log(state: State) -> int:
    """Return when the last entry expires."""
    return int(state[1].times[state[3] - 1] + state[0].length)


def dump_log(state: State) -> list[int]:
    """Return the time and cost of each entry."""
    _, entries, head, tail, base = state
    costs = (after - before for before, after in pairwise([base, *entries.copied_sums(head, tail)]))
    return [number for entry in zip(entries.times[head:tail], costs, strict=True) for number in entry]


def load_log(limit: Limit, numbers: Sequence[int]) -> State:
    """Restore a log."""
    times, costs = array("q", numbers[::2]), numbers[1::2]
    return (limit, LogEntries(times, array("q", accumulate(costs))), 0, len(times), 0)
