"""What a budget tells of itself: counts for metrics, log lines, and warnings for whoever wants them.

A milestone (50, 80, 95 % of a tier) is told once, and again only after use has fallen to three quarters of it: a
rolling window that hovers around one does not tell the same thing every minute. In a new fixed window they are new.
That a tier says no is told when it begins to.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from tidegate.budget.tiers import CONCURRENCY
from tidegate.fork import fork_safe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from tidegate.budget.result import RateLimitResult, Usage

    Warn = Callable[[dict[str, Any]], None]

log = logging.getLogger("tidegate.budget")

BUCKETS: Final = (100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000)  # microseconds
REARMED: Final = 0.75  # of a milestone
FULL: Final = 100
MEANWHILE: Final = {
    "short-term": "limits per minute and hour stay in force, in memory; longer ones are not checked until it is back",
    "local": "this process goes on with its share of the limits",
    "deny": "nothing is allowed until it is back",
}


class Watch:
    """Counts and tells. `warn` is called with each warning, and must not block."""

    def __init__(
        self, name: str, milestones: tuple[int, ...], warn: Warn | None, *, fixed: bool, on_error: str
    ) -> None:
        """Tell of the budget of this name."""
        self._on_error = on_error
        self.name = name
        self.exceeded: dict[str, int] = {}
        self.durations = [0] * (len(BUCKETS) + 1)
        self.duration_sum = 0
        self.recorded = 0
        self.returned = 0
        self._milestones = sorted(milestones)
        self._reached: dict[str, int] = {}
        self._fixed = fixed
        self._ends: dict[str, datetime] = {}  # of the windows, where they are fixed
        self._refusing: set[str] = set()
        self._lost = False
        self._warn = warn
        self._lock = fork_safe(threading.Lock())

    def checked(self, result: RateLimitResult, microseconds: int | None) -> None:
        """Note a check, and how long it took unless it was told to wait."""
        with self._lock:
            if microseconds is not None:
                self.durations[bisect_left(BUCKETS, microseconds)] += 1
                self.duration_sum += microseconds
            for tier in result.exceeded:
                self.exceeded[tier] = self.exceeded.get(tier, 0) + 1
            begun = [tier for tier in result.exceeded if tier not in self._refusing]
            self._refusing = set(result.exceeded)
        self.looked(result.usage, result.at)
        if not result.allowed:
            log.log(logging.WARNING if begun else logging.DEBUG, "rate limit exceeded: %s", result.reason)
        for tier in begun:
            usage = result.usage.get(tier)
            self.warn("limit_exceeded", tier=tier, wait=result.wait, **(figures(usage) if usage else {}))

    def looked(self, usages: Mapping[str, Usage], at: datetime) -> None:
        """Note how the tiers stand, and tell the milestones they have reached."""
        with self._lock:
            reached = self._pass_milestones(usages, at)
        for tier, milestone in reached:
            self._tell_milestone(tier, milestone, usages[tier])

    def _pass_milestones(self, usages: Mapping[str, Usage], at: datetime) -> list[tuple[str, int]]:
        """Find the milestones that are reached now, and were not before."""
        found = []
        for tier, usage in usages.items():
            if tier == CONCURRENCY:  # is full whenever there is enough to do
                continue
            if self._fixed and usage.used:
                ends = at + timedelta(seconds=usage.reset_after)
                if self._ends.get(tier) != ends:  # another window
                    self._ends[tier] = ends
                    self._reached[tier] = 0
            before = self._reached.get(tier, 0)
            percent = FULL * usage.used / usage.quota
            now = max((each for each in self._milestones if each <= percent), default=0)
            if now > before:
                found += [(tier, each) for each in self._milestones if before < each <= now]
                self._reached[tier] = now
            elif before and percent < before * REARMED:
                self._reached[tier] = max((each for each in self._milestones if each * REARMED <= percent), default=0)
        return found

    def _tell_milestone(self, tier: str, milestone: int, usage: Usage) -> None:
        level = logging.WARNING if milestone >= self._milestones[-1] else logging.INFO
        log.log(level, "%d %% of the tier %s are used: %d of %d", milestone, tier, usage.used, usage.quota)
        self.warn("milestone", tier=tier, milestone=milestone, **figures(usage))

    def database(self, *, lost: bool, waiting: int) -> None:
        """Note whether the database answers."""
        with self._lock:
            changed, self._lost = lost is not self._lost, lost
        if changed:
            if lost:
                log.error("the database is lost: %s", MEANWHILE[self._on_error])
            else:
                log.warning("the database is back; %d settlements it missed are told to it", waiting)
            self.warn("database_lost" if lost else "database_back", waiting=waiting)

    def settled(self, recorded: int, returned: int) -> None:
        """Count tasks recorded and given back."""
        with self._lock:
            self.recorded += recorded
            self.returned += returned

    def warn(self, event: str, **told: object) -> None:
        """Hand a warning on."""
        if self._warn is not None:
            self._warn({"event": event, "budget": self.name, **told})


def figures(usage: Usage) -> dict[str, Any]:
    """Word how a tier stands."""
    return {"used": usage.used, "quota": usage.quota, "unit": usage.unit, "reset_after": usage.reset_after}
