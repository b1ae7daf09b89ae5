"""sliding_window: (limit, current, previous, start).

Windows start at multiples of the period. The previous one is weighted by the share of it that a rolling window still
covers, in ticks: count * ticks <= MAX_INTEGER, because Limit chooses the tick for the quota and `adjust` clamps counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.core._bounds import MAX_INTEGER, ceil_div
from tidegate.core._state import NEVER, State, View, current

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core._limit import Limit


def charge_sliding(state: State | None, limit: Limit, cost: int, now: int) -> State | None:
    """Count in two windows; the previous one is weighted by the share of it within one period."""
    count, previous, start = _sliding(state, limit, now)
    left = max(0, limit.quota - count) - _weigh(limit, previous, start + limit.length - now)
    return (limit, count + cost, previous, start) if cost <= left else None


def view_sliding(state: State | None, limit: Limit, cost: int, now: int) -> View:
    """Compute the view of the two windows."""
    count, previous, start, length = _rolled(state, limit, now)
    if length != limit.length:
        return _view_resized(limit, cost, count, previous, start + length - now, length)
    quota, ticks = limit.quota, length // limit.tick
    ahead = start + length - now
    left = quota - count - min(_weigh(limit, previous, ahead), MAX_INTEGER - count)
    retry = 0
    if cost > quota:
        retry = NEVER
    elif cost > max(0, left):
        if cost <= quota - count:  # once the weight of the previous window is lower
            retry = ahead - (quota - count - cost) * ticks // previous * limit.tick
        else:  # only once this window is the previous one, with a lower weight
            retry = ahead + length - (quota - cost) * ticks // count * limit.tick
    return View((left, retry, _reset(count, previous, ahead, length)))


def _view_resized(limit: Limit, cost: int, count: int, previous: int, ahead: int, length: int) -> View:
    """Compute the view of windows of another length: until a call is charged, they count in full."""
    left = limit.quota - count - previous
    retry = 0
    if cost > limit.quota:
        retry = NEVER
    elif cost > max(0, left):
        retry = ahead if cost <= limit.quota - count else ahead + length
    return View((left, retry, _reset(count, previous, ahead, length)))


def _reset(count: int, previous: int, ahead: int, length: int) -> int:
    """Return when neither window counts any longer."""
    return ahead + length if count else ahead if previous else 0


def _weigh(limit: Limit, previous: int, ahead: int) -> int:
    """Return the weight of the previous window: its count times its share within one period, rounded up."""
    if not previous:
        return 0
    ticks = limit.length // limit.tick
    return ceil_div(previous * min(ticks, ceil_div(ahead, limit.tick)), ticks)


def _sliding(state: State | None, limit: Limit, now: int) -> tuple[int, int, int]:
    """Return the counts of the windows around now; windows of another length count as used now."""
    count, previous, start, length = _rolled(state, limit, now)
    if length == limit.length:
        return count, previous, start
    now = max(now, start)
    return count + previous, 0, now - now % limit.length


def _rolled(state: State | None, limit: Limit, now: int) -> tuple[int, int, int, int]:
    """Return the counts of the windows around now, their start and their length."""
    if state is not None and state[0] is limit and now - state[3] < limit.length:  # the common state
        return state[1], state[2], state[3], limit.length
    state = current(state, limit, now)
    if state is None:
        return 0, 0, now - now % limit.length, limit.length
    owner, count, previous, start = state
    length = owner.length
    ended = (max(now, start) - start) // length
    if ended:
        count, previous, start = 0, count if ended == 1 else 0, start + ended * length
    if owner is not limit:
        most = heaviest(limit)
        count, previous = min(most, count), min(most, previous)
        if length != limit.length:
            previous = min(previous, most - count)
    return count, previous, start, length


def adjust_sliding(state: State | None, limit: Limit, delta: int, now: int, at: int | None) -> State | None:
    """Correct the count of the window that was charged, while it still counts."""
    count, previous, start = _sliding(state, limit, now)
    most = heaviest(limit)
    if at is None or start <= at < start + limit.length:
        count = max(0, count + min(delta, most - count))
    elif start - limit.length <= at < start:
        previous = max(0, previous + min(delta, most - previous))
    else:
        return state
    return (limit, count, previous, start) if count or previous else None


def heaviest(limit: Limit) -> int:
    """Return the largest count whose weight stays within MAX_INTEGER; never less than the quota."""
    return MAX_INTEGER // (limit.length // limit.tick)


def expires_sliding(state: State) -> int:
    """Return when neither window counts any longer."""
    return int(state[3] + state[0].length * (2 if state[1] else 1))


def dump_sliding(state: State) -> list[int]:
    """Return both counts, the start, and the length of the windows."""
    return [*state[1:], state[0].length]


def load_sliding(limit: Limit, numbers: Sequence[int]) -> State:
    """Restore both windows."""
    return (limit, *numbers[:3])
