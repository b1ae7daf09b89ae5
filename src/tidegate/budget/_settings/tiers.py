"""Tiers: what a budget limits, as the limits of one policy.

    minute hour day week month     tasks
    day:tokens                     a cost, by its unit
    day:embedding                  tasks of a type
    concurrency                    tasks that run at the same time
    day<1                          internal: tasks of a priority below 1, which cannot use the share reserved above

All tiers are in one policy, so that a batch is decided at once, all or nothing. Each tier counts in a unit of its own;
`charges` returns what a batch costs in each unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core._limit import Limit
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

ROLLING_PERIODS: Final = {"minute": "1m", "hour": "1h", "day": "1d", "week": "1w", "month": "30d"}
PERIODS: Final = tuple(ROLLING_PERIODS)
CONCURRENCY: Final = "concurrency"
SHORT_TERM: Final = (
    "minute",
    "hour",
    CONCURRENCY,
)  # enforced in memory while the database is unavailable
TASKS_UNIT: Final = "tasks"
SLOTS_UNIT: Final = "concurrent-requests"


class Tier(NamedTuple):
    """One limit of a budget, as users see it."""

    name: str
    period: str
    unit: str
    quota: int


@dataclass(frozen=True)
class TierPlan:
    """The tiers of a budget, and the limits built from them.

    `reserved` maps priorities to the share of each tier that is reserved for tasks of that priority and above.
    """

    tiers: tuple[Tier, ...]
    strategy: str = "rolling"
    timezone: str = "UTC"
    reserved: tuple[tuple[int, Fraction], ...] = ()
    slot_lease: float = 600.0  # seconds after which the slots of an unsettled batch are free again

    def check_shares(self) -> None:
        """Refuse shares that leave no quota of a tier to lower priorities."""
        for tier in self.tiers:
            for priority, share in self.reserved_shares():
                if tier.period != CONCURRENCY and tier.quota <= ceil(tier.quota * share):
                    message = (
                        f"the shares reserve all of {tier.quota} per {tier.name} for priority {priority} and above: "
                        "lower the shares, or raise the quota"
                    )
                    raise ConfigError(message, field="reserved")

    def limits(self, quotas: Mapping[str, int]) -> tuple[Limit, ...]:
        """Build the limits, with these quotas by tier."""
        built: list[Limit] = []
        for tier in self.tiers:
            quota = quotas[tier.name]
            built.append(self._limit(tier, tier.name, tier.unit, quota))
            if tier.period == CONCURRENCY:
                continue
            for priority, share in self.reserved_shares():
                rest = max(1, quota - ceil(quota * share))
                built.append(self._limit(tier, f"{tier.name}<{priority}", f"{tier.unit}<{priority}", rest))
        return tuple(built)

    def _limit(self, tier: Tier, name: str, unit: str, quota: int) -> Limit:
        if tier.period == CONCURRENCY:
            return Limit(quota, self.slot_lease, "concurrency", unit, name=name)
        if self.strategy == "fixed":
            return Limit(quota, tier.period, "calendar_window", unit, name=name, timezone=self.timezone)
        return Limit(quota, ROLLING_PERIODS[tier.period], "sliding_log", unit, name=name)

    def reserved_shares(self) -> list[tuple[int, Fraction]]:
        """Return for each priority the share that lower priorities cannot use: its own, and those of higher ones."""
        return [
            (priority, sum((share for other, share in self.reserved if other >= priority), Fraction()))
            for priority, _ in self.reserved
        ]

    def charges(self, tasks: int, task_type: str | None, cost: Mapping[str, int], priority: int) -> dict[str, int]:
        """Return what a batch costs, by unit, without slots. It may include units that no tier counts."""
        charges = {TASKS_UNIT: tasks, **cost}
        if task_type is not None:
            charges[f"{TASKS_UNIT}:{task_type}"] = tasks
        for above, _ in self.reserved:
            if priority < above:
                charges |= {f"{unit}<{above}": amount for unit, amount in charges.items() if "<" not in unit}
        return charges


def tier_of(limit: str) -> str:
    """Return the name of the tier that a limit belongs to."""
    return limit.partition("<")[0]


def is_tier(limit: str) -> bool:
    """Return whether a limit is a tier itself, not one that reserves a share of it."""
    return "<" not in limit
