"""Tiers: what a budget limits, as the limits of one policy.

    minute hour day week month     tasks
    day:tokens                     a cost, by its unit
    day:embedding                  tasks of a type
    concurrency                    tasks under way at the same time
    day<1                          not shown: tasks of a priority below 1, who may not enter the share of those above

All of them stand in one policy, so that a batch is decided at once, all or nothing. What distinguishes them is the unit
each one counts in; `Plan.charges` tells what a batch costs in which unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core.limit import Limit
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

ROLLING: Final = {"minute": "1m", "hour": "1h", "day": "1d", "week": "1w", "month": "30d"}
PERIODS: Final = tuple(ROLLING)
SHORT: Final = ("minute", "hour", "concurrency")  # what goes on in memory while the database is lost
TASKS: Final = "tasks"
SLOTS: Final = "concurrent-requests"
CONCURRENCY: Final = "concurrency"


class Tier(NamedTuple):
    """One limit of a budget, as people see it."""

    name: str
    period: str
    unit: str
    quota: int


@dataclass(frozen=True)
class Plan:
    """The tiers of a budget, and how they become limits.

    `reserved` maps priorities to the share of each tier that is kept for tasks of that priority and above.
    """

    tiers: tuple[Tier, ...]
    strategy: str = "rolling"
    timezone: str = "UTC"
    reserved: tuple[tuple[int, Fraction], ...] = ()
    lasting: float = 600.0  # seconds after which a slot of a batch that nobody settled is free again

    def check_shares(self) -> None:
        """Refuse shares that leave nothing of a tier to those below."""
        for tier in self.tiers:
            for priority, share in self.kept():
                if tier.period != CONCURRENCY and tier.quota <= ceil(tier.quota * share):
                    message = f"nothing of {tier.quota} per {tier.name} is left to tasks of a priority below {priority}"
                    raise ConfigError(message, field="reserved")

    def limits(self, quotas: Mapping[str, int]) -> tuple[Limit, ...]:
        """Build the limits, each tier with the quota it has at the moment."""
        built: list[Limit] = []
        for tier in self.tiers:
            quota = quotas[tier.name]
            built.append(self._limit(tier, tier.name, tier.unit, quota))
            if tier.period == CONCURRENCY:
                continue
            for priority, share in self.kept():
                rest = max(1, quota - ceil(quota * share))
                built.append(self._limit(tier, f"{tier.name}<{priority}", f"{tier.unit}<{priority}", rest))
        return tuple(built)

    def _limit(self, tier: Tier, name: str, unit: str, quota: int) -> Limit:
        if tier.period == CONCURRENCY:
            return Limit(quota, self.lasting, "concurrency", unit, name=name)
        if self.strategy == "fixed":
            return Limit(quota, tier.period, "calendar_window", unit, name=name, timezone=self.timezone)
        return Limit(quota, ROLLING[tier.period], "sliding_log", unit, name=name)

    def kept(self) -> list[tuple[int, Fraction]]:
        """Tell for each priority what is kept from those below it: its own share, and those of higher ones."""
        return [
            (priority, sum((share for other, share in self.reserved if other >= priority), Fraction()))
            for priority, _ in self.reserved
        ]

    def charges(self, tasks: int, task_type: str | None, cost: Mapping[str, int], priority: int) -> dict[str, int]:
        """Tell what a batch costs, by unit; a unit that no tier counts costs nothing, and slots are not in it."""
        spent = {TASKS: tasks, **cost}
        if task_type is not None:
            spent[f"{TASKS}:{task_type}"] = tasks
        for above, _ in self.reserved:
            if priority < above:
                spent |= {f"{unit}<{above}": amount for unit, amount in spent.items() if "<" not in unit}
        return spent


def tier_of(limit: str) -> str:
    """Name the tier that a limit belongs to."""
    return limit.partition("<")[0]


def is_shown(limit: str) -> bool:
    """Tell whether a limit is a tier, or only keeps a share of one."""
    return "<" not in limit
