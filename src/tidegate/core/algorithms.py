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

Each has a module of its own. The Lua and SQL ports carry the same function names in the same order.
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
