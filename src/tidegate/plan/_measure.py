"""How much quota a key needed: the smallest quota with which an algorithm would have denied none of its requests.

Windows and logs are measured by the core itself, with a limit that never denies. A token bucket depends on its quota,
so its smallest quota is computed: over every interval of a key, the cost is at most quota * (1 + duration / period).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from tidegate.core._bounds import ceil_div
from tidegate.core._limit import Limit

if TYPE_CHECKING:
    from tidegate.core._algorithms import State

UNLIMITED_QUOTA: Final = 10**8  # with which nothing is denied; it must fit the arithmetic of every algorithm


class Measure(Protocol):
    """Measures the requests of one key."""

    needed: int  # the smallest quota that denies none of them

    def add(self, now: int, cost: int) -> None:
        """Add a request."""


class UsageMeasure:
    """Measures how much of a limit that never denies is in use."""

    __slots__ = ("_limit", "_state", "needed")

    def __init__(self, limit: Limit) -> None:
        """Measure with this limit."""
        self._limit = limit
        self._state: State | None = None
        self.needed: int = 0

    def add(self, now: int, cost: int) -> None:
        """Add a request."""
        limit = self._limit
        state = limit.charge(self._state, limit, cost, now)
        if state is not None:
            self._state = state
            used = limit.burst - limit.remaining_of(state, limit, now)
            self.needed = max(self.needed, used)


class BucketMeasure:
    """Computes the smallest quota, which is also the burst, of a token bucket.

    It keeps the requests since the bucket of that quota was full: earlier ones cannot need a larger one.
    """

    __slots__ = ("_costs", "_last", "_level", "_period", "_times", "needed")

    def __init__(self, period: int) -> None:
        """Measure a bucket that refills its quota in this period, in microseconds."""
        self._period = period
        self._level = 0  # in permits * period
        self._last = 0
        self._times: list[int] = []
        self._costs: list[int] = []
        self.needed: int = 0

    def add(self, now: int, cost: int) -> None:
        """Add a request."""
        now = max(now, self._last)
        self._refill(now)
        if self._level == self.needed * self._period:
            self._times.clear()
            self._costs.clear()
        self._times.append(now)
        self._costs.append(cost)
        self._level -= cost * self._period
        if self._level < 0:
            self._raise(now)

    def _refill(self, now: int) -> None:
        self._level = min(self.needed * self._period, self._level + (now - self._last) * self.needed)
        self._last = now

    def _raise(self, now: int) -> None:
        """Raise the quota to what the latest request needs, and compute the level again."""
        total = 0
        for time, cost in zip(reversed(self._times), reversed(self._costs), strict=True):
            total += cost
            self.needed = max(self.needed, ceil_div(total * self._period, self._period + now - time))
        self._level = self.needed * self._period
        self._last = self._times[0]
        for time, cost in zip(self._times, self._costs, strict=True):
            self._refill(time)
            self._level -= cost * self._period


def make_measure(limit: Limit) -> Measure:
    """Return the measure of a key for limits like this one, whatever its quota."""
    return BucketMeasure(limit.length) if limit.rules.refills else UsageMeasure(limit)


def measured_limit(period: str, algorithm: str) -> Limit:
    """Return the limit that measures; raises ConfigError."""
    return Limit(UNLIMITED_QUOTA, period, algorithm=algorithm)
