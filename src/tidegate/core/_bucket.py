"""token_bucket: (limit, level, at, marks).

The level counts 1/scale permits, so that each microsecond adds exactly `rate`. Products stay within MAX_INTEGER: a
level lies between floor and capacity, which differ by at most MAX_INTEGER; cost * scale is computed only for costs
within the burst, and elapsed * rate only if it is at most the missing amount, or for at most `max_elapsed`
microseconds: so long that capacity + max_elapsed * rate is at most MAX_INTEGER.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

from tidegate.core._bounds import MAX_INTEGER, ceil_div
from tidegate.core._state import NEVER, State, View

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core._limit import Limit

Marks = tuple[tuple[int, int], ...]

MAX_MARKS: Final = 4  # the high-water marks that a bucket with open reservations keeps


def charge_bucket(state: State | None, limit: Limit, cost: int, now: int) -> State | None:
    """Take permits from a bucket that refills continuously."""
    if cost > limit.burst:
        return None
    if state is not None and state[0] is limit:  # what refill does, for the common state
        _, level, at, marks = state
        if now > at:
            if now - at > limit.max_elapsed:
                level = topped_up(level, limit, now - at)
            else:
                level += (now - at) * limit.rate
                if level > limit.capacity:  # noqa: PLR1730 - min() would cost a fifth of the charge
                    level = limit.capacity
            at = now
        if marks:
            marks = raise_marks(marks, level, limit)
    else:
        level, at, marks = refill(state, limit, now)
    level -= cost * limit.scale
    return (limit, level, at, marks) if level >= 0 else None


def view_bucket(state: State | None, limit: Limit, cost: int, now: int) -> View:
    """Compute the view of a bucket; a cost of 0 is never denied, not even by a bucket in debt."""
    if state is not None and state[0] is limit:  # what refill does, for the common state
        _, level, seen, _ = state
        if now > seen:
            if now - seen > (limit.capacity - level) // limit.rate:
                level = limit.capacity
            else:
                level += (now - seen) * limit.rate
            seen = now
    else:
        level, seen, _ = refill(state, limit, now)
        if state is not None and state[0] != limit and expires_bucket(state) > now:
            return _view_changed(state, limit, cost, now, level)
    retry = 0
    if cost:
        if cost > limit.burst:
            retry = NEVER
        elif (after := level - cost * limit.scale) < 0:
            retry = seen - now - after // limit.rate  # ceil_div, inlined, also below
    if level == limit.capacity:
        return View((limit.burst, retry, 0))
    return View((level // limit.scale, retry, seen - now - (level - limit.capacity) // limit.rate))


def remaining_bucket(state: State | None, limit: Limit, now: int) -> int:
    """Return the remaining permits as in `view_bucket`, at half of its cost."""
    if state is None or state[0] is not limit:
        return view_bucket(state, limit, 0, now).remaining
    _, level, seen, _ = state
    if now > seen:
        if now - seen > (limit.capacity - level) // limit.rate:
            return int(limit.burst)
        level += (now - seen) * limit.rate
    return int(level // limit.scale)


def retry_bucket(state: State | None, limit: Limit, cost: int, now: int) -> int:
    """Return how long to wait as in `view_bucket`, at half of its cost."""
    if state is None or state[0] is not limit or cost > limit.burst:
        return view_bucket(state, limit, cost, now).retry
    _, level, seen, _ = state
    if now > seen:
        if now - seen > (limit.capacity - level) // limit.rate:
            return 0
        level += (now - seen) * limit.rate
        seen = now
    level -= cost * limit.scale
    return seen - now - level // limit.rate if level < 0 and cost else 0


def _view_changed(state: State, limit: Limit, cost: int, now: int, level: int) -> View:
    """Compute the view of a bucket that an earlier limit wrote: until it is charged, the slower rate counts."""
    (owner, was, at, _), ends = state, expires_bucket(state)
    retry = 0
    if cost > limit.burst:
        retry = NEVER
    elif cost and cost * limit.scale > level:
        filled = at + ceil_div(cost * limit.scale - rescale(was, owner, limit), limit.rate)
        before = at + ceil_div(cost * owner.scale - was, owner.rate) if cost <= owner.burst else ends
        retry = min(max(filled, before), ends) - now
    return View((level // limit.scale, retry, ends - now))


def refill(state: State | None, limit: Limit, now: int) -> tuple[int, int, Marks]:
    """Refill a bucket up to now; return its level, the instant and its marks."""
    if state is None:
        return limit.capacity, now, ()
    owner, level, at, marks = state
    passed = max(0, now - at)
    if owner is limit or owner == limit:
        level = topped_up(level, limit, passed)
        return level, at + passed, raise_marks(marks, level, limit)
    if expires_bucket(state) <= now:
        return limit.capacity, now, ()
    # It is unknown when the limit changed, so the time since the last charge counts at the slower of the two rates.
    before, after = topped_up(level, owner, passed), topped_up(rescale(level, owner, limit), limit, passed)
    return min(rescale(before, owner, limit), after), at + passed, ()


def topped_up(level: int, limit: Limit, passed: int) -> int:
    """Return the level after refilling for some time."""
    if passed > (limit.capacity - level) // limit.rate:
        return limit.capacity
    return level + passed * limit.rate


def rescale(level: int, old: Limit, new: Limit) -> int:
    """Convert a level to a changed limit; fractions of a permit are dropped if they would overflow."""
    permits, part = divmod(level, old.scale)
    if new.scale > MAX_INTEGER // old.scale:
        part = 0
    if permits >= new.burst:
        return new.capacity
    if permits <= new.floor // new.scale:
        return new.floor
    return permits * new.scale + part * new.scale // old.scale


def adjust_bucket(state: State | None, limit: Limit, delta: int, now: int, at: int | None) -> State | None:
    """Refund permits to a bucket, or charge more.

    Permits that were charged earlier may have been refilled since. Had they never been taken, the bucket would have
    been full sooner and the refill would have been lost. So at most the free space at the highest level since then is
    refunded.
    """
    level, now, marks = refill(state, limit, now)
    if delta >= 0:
        taken = level - limit.floor if delta > (level - limit.floor) // limit.scale else delta * limit.scale
        level -= taken
        if at is not None:
            marks = tuple([(t, top - taken if t >= at else top) for t, top in marks])
    else:
        peak = level
        if at is not None:
            earlier = reversed(marks) if at <= now else ()
            peak = next((top for since, top in earlier if since <= at), limit.capacity)
        free = limit.capacity - peak
        credit = free if -delta > free // limit.scale else -delta * limit.scale
        if not credit:
            return state
        if at is not None:
            marks = tuple([(t, max(top, peak + credit) if t <= at else top + credit) for t, top in marks])
        level += credit
    return (limit, level, now, marks) if level < limit.capacity else None


def mark_bucket(state: State) -> State:
    """Mark a charge that may be refunded in part: from here on, the state keeps the highest level since.

    A mark is (since, level): the highest level of the bucket since that instant. Earlier marks are higher.
    """
    limit, level, at, marks = state
    while marks and marks[-1][0] >= at:
        marks = marks[:-1]
    marks = (*marks, (at, level))
    if len(marks) > MAX_MARKS:  # merge the two closest marks into the higher one: a refund may be smaller, never larger
        gaps = [before[1] - after[1] for before, after in pairwise(marks)]
        least = gaps.index(min(gaps)) + 1
        marks = marks[:least] + marks[least + 1 :]
    return limit, level, at, marks


def expires_bucket(state: State) -> int:
    """Return when the bucket is full again."""
    limit, level, at, _ = state
    return int(at + ceil_div(limit.capacity - level, limit.rate))


def raise_marks(marks: Marks, level: int, limit: Limit) -> Marks:
    """Raise the marks below a level: they become one, since the earliest of them; a full bucket has none."""
    if level >= limit.capacity:
        return ()
    if not marks or marks[-1][1] >= level:
        return marks
    kept = next(i for i, (_, top) in enumerate(marks) if top < level)
    return (*marks[:kept], (marks[kept][0], level))


def dump_bucket(state: State) -> list[int]:
    """Return the level, its instant, the scale, and the marks."""
    limit, level, at, marks = state
    return [level, at, limit.scale, *(number for mark in marks for number in mark)]


def load_bucket(limit: Limit, numbers: Sequence[int]) -> State:
    """Restore a bucket, with its marks."""
    level, at, _, *marks = numbers
    return (limit, level, at, tuple(zip(marks[::2], marks[1::2], strict=True)))
