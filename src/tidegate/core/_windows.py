"""fixed_window and calendar_window: (limit, used, start).

The end of a window is exclusive. A limit whose period, time zone or reset was changed has other windows, and no change
refills anything: usage counts until its window ends, and usage that still counts when the changed limit is charged also
counts until the current window of that limit ends. So a state may carry older windows (see CarriedWindows), and they
still count if the change is undone.

`used` is all usage that counted when the state was written, in any window. No sum exceeds MAX_INTEGER: a charge adds at
most what the quota leaves free; a correction adds at most what is missing to MAX_INTEGER.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core._bounds import MAX_INTEGER
from tidegate.core._state import NEVER, State, View, current

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tidegate.core._limit import Limit

Window = tuple[int, int, int]  # used, start, end
Windows = tuple[Window, ...]

MAX_OLDER_WINDOWS: Final = 4  # older windows in a state; beyond that, the first two are merged


def charge_fixed(state: State | None, limit: Limit, cost: int, now: int) -> State | None:
    """Count in a window that opens at the first admitted call and lasts one period."""
    if state is not None and state[0] is limit:  # the common state, without further calls
        _, used, start = state
        if now - start >= limit.length:
            used, start = 0, now
        return (limit, used + cost, start) if cost <= limit.quota - used else None
    state = current(state, limit, now)
    start, end = _fixed(state, limit, now)
    return _charge_window(state, limit, cost, now, start, end)


def view_fixed(state: State | None, limit: Limit, cost: int, now: int) -> View:
    """Compute the view of the open window."""
    if state is not None and state[0] is limit:  # the common state
        _, used, start = state
        return _view_common(limit, cost, used, start + limit.length - now)
    state = current(state, limit, now)
    start, end = _fixed(state, limit, now)
    return _view_window(state, limit, cost, now, start, end)


def _fixed(state: State | None, limit: Limit, now: int) -> tuple[int, int]:
    """Return the window around now: the open one with the length of this limit, or one that opens now."""
    now = _seen(state, now)
    start = state[2] if state is not None and now - state[2] < limit.length else now
    return start, start + limit.length


def adjust_fixed(state: State | None, limit: Limit, delta: int, now: int, at: int | None) -> State | None:
    """Correct the count of the open window that was charged."""
    state = current(state, limit, now)
    start, end = _fixed(state, limit, now)
    return _adjust_window(state, limit, delta, now, at, start, end)


def expires_fixed(state: State) -> int:
    """Return when the window and all windows it carries have ended."""
    owner, _, start = state
    return _last_end(owner) if isinstance(owner, CarriedWindows) else int(start + owner.length)


def charge_calendar(state: State | None, limit: Limit, cost: int, now: int) -> State | None:
    """Count in the calendar window around now."""
    if state is not None and state[0] is limit:  # the common state, without further calls
        _, used, since = state
        start = limit.calendar.window(max(now, since))[0]
        if start != since:
            used = 0
        return (limit, used + cost, start) if cost <= limit.quota - used else None
    state = current(state, limit, now)
    start, end = _calendar(state, limit, now)
    return _charge_window(state, limit, cost, now, start, end)


def view_calendar(state: State | None, limit: Limit, cost: int, now: int) -> View:
    """Compute the view of the calendar window around now."""
    if state is not None and state[0] is limit:  # the common state
        _, used, since = state
        start, end = limit.calendar.window(max(now, since))
        return _view_common(limit, cost, used, end - now if start == since else 0)
    state = current(state, limit, now)
    start, end = _calendar(state, limit, now)
    return _view_window(state, limit, cost, now, start, end)


def _calendar(state: State | None, limit: Limit, now: int) -> tuple[int, int]:
    """Return the calendar window around now."""
    return limit.calendar.window(_seen(state, now))  # type: ignore[union-attr]  # Limit gives every calendar_window one


def adjust_calendar(state: State | None, limit: Limit, delta: int, now: int, at: int | None) -> State | None:
    """Correct the count of the calendar window that was charged, while it is open."""
    state = current(state, limit, now)
    start, end = _calendar(state, limit, now)
    return _adjust_window(state, limit, delta, now, at, start, end)


def expires_calendar(state: State) -> int:
    """Return when the calendar window and all windows it carries have ended."""
    owner, _, start = state
    return _last_end(owner) if isinstance(owner, CarriedWindows) else int(owner.calendar.window(start)[1])


class CarriedWindows(NamedTuple):
    """Replaces the limit in the state of a window that carries older ones, or that an earlier limit opened.

    `end` is the end of the window itself, `last` the instant of the latest charge. `older` are windows of earlier
    limits that end later. `ended` is the usage before its start, in windows that have ended: it counts again for a
    limit whose window includes them.
    """

    limit: Limit
    end: int
    last: int
    ended: int
    older: Windows


def _seen(state: State | None, now: int) -> int:
    """Raise now to the latest instant in a state."""
    if state is None:
        return now
    owner, _, start = state
    return max(now, owner.last if isinstance(owner, CarriedWindows) else start)


def _last_end(owner: CarriedWindows) -> int:
    return max([owner.end, *(end for _, _, end in owner.older)])


def _windows(state: State | None) -> Windows:
    """Return the windows of a state, its own one last."""
    if state is None:
        return ()
    owner, used, start = state
    if isinstance(owner, CarriedWindows):
        return *owner.older, (used - _sum(owner.older), start, owner.end)
    return ((used, start, owner.rules.expires(state)),)


def _sum(windows: Iterable[Window]) -> int:
    return sum([used for used, _, _ in windows])


def _counted(state: State, limit: Limit, now: int, start: int, end: int) -> tuple[list[Window], int]:
    """Return what counts in the window [start, end) of the limit, with its ends, and the usage of ended windows.

    Ended windows still count in a window that overlaps them, until the state expires. A fixed window has no alignment:
    an open one keeps its start, and is assumed to start earlier if it becomes longer.
    """
    windows, now, expires = _windows(state), _seen(state, now), limit.rules.expires(state)
    owner, _, since = state
    last, ended = (owner.last, owner.ended) if isinstance(owner, CarriedWindows) else (since, 0)
    overlaps, back = start <= last, start < since
    if limit.calendar is None:
        overlaps = start == since
        back = overlaps and limit.length > windows[-1][2] - since
    again = min(end, expires) if overlaps else 0
    counted = [(used, opened, max(until, again)) for used, opened, until in windows if until > now or overlaps]
    used = _sum(counted)
    ended += min(_sum(windows) - used, MAX_INTEGER - ended)
    if back:
        counted.append((min(ended, MAX_INTEGER - used), since, again))
        ended = 0
    return counted, ended


def _charge_window(state: State | None, limit: Limit, cost: int, now: int, start: int, end: int) -> State | None:
    """Take permits from the window [start, end) if they are available."""
    if state is None:
        return (limit, cost, start) if cost <= limit.quota else None
    counted, _ = _counted(state, limit, now, start, end)
    return _taken(state, limit, cost, now, start, end) if cost <= limit.quota - _sum(counted) else None


def _taken(state: State | None, limit: Limit, cost: int, now: int, start: int, end: int) -> State:
    """Take permits even if not available; usage that would end before the window [start, end) now counts in it."""
    if state is None or limit.rules.expires(state) <= now:
        return limit, cost, start
    counted, ended = _counted(state, limit, now, start, end)
    used, older = _sum(counted), tuple(window for window in counted if window[2] > end and window[0])
    if len(older) > MAX_OLDER_WINDOWS:
        (one, first, ends), (other, second, until), *rest = older
        older = ((one + other, min(first, second), max(ends, until)), *rest)
    owner = CarriedWindows(limit, end, max(start, _seen(state, now)), ended, older) if older or ended else limit
    return owner, used + min(cost, MAX_INTEGER - used), start


def _view_common(limit: Limit, cost: int, used: int, ahead: int) -> View:
    """Compute the view of a window that carries no other; it ends in `ahead` microseconds, or has ended."""
    if ahead <= 0:
        used = ahead = 0
    left = limit.quota - used
    if cost <= left or not cost:
        return View((left, 0, ahead))
    return View((left, ahead if cost <= limit.quota else NEVER, ahead))


def _view_window(state: State | None, limit: Limit, cost: int, now: int, start: int, end: int) -> View:
    """Compute the view of the window [start, end)."""
    if state is None:
        return _view_common(limit, cost, 0, 0)
    counted = sorted(_counted(state, limit, now, start, end)[0], key=lambda window: window[2])
    left = free = limit.quota - _sum(counted)
    retry = 0
    if cost > limit.quota:
        retry = NEVER
    elif cost > max(0, left):
        for used, _, until in counted:
            free += used
            retry = until - now
            if cost <= free:
                break
    return View((left, retry, counted[-1][2] - now if counted else 0))


def _adjust_window(
    state: State | None, limit: Limit, delta: int, now: int, at: int | None, start: int, end: int
) -> State | None:
    """Correct the usage of the windows that contain the instant `at`, the latest first; by default of all windows.

    The windows are kept, whichever limit opened them. A positive delta without an instant, or with an instant in the
    current window if that has no usage yet, is charged to the current window.
    """
    windows, now = list(_windows(state)), _seen(state, now)
    held = [
        place for place, (_, since, until) in enumerate(windows) if until > now and (at is None or since <= at < until)
    ]
    if delta > 0 and (at is None or (not held and start <= at <= now)):
        return _taken(state, limit, delta, now, start, end)
    if state is None or not held:
        return state
    total = _sum(windows)
    for place in reversed(held):
        used, since, until = windows[place]
        change = min(max(delta, -used), MAX_INTEGER - total)
        windows[place] = (used + change, since, until)
        delta -= change
        if delta >= 0:  # done, or the bound is reached
            break
    *older, (used, since, until) = windows
    kept = tuple(window for window in older if window[0])
    if not used and not kept:
        return None
    owner = state[0]
    last, ended = (owner.last, owner.ended) if isinstance(owner, CarriedWindows) else (now, 0)
    own = not kept and not ended and (since, until) == (start, end)
    return limit if own else CarriedWindows(limit, until, last, ended, kept), used + _sum(kept), since


def dump_window(state: State) -> list[int]:
    """Return the usage and the start, and what the window carries."""
    owner, used, start = state
    if isinstance(owner, CarriedWindows):
        numbers = (number for window in owner.older for number in window)
        return [used, start, owner.end, owner.last, owner.ended, *numbers]
    return [used, start]


def load_window(limit: Limit, numbers: Sequence[int]) -> State:
    """Restore a window, with those that it carries."""
    used, start, *carried = numbers
    if not carried:
        return (limit, used, start)
    end, last, ended, *older = carried
    windows = tuple(zip(older[::3], older[1::3], older[2::3], strict=True))
    return (CarriedWindows(limit, end, last, ended, windows), used, start)
