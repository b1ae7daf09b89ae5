"""How refusals change the capacity: the new level, how long it is held, how long nothing is sent. Time is an argument.

A 429 reduces the capacity to what was in use then, which is what the provider has let through: by at least one, but not
below half in one step. A 503 reduces it to half. Refusals within one period count as one reduction. Without
Retry-After, or with one that is shorter than the first pause (zero, a date in the past), nothing is sent for a pause
that doubles with each refusal. If requests are refused repeatedly at the same level, that level is held longer each
time before the next recovery step.

A limit in money is the user's own, so a refusal says nothing about it: it is never reduced, only the pause applies.

Processes that receive each other's refusals hold the same levels: a refusal of one process counts for all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate._policy.units import is_money
from tidegate.core._bounds import SECOND

if TYPE_CHECKING:
    from tidegate.core import Limit

MAX_HELD: Final = 8  # recovery steps for which a level is held at most
FIRST_PAUSE: Final = SECOND  # after the first refusal without a usable Retry-After; shorter if the period is short
MAX_PAUSE: Final = 60 * SECOND


class Notice(NamedTuple):
    """The effect of a refusal: a capacity, and for how many microseconds nothing is sent."""

    value: int
    pause: int


class Refusals:
    """The refusals of one account; instants are the clock's steady time."""

    def __init__(self, limit: Limit, interval: int) -> None:
        """Start without refusals; `interval` is the time between two recovery steps."""
        self._length = limit.length
        self._reduces = not is_money(limit.unit)
        self._interval = interval
        self._streak = 0
        self._paused_until = 0  # refusals of requests sent before this instant do not count as new ones
        self._level = 0  # of the last refusals, held until `_hold_until`
        self._hold_steps = 0
        self._hold_until = 0
        self._series_start = 0  # when the last series of refusals began, and at what capacity
        self._series_capacity: int | None = None

    def record(self, now: int, sent: int, current: int, used: int, retry_after: float | None) -> Notice:
        """Record the refusal of a request `sent` at that instant, when this much of the capacity was `used`."""
        first_of_series = self._begin_series(now, sent, current)
        value = max(1, min(current - first_of_series, max((self._series_capacity or 0) // 2, used)))
        if not self._reduces:
            value = current
        self._hold_level(now, value)
        first = min(FIRST_PAUSE, self._length // 20)
        pause = 0 if retry_after is None else round(retry_after * SECOND)
        if pause < first and sent >= self._paused_until:  # else the request was sent before the pause began
            self._streak += 1
            pause = min(first << min(self._streak - 1, 20), self._length, MAX_PAUSE)
        self._paused_until = max(self._paused_until, now + pause)
        return Notice(value, pause)

    def record_remote(self, now: int, since: int, current: int, value: int) -> None:
        """Record a refusal that another process received; `current` may already include it."""
        if value <= current:
            self._begin_series(now, since, current)
            self._hold_level(now, value)

    def _begin_series(self, now: int, sent: int, current: int) -> bool:
        """Return whether a refusal is the first of a new series."""
        if self._series_capacity is not None and sent < self._series_start + self._length:
            return False
        self._series_start, self._series_capacity = now, current
        same_level = self._level * 9 < current * 10 and current * 9 < self._level * 11
        self._hold_steps = min(MAX_HELD, self._hold_steps * 2 or 1) if same_level else 0
        return True

    def _hold_level(self, now: int, value: int) -> None:
        self._level = value
        self._hold_until = now + self._hold_steps * self._interval

    def held_level(self, now: int, current: int) -> int | None:
        """Return the level that is still held if the capacity would exceed it."""
        return self._level if current > self._level and now < self._hold_until else None

    def record_success(self) -> None:
        """Record a response that was not a refusal: the pause starts small again."""
        self._streak = 0
