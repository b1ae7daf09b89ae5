"""The six algorithms, as pure transitions of integers.

    charge(state, limit, cost, now)       -> the state after, or None: refused
    view(state, limit, cost, now)         -> (remaining, retry, reset)
    adjust(state, limit, delta, now, at)  -> the state after
    expires(state)                        -> the instant from which the state answers like no state

A **State** is a tuple that begins with the Limit that wrote it; None is the state of a key never seen. `charge` takes
`cost` permits (at least one) if they are there. `view` explains: `remaining` permits; `retry`, 0 if the cost would be
charged, else the microseconds until it would be (nothing else happening), or NEVER; `reset`, the microseconds until all
is as if nothing had been spent. `adjust` gives back (delta < 0) or takes (delta > 0) permits after the fact: those
charged at the instant `at`, or the latest ones when `at` is None.

Time never runs backwards for a key: every transition first moves `now` up to the last instant its state has seen.
A state written under another version of the limit is read so that the change itself gives nothing back: windows and
logs keep what was consumed, a bucket keeps what is available, capped.

The Lua and SQL ports of this file carry the same function names in the same order.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.core.bounds import MAX, ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.core.limit import Limit

State = tuple[Any, ...]
View = tuple[int, int, int]
Peaks = tuple[tuple[int, int], ...]

NEVER: Final = -1
PEAKS: Final = 16  # how many high-water marks a bucket with open reservations remembers


# ---- token_bucket: (limit, level, at) --------------------------------------------------------------------------------
#
# The level counts 1/scale permits, so that each microsecond adds exactly `rate`. Products stay small: a level lies
# between floor and capacity, cost * scale is only formed for costs within the burst.


def charge_bucket(state: State | None, limit: Limit, cost: int, now: int) -> State | None:
    """Take permits from a bucket that refills continuously."""
    owner: Limit | Marked = limit
    if state is None:
        level = limit.capacity
    elif state[0] is limit:
        level = state[1]
        at = state[2]
        if now > at:
            level += (now - at) * limit.rate
            level = min(level, limit.capacity)
        else:
            now = at
    else:
        owner, level, now = refill(state, limit, now)
    level -= cost * limit.scale
    return (owner, level, now) if level >= 0 else None


def view_bucket(state: State | None, limit: Limit, cost: int, now: int) -> View:
    """Explain a bucket; a cost of nothing is never refused, not even by a bucket in debt."""
    level = limit.capacity if state is None else refill(state, limit, now)[1]
    retry = 0
    if cost and cost * limit.scale > level:
        retry = NEVER if cost > limit.burst else ceil_div(cost * limit.scale - level, limit.rate)
    return max(0, level // limit.scale), retry, ceil_div(limit.capacity - level, limit.rate)


def refill(state: State, limit: Limit, now: int) -> tuple[Limit | Marked, int, int]:
    """Bring a bucket of whatever origin up to now: its owner (with the marks it carries), its level, the instant."""
    owner, level, at = state
    peaks: Peaks = ()
    if isinstance(owner, Marked):
        owner, peaks = owner
    if owner is not limit and owner != limit:
        if expires_bucket(state) <= now:
            return limit, limit.capacity, now
        level, peaks = rescale(level, owner, limit), ()
    now = max(now, at)
    level = min(limit.capacity, level + (now - at) * limit.rate)
    return marked(limit, raise_peaks(peaks, level, limit)), level, now


def rescale(level: int, old: Limit, new: Limit) -> int:
    """Carry what is available over to a changed limit; fractions of a permit are dropped where they would not fit."""
    permits, part = divmod(level, old.scale)
    if old.scale * new.scale > MAX:
        part = 0
    if permits >= new.burst:
        return new.capacity
    if permits < new.floor // new.scale:
        return new.floor
    return permits * new.scale + part * new.scale // old.scale


def adjust_bucket(state: State | None, limit: Limit, delta: int, now: int, at: int | None) -> State | None:
    """Give permits back to a bucket, or take more.

    Permits charged a while ago may have been refilled since: had they never been taken, the bucket would have been
    fuller, up to its brim, and what spilled is gone. So at most what the highest level since then left free comes back.
    """
    owner, level, now = (limit, limit.capacity, now) if state is None else refill(state, limit, now)
    peaks = owner.peaks if isinstance(owner, Marked) else ()
    if delta >= 0:
        level = limit.floor if delta > (level - limit.floor) // limit.scale else level - delta * limit.scale
    else:
        credit = min(-delta, limit.burst) * limit.scale
        if at is not None:
            peak = next((top for since, top in reversed(peaks) if since <= at), limit.capacity)
            credit = min(credit, limit.capacity - peak)
            peaks = tuple((t, max(top, peak + credit) if t <= at else top + credit) for t, top in peaks)
        level += min(credit, limit.capacity - level)
    return (marked(limit, peaks), level, now) if level < limit.capacity else None


def mark_bucket(state: State) -> State:
    """Remember a charge that may be given back in part: from here on, the highest level is kept with the state."""
    owner, level, at = state
    limit, peaks = owner if isinstance(owner, Marked) else (owner, ())
    return marked(limit, (*peaks, (at, level))[-PEAKS:]), level, at


def expires_bucket(state: State) -> int:
    """Tell when the bucket is full again."""
    owner, level, at = state
    limit = owner.limit if isinstance(owner, Marked) else owner
    return int(at + ceil_div(limit.capacity - level, limit.rate))


class Marked(NamedTuple):
    """Stands for the limit in the state of a bucket with open reservations.

    `peaks` holds (since, level): the highest level of the bucket since that instant. Earlier marks are the higher ones.
    """

    limit: Limit
    peaks: Peaks


def marked(limit: Limit, peaks: Peaks) -> Limit | Marked:
    """Name the owner of a bucket: the limit, with the marks where there are any."""
    return Marked(limit, peaks) if peaks else limit


def raise_peaks(peaks: Peaks, level: int, limit: Limit) -> Peaks:
    """Let a level leave its mark: marks it reaches become one, since the earliest of them; a full bucket has none."""
    if level >= limit.capacity:
        return ()
    if not peaks or peaks[-1][1] >= level:
        return peaks
    kept = next(i for i, (_, top) in enumerate(peaks) if top < level)
    return (*peaks[:kept], (peaks[kept][0], level))


# ---- fixed_window and calendar_window: (limit, used, start) ----------------------------------------------------------


def charge_fixed(state: State | None, limit: Limit, cost: int, now: int) -> State | None:
    """Count in a window that opens at the first admitted call and lasts one period."""
    used, start, now = _fixed(state, limit, now)
    return (limit, used + cost, start) if used + cost <= limit.quota else None


def view_fixed(state: State | None, limit: Limit, cost: int, now: int) -> View:
    """Explain the open window."""
    used, start, now = _fixed(state, limit, now)
    return _view_window(limit, cost, used, start + limit.length - now)


def _fixed(state: State | None, limit: Limit, now: int) -> tuple[int, int, int]:
    state = current(state, limit, now)
    if state is not None and now - state[2] < limit.length:
        return state[1], state[2], max(now, state[2])
    return 0, now, now


def adjust_fixed(state: State | None, limit: Limit, delta: int, now: int, at: int | None) -> State | None:
    """Correct the count of the open window, if that is the one that was charged."""
    used, start, now = _fixed(state, limit, now)
    return _adjust_window(limit, delta, used, start) if at is None or at >= start else state


def expires_fixed(state: State) -> int:
    """Tell when the window ends."""
    return int(state[2] + state[0].length)


def charge_calendar(state: State | None, limit: Limit, cost: int, now: int) -> State | None:
    """Count in the calendar window around now."""
    used, start, _, now = _calendar(state, limit, now)
    return (limit, used + cost, start) if used + cost <= limit.quota else None


def view_calendar(state: State | None, limit: Limit, cost: int, now: int) -> View:
    """Explain the calendar window around now."""
    used, _, end, now = _calendar(state, limit, now)
    return _view_window(limit, cost, used, end - now)


def _calendar(state: State | None, limit: Limit, now: int) -> tuple[int, int, int, int]:
    state = current(state, limit, now)
    if state is not None:
        now = max(now, state[2])
    start, end = limit.calendar.window(now)  # type: ignore[union-attr]  # Limit gives every calendar_window one
    return (state[1] if state is not None and state[2] >= start else 0), start, end, now


def adjust_calendar(state: State | None, limit: Limit, delta: int, now: int, at: int | None) -> State | None:
    """Correct the count of the calendar window around now, if that is the one that was charged."""
    used, start, _, now = _calendar(state, limit, now)
    return _adjust_window(limit, delta, used, start) if at is None or at >= start else state


def expires_calendar(state: State) -> int:
    """Tell when the calendar window ends."""
    return int(state[0].calendar.window(state[2])[1])


def _view_window(limit: Limit, cost: int, used: int, ahead: int) -> View:
    retry = 0
    if cost and used + cost > limit.quota:
        retry = NEVER if cost > limit.quota else ahead
    return max(0, limit.quota - used), retry, ahead if used else 0


def _adjust_window(limit: Limit, delta: int, used: int, start: int) -> State | None:
    used = min(MAX, max(0, used + delta))
    return (limit, used, start) if used else None


# ---- sliding_window: (limit, current, previous, start) ---------------------------------------------------------------
#
# Windows lie on whole multiples of the period. The previous one counts by the share of it that a rolling window still
# covers, in ticks: count * ticks <= MAX, since Limit chooses the tick so for the quota and `adjust` clamps the counts.


def charge_sliding(state: State | None, limit: Limit, cost: int, now: int) -> State | None:
    """Count in two windows, the previous one weighted by how much of it still matters."""
    count, previous, start, now = _sliding(state, limit, now)
    used = count + _weigh(limit, previous, start + limit.length - now)
    return (limit, count + cost, previous, start) if used + cost <= limit.quota else None


def view_sliding(state: State | None, limit: Limit, cost: int, now: int) -> View:
    """Explain the two windows."""
    count, previous, start, now = _sliding(state, limit, now)
    quota, length, ticks = limit.quota, limit.length, limit.length // limit.tick
    ahead = start + length - now
    used = count + _weigh(limit, previous, ahead)
    retry = 0
    if cost > quota:
        retry = NEVER
    elif cost and used + cost > quota:
        if count + cost <= quota:  # enough once the previous window weighs less
            retry = ahead - (quota - count - cost) * ticks // previous * limit.tick
        else:  # only when this window is the previous one, and weighs less
            fits = (quota - cost) * ticks // count
            retry = ahead + (length - fits * limit.tick if fits < ticks else 0)
    return max(0, quota - used), retry, ahead + length if count else ahead if previous else 0


def _weigh(limit: Limit, previous: int, ahead: int) -> int:
    """Weigh the previous window by the part of it that lies within one period, rounded up."""
    ticks = limit.length // limit.tick
    return ceil_div(previous * min(ticks, ceil_div(ahead, limit.tick)), ticks)


def _sliding(state: State | None, limit: Limit, now: int) -> tuple[int, int, int, int]:
    state = current(state, limit, now)
    if state is None:
        return 0, 0, now - now % limit.length, now
    owner, count, previous, start = state
    now = max(now, start)
    if owner is not limit:
        most = heaviest(limit)
        if owner.length != limit.length:  # windows of another length: count all of it as spent now
            return min(most, count + previous), 0, now - now % limit.length, now
        count, previous = min(most, count), min(most, previous)
    ended = (now - start) // limit.length
    if ended:
        count, previous = 0, count if ended == 1 else 0
    return count, previous, start + ended * limit.length, now


def adjust_sliding(state: State | None, limit: Limit, delta: int, now: int, at: int | None) -> State | None:
    """Correct the count of the window that was charged, while it still weighs."""
    count, previous, start, now = _sliding(state, limit, now)
    most = heaviest(limit)
    if at is None or at >= start:
        count = min(most, max(0, count + delta))
    elif at >= start - limit.length:
        previous = min(most, max(0, previous + delta))
    return (limit, count, previous, start) if count or previous else None


def heaviest(limit: Limit) -> int:
    """Tell the largest count whose weight can be worked out below MAX; never less than the quota."""
    return MAX // (limit.length // limit.tick)


def expires_sliding(state: State) -> int:
    """Tell when neither window weighs anything."""
    return int(state[3] + state[0].length * (2 if state[1] else 1))


# ---- sliding_log and concurrency: (limit, entries, head, tail, base) -------------------------------------------------
#
# Entries [head, tail) are live. A transition appends behind `tail`, which no older state can see, so a state that is
# dropped again has changed nothing; only the latest state may be built upon. Sums make every look-up a bisection.


class Entries(NamedTuple):
    """When calls were admitted, and the running sum of their costs."""

    times: array[int]
    sums: array[int]


def charge_log(state: State | None, limit: Limit, cost: int, now: int) -> State | None:
    """Count every admitted call until exactly one period later."""
    entries, head, tail, base, now = _log(state, limit, now)
    times, sums = entries
    total = sums[tail - 1] if tail > head else base
    if total - base + cost > limit.quota:
        return None
    del times[tail:], sums[tail:]
    times.append(now)
    sums.append(total + cost)
    return _logged(limit, entries, head, tail + 1, base)


def view_log(state: State | None, limit: Limit, cost: int, now: int) -> View:
    """Explain the log."""
    (times, sums), head, tail, base, now = _log(state, limit, now)
    total = sums[tail - 1] if tail > head else base
    left = limit.quota - (total - base)
    retry = 0
    if cost > limit.quota:
        retry = NEVER
    elif cost > max(0, left):
        retry = times[bisect_left(sums, total + cost - limit.quota, head, tail)] + limit.length - now
    return max(0, left), retry, times[tail - 1] + limit.length - now if tail > head else 0


def _log(state: State | None, limit: Limit, now: int) -> tuple[Entries, int, int, int, int]:
    state = current(state, limit, now)
    if state is None:
        return Entries(array("q"), array("q")), 0, 0, 0, now
    _, entries, head, tail, base = state
    now = max(now, entries.times[tail - 1])
    left = bisect_right(entries.times, now - limit.length, head, tail)
    if left > head:
        head, base = left, entries.sums[left - 1]
    return entries, head, tail, base, now


def _logged(limit: Limit, entries: Entries, head: int, tail: int, base: int) -> State | None:
    """Build a state, with the entries that left dropped once they are the larger part."""
    if head == tail:
        return None
    if head > 16 and head * 2 > tail:  # noqa: PLR2004 - small logs are not worth copying
        sums = array("q", [total - base for total in entries.sums[head:tail]])
        return (limit, Entries(entries.times[head:tail], sums), 0, tail - head, 0)
    return (limit, entries, head, tail, base)


def adjust_log(state: State | None, limit: Limit, delta: int, now: int, at: int | None) -> State | None:
    """Correct the entry made at `at`, while it is in the log; by default give back the latest entries first."""
    entries, head, tail, base, now = _log(state, limit, now)
    first, last = head, tail
    if at is not None:
        first, last = tail, tail
        if at > now - limit.length:
            # Made while the clock had stepped back, it stands under the last instant seen before: the next one.
            first = bisect_left(entries.times, at, head, tail)
            last = bisect_right(entries.times, entries.times[first], first, tail) if first < tail else tail
    return _correct(limit, entries, head, tail, base, delta, range(last - 1, first - 1, -1))


def adjust_slots(state: State | None, limit: Limit, delta: int, now: int, at: int | None) -> State | None:
    """Release the slots taken at `at`; by default those whose lease ends first, so that what is left lasts longest."""
    if at is not None:
        return adjust_log(state, limit, delta, now, at)
    entries, head, tail, base, now = _log(state, limit, now)
    return _correct(limit, entries, head, tail, base, delta, range(head, tail))


def _correct(limit: Limit, entries: Entries, head: int, tail: int, base: int, delta: int, order: range) -> State | None:
    """Change the costs of entries, in the order given, by `delta` in all; an entry that costs nothing goes."""
    times, sums = entries.times[:tail], entries.sums[:tail]
    emptied = []
    for i in order:
        cost = sums[i] - (sums[i - 1] if i > head else base)
        change = min(max(delta, -cost), MAX - sums[-1])
        for later in range(i, tail):
            sums[later] += change
        if cost + change == 0:
            emptied.append(i)
        delta -= change
        if not delta:
            break
    for i in sorted(emptied, reverse=True):
        del times[i], sums[i]
    return _logged(limit, Entries(times, sums), head, tail - len(emptied), base)


def expires_log(state: State) -> int:
    """Tell when the last entry leaves."""
    return int(state[1].times[state[3] - 1] + state[0].length)


# ---- all of them -----------------------------------------------------------------------------------------------------


def current(state: State | None, limit: Limit, now: int) -> State | None:
    """Forget a state that had ended under the limit it was written for, before that limit was changed."""
    if state is None or state[0] is limit or limit.rules.expires(state) > now:
        return state
    return None


class Algorithm(NamedTuple):
    """The transitions of one algorithm; `mark` is called on the state of a charge that may be corrected later."""

    charge: Callable[[State | None, Limit, int, int], State | None]
    view: Callable[[State | None, Limit, int, int], View]
    adjust: Callable[[State | None, Limit, int, int, int | None], State | None]
    expires: Callable[[State], int]
    mark: Callable[[State], State] = lambda state: state


ALGORITHMS: Final = {
    "token_bucket": Algorithm(charge_bucket, view_bucket, adjust_bucket, expires_bucket, mark_bucket),
    "fixed_window": Algorithm(charge_fixed, view_fixed, adjust_fixed, expires_fixed),
    "calendar_window": Algorithm(charge_calendar, view_calendar, adjust_calendar, expires_calendar),
    "sliding_window": Algorithm(charge_sliding, view_sliding, adjust_sliding, expires_sliding),
    "sliding_log": Algorithm(charge_log, view_log, adjust_log, expires_log),
    "concurrency": Algorithm(charge_log, view_log, adjust_slots, expires_log),
}
