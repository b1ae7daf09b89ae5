"""States as lists of integers: the stored format, and what the conformance suite compares between ports.

token_bucket                   level, at, scale, then since and level of each high-water mark
fixed_window, calendar_window  used, start; if it has older windows or an earlier limit opened it, also its end, the
                               latest charge, the usage of ended windows, then used, start and end of each older
                               window
sliding_window                 current, previous, start, length
sliding_log, concurrency       time and cost of each entry, oldest first
"""

from __future__ import annotations

from array import array
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from tidegate.core.algorithms import CarriedWindows, LogEntries, MarkedLimit, State, marked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core.limit import Limit

__all__ = ["dump", "limit_of", "load"]


def limit_of(state: State) -> Limit:
    """Return the limit that wrote a state."""
    owner = state[0]
    return owner.limit if isinstance(owner, (MarkedLimit, CarriedWindows)) else owner


def dump(state: State) -> list[int]:
    """Return a state as integers; `load` restores it with the limit that wrote it."""
    limit = limit_of(state)
    if limit.algorithm == "token_bucket":
        owner, level, at = state
        peaks = owner.peaks if isinstance(owner, MarkedLimit) else ()
        return [level, at, limit.scale, *(number for peak in peaks for number in peak)]
    if limit.algorithm == "sliding_window":
        return [*state[1:], limit.length]
    if limit.algorithm in ("sliding_log", "concurrency"):
        _, (times, sums), head, tail, base = state
        costs = (after - before for before, after in pairwise([base, *sums[head:tail]]))
        return [number for entry in zip(times[head:tail], costs, strict=True) for number in entry]
    owner, used, start = state
    if isinstance(owner, CarriedWindows):
        numbers = (number for window in owner.older for number in window)
        return [used, start, owner.end, owner.last, owner.ended, *numbers]
    return [used, start]


def load(limit: Limit, numbers: Sequence[int]) -> State:
    """Restore a state from the integers that `dump` returned and the limit that wrote it."""
    if limit.algorithm == "token_bucket":
        level, at, _, *peaks = numbers
        return (marked(limit, tuple(zip(peaks[::2], peaks[1::2], strict=True))), level, at)
    if limit.algorithm == "sliding_window":
        return (limit, *numbers[:3])
    if limit.algorithm in ("sliding_log", "concurrency"):
        times, costs = array("q", numbers[::2]), numbers[1::2]
        return (limit, LogEntries(times, array("q", accumulate(costs))), 0, len(times), 0)
    used, start, *carried = numbers
    if not carried:
        return (limit, used, start)
    end, last, ended, *older = carried
    windows = tuple(zip(older[::3], older[1::3], older[2::3], strict=True))
    return (CarriedWindows(limit, end, last, ended, windows), used, start)
