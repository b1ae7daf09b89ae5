"""Milestones: which percentages of a quota were reached for the first time, in each window."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol

from tidegate._policy.setting_values import FULL_PERCENT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

REARM_FRACTION: Final = 0.75  # of a milestone
DENIAL_PAUSE: Final = timedelta(hours=1)  # between two reports of denials, if nothing is in use and no window has begun
MAX_NAMES: Final = 10_000  # limits that are remembered: there may be one for each team or tag


class WindowUsage(Protocol):
    """The usage of one limit; `reset_after` is in seconds."""

    @property
    def used(self) -> int:
        """Permits in use."""

    @property
    def quota(self) -> int:
        """Permits of the limit."""

    @property
    def reset_after(self) -> float:
        """Seconds until the window ends."""


class Milestones:
    """The milestones that limits have reached, by name. Not thread-safe."""

    def __init__(self, percents: Sequence[int], *, fixed: bool) -> None:
        """Report these percentages; `fixed` if windows are fixed, so that each window reports them again."""
        self.percents: list[int] = sorted(percents)
        self._fixed = fixed
        self._reached: dict[str, int] = {}
        self._window_ends: dict[str, datetime] = {}
        self._denials_until: dict[str, datetime] = {}  # no denial is reported before

    def update(self, usages: Mapping[str, WindowUsage], at: datetime) -> list[tuple[str, int]]:
        """Return the milestones that are reached now and were not before, as pairs of name and percentage."""
        found = []
        for name, usage in usages.items():
            if self._fixed and usage.used:
                end = at + timedelta(seconds=usage.reset_after)
                if abs((self._window_ends.get(name, at) - end).total_seconds()) >= 1:  # a new window
                    self._window_ends[name] = end
                    self._reached[name] = 0
                    self._denials_until.pop(name, None)
            before = self._reached.get(name, 0)
            percent = FULL_PERCENT * usage.used / usage.quota
            now = max((each for each in self.percents if each <= percent), default=0)
            if now > before:
                found += [(name, each) for each in self.percents if before < each <= now]
                self._reached[name] = now
            elif before and percent < before * REARM_FRACTION:
                self._reached[name] = max(
                    (each for each in self.percents if each * REARM_FRACTION <= percent), default=0
                )
        self._drop_oldest()
        return found

    def is_denial_new(self, name: str, usage: WindowUsage, at: datetime) -> bool:
        """Return whether to report that a limit denied a call: once in each window, and not if all of it is used."""
        if not self.percents or self._reached.get(name) == self.percents[-1] or at < self._denials_until.get(name, at):
            return False
        self._denials_until[name] = at + max(timedelta(seconds=usage.reset_after), DENIAL_PAUSE)
        self._drop_oldest()
        return True

    def _drop_oldest(self) -> None:
        known: dict[str, Any]
        for known in (self._reached, self._window_ends, self._denials_until):
            while len(known) > MAX_NAMES:
                del known[next(iter(known))]
