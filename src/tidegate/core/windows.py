"""fixed_window and calendar_window: (limit, used, start).

A window reaches from its start to its end, which belongs to the next. A limit whose period, time zone or reset was
changed has other windows, and no change gives anything back: what was used stays used until its window ends, and what
still counts when the changed limit is charged also counts until that limit's present window ends. So a state may carry
older windows (see Carried); a change back finds them again.

`used` is everything that counted when the state was written, in whichever window. No sum exceeds MAX: a charge adds
at most what the quota leaves free, a correction and what is counted again at most what is missing to MAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core.bounds import MAX
from tidegate.core.state import NEVER, State, View, current

if TYPE_CHECKING:
    from tidegate.core.limit import Limit

Window = tuple[int, int, int]  # used, start, end
Windows = tuple[Window, ...]

MAX_OLDER: Final = 4  # older windows that a state carries; beyond that, the first two become one


def charge_fixed(state: State | None, limit: Limit, cost: int, now: int) -> State | None:
    """Count in a window that opens at the first admitted call and lasts one period."""
    state = current(state, limit, now)
    start, end = _fixed(state, limit, now)
    return _charge_window(state, limit, cost, now, start, end)


def view_fixed(state: State | None, limit: Limit, cost: int, now: int) -> View:
    """Explain the open window."""
    state = current(state, limit, now)
    start, end = _fixed(state, limit, now)
    return _view_window(state, limit, cost, now, start, end)


def _fixed(state: State | None, limit: Limit, now: int) -> tuple[int, int]:
    """Give the window around now: the open one as long as this limit makes it, or one that opens now."""
    start = state[2] if state is not None and now - state[2] < limit.length else now
    return start, start + limit.length


def adjust_fixed(state: State | None, limit: Limit, delta: int, now: int, at: int | None) -> State | None:
    """Correct the count of the open window that was charged."""
    state = current(state, limit, now)
    start, end = _fixed(state, limit, now)
    return _adjust_window(state, limit, delta, now, at, start, end)


def expires_fixed(state: State) -> int:
    """Tell when the window ends, and all that it carries."""
    owner, _, start = state
    return _last_end(owner) if isinstance(owner, Carried) else int(start + owner.length)


def charge_calendar(state: State | None, limit: Limit, cost: int, now: int) -> State | None:
    """Count in the calendar window around now."""
    state = current(state, limit, now)
    start, end = _calendar(state, limit, now)
    return _charge_window(state, limit, cost, now, start, end)


def view_calendar(state: State | None, limit: Limit, cost: int, now: int) -> View:
    """Explain the calendar window around now."""
    state = current(state, limit, now)
    start, end = _calendar(state, limit, now)
    return _view_window(state, limit, cost, now, start, end)


def _calendar(state: State | None, limit: Limit, now: int) -> tuple[int, int]:
    """Give the calendar window around now."""
    if state is not None:
        now = max(now, state[2])
    return limit.calendar.window(now)  # type: ignore[union-attr]  # Limit gives every calendar_window one


def adjust_calendar(state: State | None, limit: Limit, delta: int, now: int, at: int | None) -> State | None:
    """Correct the count of the calendar window that was charged, while it is open."""
    state = current(state, limit, now)
    start, end = _calendar(state, limit, now)
    return _adjust_window(state, limit, delta, now, at, start, end)


def expires_calendar(state: State) -> int:
    """Tell when the calendar window ends, and all that it carries."""
    owner, _, start = state
    return _last_end(owner) if isinstance(owner, Carried) else int(owner.calendar.window(start)[1])


class Carried(NamedTuple):
    """Stands for the limit in the state of a window that carries older ones, or that an earlier limit opened.

    `end` is that of the window itself. `older` are windows of earlier limits, which end later than it. `ended` is what
    was used in windows that have ended since the first of `older` opened: it counts again for a limit whose windows
    reach back to them.
    """

    limit: Limit
    end: int
    ended: int
    older: Windows


def _last_end(owner: Carried) -> int:
    return max([owner.end, *(end for _, _, end in owner.older)])


def _windows(state: State | None) -> tuple[Windows, int]:
    """Give the windows of a state, its own one last, and what was used in ended ones."""
    if state is None:
        return (), 0
    owner, used, start = state
    if not isinstance(owner, Carried):
        return ((used, start, owner.rules.expires(state)),), 0
    return (*owner.older, (used - _sum(owner.older), start, owner.end)), owner.ended


def _sum(windows: Windows) -> int:
    return sum(used for used, _, _ in windows)


def _open(state: State | None, limit: Limit, now: int, start: int) -> tuple[Windows, int, int]:
    """Give the windows that are open, how much of what was used in ended ones counts again, and the rest of that.

    It counts again where the window of the limit, which begins at `start`, reaches back before that of the state. A
    fixed window has no place of its own in time, so an open one that becomes longer is taken to reach back.
    """
    windows, ended = _windows(state)
    if not windows:
        return (), 0, 0
    _, since, end = windows[-1]
    live = tuple(window for window in windows if window[2] > now)
    used = _sum(live)
    ended += min(_sum(windows) - used, MAX - ended)
    if start < since or (limit.calendar is None and start == since and limit.length > end - since):
        return live, min(ended, MAX - used), 0
    return live, 0, ended


def _charge_window(state: State | None, limit: Limit, cost: int, now: int, start: int, end: int) -> State | None:
    """Take permits from the window [start, end), if they are there."""
    if state is None or state[0] is limit:  # the usual state, of nothing but this limit
        used = state[1] if state is not None and state[2] == start else 0
        return (limit, used + cost, start) if cost <= limit.quota - used else None
    live, again, _ = _open(state, limit, now, start)
    return _taken(state, limit, cost, now, start, end) if cost <= limit.quota - (_sum(live) + again) else None


def _taken(state: State | None, limit: Limit, cost: int, now: int, start: int, end: int) -> State:
    """Take permits, whether or not they are there; what would end before the window [start, end) now counts in it."""
    live, again, ended = _open(state, limit, now, start)
    used = _sum(live) + again
    older = tuple(window for window in live if window[2] > end and window[0])
    if len(older) > MAX_OLDER:
        (one, first, ends), (other, second, until), *rest = older
        older = ((one + other, min(first, second), max(ends, until)), *rest)
    return (Carried(limit, end, ended, older) if older else limit, used + min(cost, MAX - used), start)


def _view_window(state: State | None, limit: Limit, cost: int, now: int, start: int, end: int) -> View:
    """Explain what is used of the window [start, end), and when that ends."""
    live, again, _ = _open(state, limit, now, start)
    parts = [(until, used) for used, _, until in live]
    reset = max([until - now for until, _ in parts], default=0)
    if again:
        parts.append((min(end, now + reset), again))
    left = free = limit.quota - sum(used for _, used in parts)
    retry = 0
    if cost > limit.quota:
        retry = NEVER
    elif cost > max(0, left):
        for until, used in sorted(parts):
            free += used
            retry = until - now
            if cost <= free:
                break
    return max(0, left), retry, reset


def _adjust_window(
    state: State | None, limit: Limit, delta: int, now: int, at: int | None, start: int, end: int
) -> State | None:
    """Correct what was used in the windows that hold the instant `at`, the latest first; by default in all of them.

    The windows stay as they are, whichever limit opened them. What is taken without an instant, or for one of the
    present window in which nothing is used yet, is used in the present window.
    """
    windows, ended = _windows(state)
    changed = list(windows)
    held = [
        place for place, (_, since, until) in enumerate(windows) if until > now and (at is None or since <= at < until)
    ]
    if delta > 0 and (at is None or (not held and start <= at <= now)):
        return _taken(state, limit, delta, now, start, end)
    if not held:
        return state
    total = _sum(windows)
    for place in reversed(held):
        used, since, until = changed[place]
        change = min(max(delta, -used), MAX - total)
        changed[place] = (used + change, since, until)
        delta -= change
        if delta >= 0:  # all of it, or more than can be counted
            break
    *older, (used, since, until) = changed
    kept = tuple(window for window in older if window[0])
    if not used and not kept:
        return None
    own = not kept and (since, until) == (start, end)
    return (limit if own else Carried(limit, until, ended, kept), used + _sum(kept), since)
