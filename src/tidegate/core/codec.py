"""States as lists of integers: the stored format, and what the conformance suite compares between ports.

token_bucket                   level, at, scale, then since and level of each high-water mark
fixed_window, calendar_window  used, start; if it has older windows or an earlier limit opened it, also its end, the
                               latest charge, the usage of ended windows, then used, start and end of each older
                               window
sliding_window                 current, previous, start, length
sliding_log, concurrency       time and cost of each entry, oldest first

Each algorithm has its own functions; by default the format is the integers of the state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.core._algorithms import CarriedWindows, State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core._limit import Limit

__all__ = ["dump", "limit_of", "load"]


def limit_of(state: State) -> Limit:
    """Return the limit that wrote a state."""
    owner = state[0]
    return owner.limit if isinstance(owner, CarriedWindows) else owner


def dump(state: State) -> list[int]:
    """Return a state as integers; `load` restores it with the limit that wrote it."""
    return limit_of(state).rules.dump(state)


def load(limit: Limit, numbers: Sequence[int]) -> State:
    """Restore a state from the integers that `dump` returned and the limit that wrote it."""
    return limit.rules.load(limit, numbers)
