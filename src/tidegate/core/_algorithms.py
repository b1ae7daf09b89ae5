"""The six algorithms, as pure functions of integers, and the traits by which other packages tell them apart.

    charge(state, limit, cost, now)       -> the new state, or None if denied
    view(state, limit, cost, now)         -> View((remaining, retry, reset))
    adjust(state, limit, delta, now, at)  -> the new state
    expires(state)                        -> the instant from which the state is equivalent to None

A **State** is a tuple that begins with the Limit that wrote it; None is the state of a new key. `charge` takes `cost`
permits (at least one) if they are available. `view` returns the `remaining` permits; `retry`, which is 0 if the cost
would be charged, else the microseconds until it would be (if nothing else happens), or NEVER; and `reset`, the
microseconds until all permits are available again. `remaining` is negative if a correction took more than there was,
or the limit was lowered: `limit.burst - remaining` permits are in use. `adjust` corrects an earlier charge: it refunds
(delta < 0) or takes (delta > 0) permits, those charged at the instant `at`, or the latest ones if `at` is None.

Time never runs backwards for a key: every transition first raises `now` to the latest instant in its state. A state
that an earlier version of the limit wrote is read so that the change itself refills nothing: windows and logs keep
their usage, a bucket keeps its available permits, up to the new burst.

Each algorithm has its own module. The Lua and SQL ports have the same function names in the same order.

No module outside the core compares the name of an algorithm: it checks a trait, such as `limit.rules.holds_slots`. So
a new algorithm needs a module here, an entry in ALGORITHMS, and its ports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core._bucket import (
    MAX_MARKS,
    adjust_bucket,
    charge_bucket,
    dump_bucket,
    expires_bucket,
    load_bucket,
    mark_bucket,
    raise_marks,
    refill,
    remaining_bucket,
    retry_bucket,
    view_bucket,
)
from tidegate.core._log import (
    Changes,
    LogEntries,
    adjust_log,
    adjust_slots,
    charge_log,
    dump_log,
    expires_log,
    load_log,
    view_log,
)
from tidegate.core._sliding import (
    adjust_sliding,
    charge_sliding,
    dump_sliding,
    expires_sliding,
    load_sliding,
    view_sliding,
)
from tidegate.core._state import NEVER, State, View, dump_integers, load_integers
from tidegate.core._windows import (
    CarriedWindows,
    adjust_calendar,
    adjust_fixed,
    charge_calendar,
    charge_fixed,
    dump_window,
    expires_calendar,
    expires_fixed,
    load_window,
    view_calendar,
    view_fixed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate.core._limit import Limit

__all__ = [
    "ALGORITHMS",
    "MAX_MARKS",
    "NEVER",
    "Algorithm",
    "CarriedWindows",
    "Changes",
    "LogEntries",
    "State",
    "View",
    "raise_marks",
    "refill",
]


def unmarked(state: State) -> State:
    """Return a state unchanged: its algorithm needs no mark."""
    return state


def remaining_of_view(state: State | None, limit: Limit, now: int) -> int:
    """Return the remaining permits, which do not depend on a cost."""
    return limit.view(state, limit, 0, now).remaining


def retry_of_view(state: State | None, limit: Limit, cost: int, now: int) -> int:
    """Return how long to wait for a cost."""
    return limit.view(state, limit, cost, now).retry


class Algorithm(NamedTuple):
    """The transitions of one algorithm, and its traits.

    `mark` is called on the state of a charge that may be corrected later. `dump` and `load` convert a state to the
    integers that stores keep, and back (see `tidegate.core.codec`). `remaining` and `retry` return one number of the
    view; an algorithm may have a cheaper way to compute it. The traits say when a charge stops counting, and
    what the state knows about it; a limit without any of them is counted, stored and decided on like the others.
    """

    charge: Callable[[State | None, Limit, int, int], State | None]
    view: Callable[[State | None, Limit, int, int], View]
    adjust: Callable[[State | None, Limit, int, int, int | None], State | None]
    expires: Callable[[State], int]
    mark: Callable[[State], State] = unmarked
    dump: Callable[[State], list[int]] = dump_integers
    load: Callable[[Limit, Sequence[int]], State] = load_integers
    remaining: Callable[[State | None, Limit, int], int] = remaining_of_view
    retry: Callable[[State | None, Limit, int, int], int] = retry_of_view

    refills: bool = False
    """Permits refill continuously, at `limit.rate` / `limit.scale`, up to a burst. The state is a level, which does not
    record when a permit was taken."""
    windowed: bool = False
    """All permits taken in a window are available again when it ends."""
    by_calendar: bool = False
    """The windows are those of a calendar: `limit.calendar`."""
    weighted: bool = False
    """The previous window counts in part, so a charge counts for up to two periods."""
    logged: bool = False
    """The state is a log with an entry for each charge. Later states share it, so a view must be computed before the
    next charge, and long logs may be stored apart."""
    holds_slots: bool = False
    """A charge takes slots, which count until they are released, or for one period. They do not
    become available by themselves, so they cannot be the quota of a provider, be leased or be divided into shares."""
    leasable: bool = False
    """Permits may be used a little later than they are taken, or be divided among processes: `stores.lease.terms` and
    `stores.outage.local_share` compute the stricter limits that this needs, from the other traits."""

    port_number: int = 0
    """The number of the algorithm in `core.lua`, from 1 to 7; 0 if only stores that run the Python core support it."""
    port_size: int = 0
    """How many numbers a state has in `core.lua`."""
    port_cost: int = 3
    """How long the ports take to decide, relative to a token bucket (about 3 us in Redis)."""

    @property
    def rolling(self) -> bool:
        """Whether each permit is available again exactly one period after it was taken."""
        return self.logged and not self.holds_slots

    @property
    def movable(self) -> bool:
        """Whether a charge can be moved to another instant: the state knows when each permit was taken."""
        return self.windowed or self.rolling


ALGORITHMS: Final = {
    "token_bucket": Algorithm(
        charge_bucket,
        view_bucket,
        adjust_bucket,
        expires_bucket,
        mark_bucket,
        dump_bucket,
        load_bucket,
        remaining_bucket,
        retry_bucket,
        refills=True,
        leasable=True,
        port_number=1,
        port_size=5,
        port_cost=1,
    ),
    "fixed_window": Algorithm(
        charge_fixed,
        view_fixed,
        adjust_fixed,
        expires_fixed,
        dump=dump_window,
        load=load_window,
        windowed=True,
        leasable=True,
        port_number=2,
        port_size=2,
    ),
    "calendar_window": Algorithm(
        charge_calendar,
        view_calendar,
        adjust_calendar,
        expires_calendar,
        dump=dump_window,
        load=load_window,
        windowed=True,
        by_calendar=True,
        leasable=True,
        port_number=3,
        port_size=2,
    ),
    "sliding_window": Algorithm(
        charge_sliding,
        view_sliding,
        adjust_sliding,
        expires_sliding,
        dump=dump_sliding,
        load=load_sliding,
        weighted=True,
        leasable=True,
        port_number=4,
        port_size=4,
    ),
    "sliding_log": Algorithm(
        charge_log,
        view_log,
        adjust_log,
        expires_log,
        dump=dump_log,
        load=load_log,
        logged=True,
        leasable=True,
        port_number=5,
        port_size=6,
        port_cost=5,
    ),
    "concurrency": Algorithm(
        charge_log,
        view_log,
        adjust_slots,
        expires_log,
        dump=dump_log,
        load=load_log,
        logged=True,
        holds_slots=True,
        port_number=6,
        port_size=6,
        port_cost=5,
    ),
}
