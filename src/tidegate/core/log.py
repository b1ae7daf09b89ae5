"""sliding_log and concurrency: (limit, entries, head, tail, base).

Entries [head, tail) are live; `base` is the running sum before them. A transition appends at `tail`, which older states
do not read, so a discarded state has changed nothing; only the latest state may be extended. Running sums make every
look-up a bisection. A store may keep the entries elsewhere, in an object with the members of LogEntries. Its indices
may have gaps, but `head` and `tail - 1` must be entries if the log is not empty.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from tidegate.core.bounds import MAX_INTEGER
from tidegate.core.state import NEVER, State, View, current

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tidegate.core.limit import Limit

Changes = list[tuple[int, int, int]]  # of a log: the entry, the change of its cost, its new cost
Log = tuple[Any, int, int, int, int]  # entries, head, tail, base, and the instant, never before the last entry


@dataclass(slots=True)  # not a NamedTuple: attributes of a class with slots are the fastest to read
class LogEntries:
    """The times of admitted calls, and the running sums of their costs."""

    times: array[int]
    sums: array[int]

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
        times, sums = self.times, self.sums
        if len(times) > tail:
            del sums[tail:], times[tail:]
        times.append(time)
        sums.append(total)

    def costs(self, span: range, head: int, base: int) -> Iterator[tuple[int, int]]:
        """Yield the entries of a range, in its order, and the cost of each."""
        for i in span:
            yield i, self.sums[i] - (self.sums[i - 1] if i > head else base)

    def change(self, changes: Changes, head: int, tail: int, base: int) -> tuple[Any, int, int, int]:
        """Return the log with the costs of neighbouring entries changed; entries with a cost of 0 are removed."""
        total = sum(difference for _, difference, _ in changes)
        gone = sum(not cost for _, _, cost in changes)
        if total < 0 and [i for i, _, _ in changes] == list(range(head, head + len(changes))):
            return self, head + gone, tail, base - total  # at the front, nothing needs to be copied
        times, sums, shift, last = array("q"), array("q"), 0, head
        for i, difference, cost in sorted(changes):  # neighbours: only before the first are there entries to copy
            times += self.times[last : i + (cost > 0)]
            sums += self.sums[last:i]
            shift += difference
            if cost:
                sums.append(self.sums[i] + shift)
            last = i + 1
        times += self.times[last:tail]
        sums += array("q", [before + shift for before in self.sums[last:tail]])
        return LogEntries(times, sums), 0, tail - head - gone, base

    def trim(self, head: int, tail: int, base: int) -> tuple[Any, int, int, int]:
        """Return the log without its expired entries."""
        sums = array("q", [total - base for total in self.sums[head:tail]])
        return LogEntries(self.times[head:tail], sums), 0, tail - head, 0


def charge_log(state: State | None, limit: Limit, cost: int, now: int) -> State | None:
    """Count every admitted call until exactly one period later."""
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
        return limit.quota, NEVER if cost > limit.quota else 0, 0
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
    return max(0, left), retry, ends - now


def used_log(state: State | None, limit: Limit, now: int) -> int:
    """Return the sum of the entries that count."""
    entries, head, tail, base, _ = _log(state, limit, now)
    return int(entries.sums[tail - 1] - base) if tail > head else 0


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
    log = entries, head, tail, _, now = _log(state, limit, now)
    if at is None:
        return _correct(limit, log, delta, range(tail - 1, head - 1, -1))
    # An entry made while the clock had stepped back has the latest instant seen before: the next one in the log.
    first = entries.since(at, head, tail) if at > now - limit.length else tail
    if first == tail:
        return state
    last, _ = entries.until(entries.times[first], first, tail)
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
    costs = (after - before for before, after in pairwise([base, *entries.sums[head:tail]]))
    return [number for entry in zip(entries.times[head:tail], costs, strict=True) for number in entry]


def load_log(limit: Limit, numbers: Sequence[int]) -> State:
    """Restore a log."""
    times, costs = array("q", numbers[::2]), numbers[1::2]
    return (limit, LogEntries(times, array("q", accumulate(costs))), 0, len(times), 0)
