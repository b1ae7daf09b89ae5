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
    from collections.abc import Callable, Iterator

    from tidegate.core.limit import Limit

State = tuple[Any, ...]
View = tuple[int, int, int]
Peaks = tuple[tuple[int, int], ...]
Changes = list[tuple[int, int, int]]  # of a log: the entry, the difference to its cost, its cost then

NEVER: Final = -1
PEAKS: Final = 16  # how many high-water marks a bucket with open reservations remembers


# ---- token_bucket: (limit, level, at) --------------------------------------------------------------------------------
#
# The level counts 1/scale permits, so that each microsecond adds exactly `rate`. Products stay small: a level lies
# between floor and capacity, which are at most MAX apart; elapsed * rate is only formed where that is not more than is
# missing, cost * scale only for costs within the burst.


def charge_bucket(state: State | None, limit: Limit, cost: int, now: int) -> State | None:
    """Take permits from a bucket that refills continuously."""
    if cost > limit.burst:
        return None
    owner: Limit | Marked = limit
    if state is None:
        level = limit.capacity
    elif state[0] is limit:
        level = state[1]
        at = state[2]
        if now <= at:
            now = at
        elif now - at > (limit.capacity - level) // limit.rate:
            level = limit.capacity
        else:
            level += (now - at) * limit.rate
    else:
        owner, level, now = refill(state, limit, now)
    level -= cost * limit.scale
    return (owner, level, now) if level >= 0 else None


def view_bucket(state: State | None, limit: Limit, cost: int, now: int) -> View:
    """Explain a bucket; a cost of nothing is never refused, not even by a bucket in debt."""
    if state is None:
        level, seen = limit.capacity, now
    elif state[0] is limit:  # what refill does, when it is the usual state
        _, level, seen = state
        if now > seen:
            level, seen = topped_up(level, limit, now - seen), now
    else:
        _, level, seen = refill(state, limit, now)
    missing = limit.capacity - level
    retry = 0
    if cost > limit.burst:
        retry = NEVER
    elif cost and cost * limit.scale > level:
        retry = seen - now + ceil_div(cost * limit.scale - level, limit.rate)
    return max(0, level // limit.scale), retry, seen - now + ceil_div(missing, limit.rate) if missing else 0


def refill(state: State, limit: Limit, now: int) -> tuple[Limit | Marked, int, int]:
    """Bring a bucket of whatever origin up to now: its owner (with the marks it carries), its level, the instant."""
    owner, level, at = state
    peaks: Peaks = ()
    if isinstance(owner, Marked):
        owner, peaks = owner
    passed = max(0, now - at)
    if owner is limit or owner == limit:
        level = topped_up(level, limit, passed)
        return marked(limit, raise_peaks(peaks, level, limit)), level, at + passed
    if expires_bucket(state) <= now:
        return limit, limit.capacity, now
    # Nobody knows when the limit changed, so the time since the last charge counts at the slower of the two rates.
    before, after = topped_up(level, owner, passed), topped_up(rescale(level, owner, limit), limit, passed)
    return limit, min(rescale(before, owner, limit), after), at + passed


def topped_up(level: int, limit: Limit, passed: int) -> int:
    """Let a bucket refill for some time."""
    if passed > (limit.capacity - level) // limit.rate:
        return limit.capacity
    return level + passed * limit.rate


def rescale(level: int, old: Limit, new: Limit) -> int:
    """Carry what is available over to a changed limit; fractions of a permit are dropped where they would not fit."""
    permits, part = divmod(level, old.scale)
    if new.scale > MAX // old.scale:
        part = 0
    if permits >= new.burst:
        return new.capacity
    if permits <= new.floor // new.scale:
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
        taken = level - limit.floor if delta > (level - limit.floor) // limit.scale else delta * limit.scale
        level -= taken
        if at is not None:
            peaks = tuple((t, top - taken if t >= at else top) for t, top in peaks)
    else:
        peak = level
        if at is not None:
            peak = next((top for since, top in reversed(peaks) if since <= at), limit.capacity)
        free = limit.capacity - peak
        credit = free if -delta > free // limit.scale else -delta * limit.scale
        if at is not None:
            peaks = tuple((t, max(top, peak + credit) if t <= at else top + credit) for t, top in peaks)
        level += credit
    return (marked(limit, peaks), level, now) if level < limit.capacity else None


def mark_bucket(state: State) -> State:
    """Remember a charge that may be given back in part: from here on, the highest level is kept with the state."""
    owner, level, at = state
    limit, peaks = owner if isinstance(owner, Marked) else (owner, ())
    peaks = (*(peak for peak in peaks if peak[0] < at), (at, level))
    if len(peaks) > PEAKS:  # of the two that differ least, the higher one stands for both: less comes back, never more
        least = min(range(1, len(peaks)), key=lambda i: peaks[i - 1][1] - peaks[i][1])
        peaks = peaks[:least] + peaks[least + 1 :]
    return marked(limit, peaks), level, at


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
    used, start = _fixed(state, limit, now)
    return (limit, used + cost, start) if cost <= limit.quota - used else None


def view_fixed(state: State | None, limit: Limit, cost: int, now: int) -> View:
    """Explain the open window."""
    used, start = _fixed(state, limit, now)
    return _view_window(limit, cost, used, start + limit.length - now)


def _fixed(state: State | None, limit: Limit, now: int) -> tuple[int, int]:
    state = current(state, limit, now)
    if state is not None and now - state[2] < limit.length:
        return state[1], state[2]
    return 0, now


def adjust_fixed(state: State | None, limit: Limit, delta: int, now: int, at: int | None) -> State | None:
    """Correct the count of the open window, if that is the one that was charged."""
    used, start = _fixed(state, limit, now)
    return _adjust_window(limit, delta, used, start) if at is None or at >= start else state


def expires_fixed(state: State) -> int:
    """Tell when the window ends."""
    return int(state[2] + state[0].length)


def charge_calendar(state: State | None, limit: Limit, cost: int, now: int) -> State | None:
    """Count in the calendar window around now."""
    used, start, _ = _calendar(state, limit, now)
    return (limit, used + cost, start) if cost <= limit.quota - used else None


def view_calendar(state: State | None, limit: Limit, cost: int, now: int) -> View:
    """Explain the calendar window around now."""
    used, _, end = _calendar(state, limit, now)
    return _view_window(limit, cost, used, end - now)


def _calendar(state: State | None, limit: Limit, now: int) -> tuple[int, int, int]:
    state = current(state, limit, now)
    if state is not None:
        now = max(now, state[2])
    start, end = limit.calendar.window(now)  # type: ignore[union-attr]  # Limit gives every calendar_window one
    return (state[1] if state is not None and state[2] >= start else 0), start, end


def adjust_calendar(state: State | None, limit: Limit, delta: int, now: int, at: int | None) -> State | None:
    """Correct the count of the calendar window around now, if that is the one that was charged."""
    used, start, _ = _calendar(state, limit, now)
    return _adjust_window(limit, delta, used, start) if at is None or at >= start else state


def expires_calendar(state: State) -> int:
    """Tell when the calendar window ends."""
    return int(state[0].calendar.window(state[2])[1])


def _view_window(limit: Limit, cost: int, used: int, ahead: int) -> View:
    retry = 0
    if cost and cost > limit.quota - used:
        retry = NEVER if cost > limit.quota else ahead
    return max(0, limit.quota - used), retry, ahead if used else 0


def _adjust_window(limit: Limit, delta: int, used: int, start: int) -> State | None:
    used = max(0, used + min(delta, MAX - used))
    return (limit, used, start) if used else None


# ---- sliding_window: (limit, current, previous, start) ---------------------------------------------------------------
#
# Windows lie on whole multiples of the period. The previous one counts by the share of it that a rolling window still
# covers, in ticks: count * ticks <= MAX, since Limit chooses the tick so for the quota and `adjust` clamps the counts.


def charge_sliding(state: State | None, limit: Limit, cost: int, now: int) -> State | None:
    """Count in two windows, the previous one weighted by how much of it still matters."""
    count, previous, start = _sliding(state, limit, now)
    left = max(0, limit.quota - count) - _weigh(limit, previous, start + limit.length - now)
    return (limit, count + cost, previous, start) if cost <= left else None


def view_sliding(state: State | None, limit: Limit, cost: int, now: int) -> View:
    """Explain the two windows."""
    count, previous, start = _sliding(state, limit, now)
    quota, length, ticks = limit.quota, limit.length, limit.length // limit.tick
    ahead = start + length - now
    left = max(0, max(0, quota - count) - _weigh(limit, previous, ahead))
    retry = 0
    if cost > quota:
        retry = NEVER
    elif cost > left:
        if cost <= quota - count:  # enough once the previous window weighs less
            retry = ahead - (quota - count - cost) * ticks // previous * limit.tick
        else:  # only when this window is the previous one, and weighs less
            retry = ahead + length - (quota - cost) * ticks // count * limit.tick
    return left, retry, ahead + length if count else ahead if previous else 0


def _weigh(limit: Limit, previous: int, ahead: int) -> int:
    """Weigh the previous window by the part of it that lies within one period, rounded up."""
    ticks = limit.length // limit.tick
    return ceil_div(previous * min(ticks, ceil_div(ahead, limit.tick)), ticks)


def _sliding(state: State | None, limit: Limit, now: int) -> tuple[int, int, int]:
    state = current(state, limit, now)
    if state is None:
        return 0, 0, now - now % limit.length
    owner, count, previous, start = state
    now = max(now, start)
    ended = (now - start) // owner.length
    if ended:
        count, previous, start = 0, count if ended == 1 else 0, start + ended * owner.length
    if owner is not limit:
        most = heaviest(limit)
        count, previous = min(most, count), min(most, previous)
        if owner.length != limit.length:  # windows of another length: count all of it as spent now
            count, previous, start = count + min(previous, most - count), 0, now - now % limit.length
    return count, previous, start


def adjust_sliding(state: State | None, limit: Limit, delta: int, now: int, at: int | None) -> State | None:
    """Correct the count of the window that was charged, while it still weighs."""
    count, previous, start = _sliding(state, limit, now)
    most = heaviest(limit)
    if at is None or at >= start:
        count = max(0, count + min(delta, most - count))
    elif at >= start - limit.length:
        previous = max(0, previous + min(delta, most - previous))
    return (limit, count, previous, start) if count or previous else None


def heaviest(limit: Limit) -> int:
    """Tell the largest count whose weight can be worked out below MAX; never less than the quota."""
    return MAX // (limit.length // limit.tick)


def expires_sliding(state: State) -> int:
    """Tell when neither window weighs anything."""
    return int(state[3] + state[0].length * (2 if state[1] else 1))


# ---- sliding_log and concurrency: (limit, entries, head, tail, base) -------------------------------------------------
#
# Entries [head, tail) are live; the running sum before them is `base`. A transition appends behind `tail`, which no
# older state can see, so a state that is dropped again has changed nothing; only the latest state may be built upon.
# Sums make every look-up a bisection. A store may keep the entries elsewhere: an object with the members of Entries,
# whose indices may have gaps, as long as `head` and `tail - 1` are entries of a log that is not empty.


class Entries(NamedTuple):
    """When calls were admitted, and the running sum of their costs."""

    times: array[int]
    sums: array[int]

    def until(self, instant: int, head: int, tail: int) -> tuple[int, int]:
        """Give the first entry after `instant` (or `tail`), and the sum before it; the entry at `head` is not after."""
        first = bisect_right(self.times, instant, head, tail)
        return first, self.sums[first - 1]

    def since(self, instant: int, head: int, tail: int) -> int:
        """Give the first entry at or after `instant`, or `tail`."""
        return bisect_left(self.times, instant, head, tail)

    def reaching(self, total: int, head: int, tail: int) -> int:
        """Give the first entry whose sum reaches `total`."""
        return bisect_left(self.sums, total, head, tail)

    def append(self, tail: int, time: int, total: int) -> None:
        """Put an entry at `tail`, in place of whatever a dropped state had put there.

        `times` is cut last and grows first, so that its length tells of an append or a cut that was interrupted.
        """
        times, sums = self
        if len(times) > tail:
            del sums[tail:], times[tail:]
        times.append(time)
        sums.append(total)

    def costs(self, span: range, head: int, base: int) -> Iterator[tuple[int, int]]:
        """Tell the entries within a span, in its order, and the cost of each."""
        for i in span:
            yield i, self.sums[i] - (self.sums[i - 1] if i > head else base)

    def change(self, changes: Changes, head: int, tail: int, base: int) -> tuple[Any, int, int, int]:
        """Give the log with the costs of some entries changed, and those that cost nothing any more gone."""
        total = sum(difference for _, difference, _ in changes)
        gone = sum(not cost for _, _, cost in changes)
        if total < 0 and [i for i, _, _ in changes] == list(range(head, head + len(changes))):
            return self, head + gone, tail, base - total  # from the front, nothing needs to be copied
        times, sums, shift, last = array("q"), array("q"), 0, head
        for i, difference, cost in sorted(changes):
            times += self.times[last : i + (cost > 0)]
            sums += array("q", [before + shift for before in self.sums[last:i]])
            shift += difference
            if cost:
                sums.append(self.sums[i] + shift)
            last = i + 1
        times += self.times[last:tail]
        sums += array("q", [before + shift for before in self.sums[last:tail]])
        return Entries(times, sums), 0, tail - head - gone, base

    def trim(self, head: int, tail: int, base: int) -> tuple[Any, int, int, int]:
        """Give the log without the entries that left."""
        sums = array("q", [total - base for total in self.sums[head:tail]])
        return Entries(self.times[head:tail], sums), 0, tail - head, 0


def charge_log(state: State | None, limit: Limit, cost: int, now: int) -> State | None:
    """Count every admitted call until exactly one period later."""
    entries, head, tail, base, now = _log(state, limit, now)
    total = entries.sums[tail - 1] if tail > head else base
    if cost > limit.quota - (total - base):
        return None
    entries.append(tail, now, total + cost)
    return _logged(limit, entries, head, tail + 1, base)


def view_log(state: State | None, limit: Limit, cost: int, now: int) -> View:
    """Explain the log."""
    entries, head, tail, base, _ = _log(state, limit, now)
    total = entries.sums[tail - 1] if tail > head else base
    left = limit.quota - (total - base)
    retry = 0
    if cost > limit.quota:
        retry = NEVER
    elif cost > max(0, left):
        retry = entries.times[entries.reaching(total + cost - limit.quota, head, tail)] + limit.length - now
    return max(0, left), retry, entries.times[tail - 1] + limit.length - now if tail > head else 0


def _log(state: State | None, limit: Limit, now: int) -> tuple[Any, int, int, int, int]:
    state = current(state, limit, now)
    if state is None:
        return Entries(array("q"), array("q")), 0, 0, 0, now
    _, entries, head, tail, base = state
    times = entries.times
    now = max(now, times[tail - 1])
    if times[head] <= now - limit.length:
        head, base = entries.until(now - limit.length, head, tail)
    return entries, head, tail, base, now


def _logged(limit: Limit, entries: Any, head: int, tail: int, base: int) -> State | None:  # noqa: ANN401 - any log
    """Build a state, with the entries that left dropped once they are the larger part."""
    if head == tail:
        return None
    if head > 16 and head * 2 > tail:  # noqa: PLR2004 - small logs are not worth copying
        entries, head, tail, base = entries.trim(head, tail, base)
    return (limit, entries, head, tail, base)


def adjust_log(state: State | None, limit: Limit, delta: int, now: int, at: int | None) -> State | None:
    """Correct the entry made at `at`, while it is in the log; by default give back the latest entries first."""
    entries, head, tail, base, now = _log(state, limit, now)
    first, last = head, tail
    if at is not None:
        first, last = tail, tail
        if at > now - limit.length:
            # Made while the clock had stepped back, it stands under the last instant seen before: the next one.
            first = entries.since(at, head, tail)
            last = entries.until(entries.times[first], first, tail)[0] if first < tail else tail
    return _correct(limit, entries, head, tail, base, delta, range(last - 1, first - 1, -1))


def adjust_slots(state: State | None, limit: Limit, delta: int, now: int, at: int | None) -> State | None:
    """Release the slots taken at `at`; by default those whose lease ends first, so that what is left lasts longest."""
    if at is not None:
        return adjust_log(state, limit, delta, now, at)
    entries, head, tail, base, now = _log(state, limit, now)
    return _correct(limit, entries, head, tail, base, delta, range(head, tail))


def _correct(
    limit: Limit,
    entries: Any,  # noqa: ANN401 - any log
    head: int,
    tail: int,
    base: int,
    delta: int,
    order: range,
) -> State | None:
    """Change the costs of entries, in the order given, by `delta` in all; an entry that costs nothing goes."""
    if head == tail:
        return None
    used = entries.sums[tail - 1] - base
    changes: Changes = []
    for i, cost in entries.costs(order, head, base):
        change = min(max(delta, -cost), MAX - used)
        changes.append((i, change, cost + change))
        used += change
        delta -= change
        if not delta:
            break
    return _logged(limit, *entries.change(changes, head, tail, base))


def expires_log(state: State) -> int:
    """Tell when the last entry leaves."""
    return int(state[1].times[state[3] - 1] + state[0].length)


# ---- all of them -----------------------------------------------------------------------------------------------------


def current(state: State | None, limit: Limit, now: int) -> State | None:
    """Forget a state that had ended under the limit it was written for, before that limit was changed."""
    if state is None or state[0] is limit or limit.rules.expires(state) > now:
        return state
    return None


def unmarked(state: State) -> State:
    """Leave a state as it is: its algorithm needs no mark."""
    return state


class Algorithm(NamedTuple):
    """The transitions of one algorithm; `mark` is called on the state of a charge that may be corrected later."""

    charge: Callable[[State | None, Limit, int, int], State | None]
    view: Callable[[State | None, Limit, int, int], View]
    adjust: Callable[[State | None, Limit, int, int, int | None], State | None]
    expires: Callable[[State], int]
    mark: Callable[[State], State] = unmarked


ALGORITHMS: Final = {
    "token_bucket": Algorithm(charge_bucket, view_bucket, adjust_bucket, expires_bucket, mark_bucket),
    "fixed_window": Algorithm(charge_fixed, view_fixed, adjust_fixed, expires_fixed),
    "calendar_window": Algorithm(charge_calendar, view_calendar, adjust_calendar, expires_calendar),
    "sliding_window": Algorithm(charge_sliding, view_sliding, adjust_sliding, expires_sliding),
    "sliding_log": Algorithm(charge_log, view_log, adjust_log, expires_log),
    "concurrency": Algorithm(charge_log, view_log, adjust_slots, expires_log),
}
