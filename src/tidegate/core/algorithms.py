"""The six algorithms, as pure functions of integers.

    charge(state, limit, cost, now)       -> the new state, or None if denied
    view(state, limit, cost, now)         -> (remaining, retry, reset)
    adjust(state, limit, delta, now, at)  -> the new state
    expires(state)                        -> the instant from which the state is equivalent to None

A **State** is a tuple that begins with the Limit that wrote it; None is the state of a new key. `charge` takes `cost`
permits (at least one) if they are available. `view` returns the `remaining` permits; `retry`, which is 0 if the cost
would be charged, else the microseconds until it would be (if nothing else happens), or NEVER; and `reset`, the
microseconds until all permits are available again. `adjust` corrects an earlier charge: it gives back (delta < 0) or
takes (delta > 0) permits, those charged at the instant `at`, or the latest ones if `at` is None.

Time never runs backwards for a key: every transition first raises `now` to the latest instant in its state. A state
that an earlier version of the limit wrote is read so that the change itself refills nothing: windows and logs keep
their usage, a bucket keeps its available permits, up to the new burst.

Each algorithm has its own module. The Lua and SQL ports have the same function names in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core.bucket import (
    MAX_PEAKS,
    MarkedLimit,
    adjust_bucket,
    charge_bucket,
    expires_bucket,
    mark_bucket,
    marked,
    refill,
    view_bucket,
)
from tidegate.core.log import Changes, LogEntries, adjust_log, adjust_slots, charge_log, expires_log, view_log
from tidegate.core.sliding import adjust_sliding, charge_sliding, expires_sliding, view_sliding
from tidegate.core.state import NEVER, State, View
from tidegate.core.windows import (
    CarriedWindows,
    adjust_calendar,
    adjust_fixed,
    charge_calendar,
    charge_fixed,
    expires_calendar,
    expires_fixed,
    view_calendar,
    view_fixed,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.core.limit import Limit

__all__ = [
    "ALGORITHMS",
    "MAX_PEAKS",
    "NEVER",
    "Algorithm",
    "CarriedWindows",
    "Changes",
    "LogEntries",
    "MarkedLimit",
    "State",
    "View",
    "marked",
    "refill",
]


def unmarked(state: State) -> State:
    """Return a state unchanged: its algorithm needs no mark."""
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
