"""limits with its exact strategy, moving-window: only for threads, as the one of its strategies that takes a lock.

It inserts each call at the front of a list, so on one hot key a decision takes as long as there were calls.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from limits import RateLimitItemPerSecond  # type: ignore[import-not-found]  # peers are only in .venv-bench
from limits.storage import MemoryStorage  # type: ignore[import-not-found]  # as above
from limits.strategies import MovingWindowRateLimiter  # type: ignore[import-not-found]  # as above

from bench.libraries import DAY
from bench.libraries.limits import HOT, admitted

if TYPE_CHECKING:
    from bench.libraries import Ask

__all__ = ["DISTRIBUTION", "HOT", "NAME", "ONLY", "STRATEGY", "admitted", "per_day"]

NAME = "limits (moving)"
DISTRIBUTION = "limits"
STRATEGY = "moving-window; bool"
ONLY = ("threads",)


def per_day(quota: int, days: int = 1) -> Ask:
    """Ask for one permit of `quota` in so many days."""
    return partial(MovingWindowRateLimiter(MemoryStorage()).hit, RateLimitItemPerSecond(quota, days * DAY))
