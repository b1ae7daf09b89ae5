"""token_bucket: (limit, level, at).

The level counts 1/scale permits, so that each microsecond adds exactly `rate`. Products stay within MAX_INTEGER: a
level lies between floor and capacity, which differ by at most MAX_INTEGER; cost * scale is computed only for costs
within the burst, and elapsed * rate only if it is at most the missing amount, or for at most `max_elapsed`
microseconds: so long that capacity + max_elapsed * rate is at most MAX_INTEGER.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core.bounds import MAX_INTEGER, ceil_div
from tidegate.core.state import NEVER, State, View

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core.limit import Limit

Peaks = tuple[tuple[int, int], ...]

MAX_PEAKS: Final = 16  # high-water marks that a bucket with open reservations keeps


def charge_bucket(state: State | None, limit: Limit, cost: int, now: int) -> State | None:
    """Take permits from a bucket that refills continuously."""
    if cost > limit.burst:
        return None
    if state is not None and state[0] is limit:  # what refill does, for the common state
        _, level, at = state
        if now > at:
            if now - at > limit.max_elapsed:
                level = topped_up(level, limit, now - at)
            else:
                level += (now - at) * limit.rate
                if level > limit.capacity:  # noqa: PLR1730 - min() would cost a fifth of the charge
                    level = limit.capacity
            at = now
        level -= cost * limit.scale
        return (limit, level, at) if level >= 0 else None
    owner, level, at = (limit, limit.capacity, now) if state is None else refill(state, limit, now)
    level -= cost * limit.scale
    return (owner, level, at) if level >= 0 else None


def view_bucket(state: State | None, limit: Limit, cost: int, now: int) -> View:
    """Compute the view of a bucket; a cost of 0 is never denied, not even by a bucket in debt."""
    if state is None:
        level, seen = limit.capacity, now
    elif state[0] is limit:  # what refill does, for the common state
        _, level, seen = state
        if now > seen:
            if now - seen > (limit.capacity - level) // limit.rate:
                level = limit.capacity
            else:
                level += (now - seen) * limit.rate
            seen = now
    else:
        _, level, seen = refill(state, limit, now)
        if _owner(state) != limit and expires_bucket(state) > now:
            return _view_changed(state, limit, cost, now, level)
    retry = 0
    if cost:
        if cost > limit.burst:
            retry = NEVER
        elif (after := level - cost * limit.scale) < 0:
            retry = seen - now - after // limit.rate  # ceil_div, inlined, also below
    if level == limit.capacity:
        return limit.burst, retry, 0
    return level // limit.scale if level > 0 else 0, retry, seen - now - (level - limit.capacity) // limit.rate


def remaining_bucket(state: State | None, limit: Limit, now: int) -> int:
    """Return the remaining permits as in `view_bucket`, at half of its cost."""
    if state is None or state[0] is not limit:
        return view_bucket(state, limit, 0, now)[0]
    _, level, seen = state
    if now > seen:
        if now - seen > (limit.capacity - level) // limit.rate:
            return limit.burst  # type: ignore[no-any-return]  # mypy has lost the type of a limit that a state holds
        level += (now - seen) * limit.rate
    return level // limit.scale if level > 0 else 0


def retry_bucket(state: State | None, limit: Limit, cost: int, now: int) -> int:
    """Return how long to wait as in `view_bucket`, at half of its cost."""
    if state is None or state[0] is not limit or cost > limit.burst:
        return view_bucket(state, limit, cost, now)[1]
    _, level, seen = state
    if now > seen:
        if now - seen > (limit.capacity - level) // limit.rate:
            return 0
        level += (now - seen) * limit.rate
        seen = now
    level -= cost * limit.scale
    return seen - now - level // limit.rate if level < 0 and cost else 0


def used_bucket(state: State | None, limit: Limit, now: int) -> int:
    """Return the permits that are missing from a full bucket, with its debt; a part of a permit counts as one."""
    level = limit.capacity if state is None else refill(state, limit, now)[1]
    return limit.burst - level // limit.scale


def _view_changed(state: State, limit: Limit, cost: int, now: int, level: int) -> View:
    """Compute the view of a bucket that an earlier limit wrote: until it is charged, the slower rate counts."""
    owner, (_, was, at), ends = _owner(state), state, expires_bucket(state)
    retry = 0
    if cost > limit.burst:
        retry = NEVER
    elif cost and cost * limit.scale > level:
        filled = at + ceil_div(cost * limit.scale - rescale(was, owner, limit), limit.rate)
        before = at + ceil_div(cost * owner.scale - was, owner.rate) if cost <= owner.burst else ends
        retry = min(max(filled, before), ends) - now
    return max(0, level // limit.scale), retry, ends - now


def refill(state: State, limit: Limit, now: int) -> tuple[Limit | MarkedLimit, int, int]:
    """Refill a bucket up to now; return its owner (with its marks), its level and the instant."""
    owner, level, at = state
    peaks: Peaks = ()
    if isinstance(owner, MarkedLimit):
        owner, peaks = owner
    passed = max(0, now - at)
    if owner is limit or owner == limit:
        level = topped_up(level, limit, passed)
        return marked(limit, raise_peaks(peaks, level, limit)), level, at + passed
    if expires_bucket(state) <= now:
        return limit, limit.capacity, now
    # It is unknown when the limit changed, so the time since the last charge counts at the slower of the two rates.
    before, after = topped_up(level, owner, passed), topped_up(rescale(level, owner, limit), limit, passed)
    return limit, min(rescale(before, owner, limit), after), at + passed


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
    owner, level, now = (limit, limit.capacity, now) if state is None else refill(state, limit, now)
    peaks = owner.peaks if isinstance(owner, MarkedLimit) else ()
    if delta >= 0:
        taken = level - limit.floor if delta > (level - limit.floor) // limit.scale else delta * limit.scale
        level -= taken
        if at is not None:
            peaks = tuple((t, top - taken if t >= at else top) for t, top in peaks)
    else:
        peak = level
        if at is not None:
            marks = reversed(peaks) if at <= now else ()
            peak = next((top for since, top in marks if since <= at), limit.capacity)
        free = limit.capacity - peak
        credit = free if -delta > free // limit.scale else -delta * limit.scale
        if not credit:
            return state
        if at is not None:
            peaks = tuple((t, max(top, peak + credit) if t <= at else top + credit) for t, top in peaks)
        level += credit
    return (marked(limit, peaks), level, now) if level < limit.capacity else None


def mark_bucket(state: State) -> State:
    """Mark a charge that may be refunded in part: from here on, the state keeps the highest level since."""
    owner, level, at = state
    limit, peaks = owner if isinstance(owner, MarkedLimit) else (owner, ())
    peaks = (*(peak for peak in peaks if peak[0] < at), (at, level))
    if len(peaks) > MAX_PEAKS:  # merge the two closest marks into the higher one: a refund may be smaller, never larger
        least = min(range(1, len(peaks)), key=lambda i: peaks[i - 1][1] - peaks[i][1])
        peaks = peaks[:least] + peaks[least + 1 :]
    return marked(limit, peaks), level, at


def expires_bucket(state: State) -> int:
    """Return when the bucket is full again."""
    limit, (_, level, at) = _owner(state), state
    return int(at + ceil_div(limit.capacity - level, limit.rate))


class MarkedLimit(NamedTuple):
    """Replaces the limit in the state of a bucket with open reservations.

    `peaks` holds (since, level): the highest level of the bucket since that instant. Earlier marks are higher.
    """

    limit: Limit
    peaks: Peaks


def _owner(state: State) -> Limit:
    """Return the limit that wrote the state of a bucket."""
    owner: Limit | MarkedLimit = state[0]
    return owner.limit if isinstance(owner, MarkedLimit) else owner


def marked(limit: Limit, peaks: Peaks) -> Limit | MarkedLimit:
    """Return the owner of a bucket: the limit, with its marks if there are any."""
    return MarkedLimit(limit, peaks) if peaks else limit


def raise_peaks(peaks: Peaks, level: int, limit: Limit) -> Peaks:
    """Raise the marks below a level: they become one, since the earliest of them; a full bucket has none."""
    if level >= limit.capacity:
        return ()
    if not peaks or peaks[-1][1] >= level:
        return peaks
    kept = next(i for i, (_, top) in enumerate(peaks) if top < level)
    return (*peaks[:kept], (peaks[kept][0], level))


def dump_bucket(state: State) -> list[int]:
    """Return the level, its instant, the scale, and the marks."""
    owner, level, at = state
    limit, peaks = owner if isinstance(owner, MarkedLimit) else (owner, ())
    return [level, at, limit.scale, *(number for peak in peaks for number in peak)]


def load_bucket(limit: Limit, numbers: Sequence[int]) -> State:
    """Restore a bucket, with its marks."""
    level, at, _, *peaks = numbers
    return (marked(limit, tuple(zip(peaks[::2], peaks[1::2], strict=True))), level, at)
