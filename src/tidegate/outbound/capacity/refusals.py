"""What refusals teach: down to which level, how long that is held, how long nothing is sent. Pure; time is an argument.

A 429 lowers the capacity to what was in use then, which is what the provider has let through, by one at least, though
not below half at once; a 503 lowers it to half. Refusals within a period belong together: they lower it once. Where
Retry-After is not said, nothing is sent for a while that doubles with each refusal. Where capacity is refused again and
again at the same level, that level is held for longer and longer before the next step of recovery.

Processes that hear of each other's refusals hold the same levels: what one was told counts as if all had been.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core.bounds import SECOND

if TYPE_CHECKING:
    from tidegate.core import Limit

MAX_HELD: Final = 8  # steps of recovery for which a level is held at most
FIRST_PAUSE: Final = SECOND  # after the first refusal that says nothing of when; less where the period is short
MAX_PAUSE: Final = 60 * SECOND


class Notice(NamedTuple):
    """What a refusal means: a capacity, and for how many microseconds nothing is to be sent."""

    value: int
    pause: int


class Refusals:
    """The refusals of one account, by the clock's steady time."""

    def __init__(self, limit: Limit, interval: int) -> None:
        """Know of none; `interval` is the time between two steps of recovery."""
        self._length = limit.length
        self._interval = interval
        self._strikes = 0
        self._paused = 0  # no refusal of what was sent before then counts as another one
        self._level = 0  # of the last refusals, held until then
        self._hold = 0
        self._hold_until = 0
        self._began = 0  # when the last ones began, and at what capacity
        self._before: int | None = None

    def refused(self, now: int, sent: int, current: int, used: int, retry_after: float | None) -> Notice:
        """Take note of a refusal of what was `sent` then, at a capacity of which so much was `used`."""
        fewer = self._begin(now, sent, current)
        value = max(1, min(current - fewer, max((self._before or 0) // 2, used)))
        self._keep(now, value)
        if retry_after is not None:
            pause = round(retry_after * SECOND)
        elif sent >= self._paused:
            self._strikes += 1
            first = min(FIRST_PAUSE, self._length // 20)
            pause = min(first << min(self._strikes - 1, 20), self._length, MAX_PAUSE)
        else:
            pause = 0  # an answer to something sent before the pause began
        self._paused = max(self._paused, now + pause)
        return Notice(value, pause)

    def heard(self, now: int, since: int, current: int, value: int) -> None:
        """Take note of what another process was told; the capacity may be `current` because of that already."""
        if value <= current:
            self._begin(now, since, current)
            self._keep(now, value)

    def _begin(self, now: int, sent: int, current: int) -> bool:
        """Tell whether a refusal is the first of its kind."""
        if self._before is not None and sent < self._began + self._length:
            return False
        self._began, self._before = now, current
        again = self._level * 9 < current * 10 and current * 9 < self._level * 11
        self._hold = min(MAX_HELD, self._hold * 2 or 1) if again else 0
        return True

    def _keep(self, now: int, value: int) -> None:
        self._level = value
        self._hold_until = now + self._hold * self._interval

    def held(self, now: int, current: int) -> int | None:
        """Give the level that is held still, where the capacity would rise above it."""
        return self._level if current > self._level and now < self._hold_until else None

    def worked(self) -> None:
        """Take note of an answer that was no refusal: the next refusal is a first one."""
        self._strikes = 0
