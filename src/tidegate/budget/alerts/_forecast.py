"""Forecasts when each tier runs out at the current pace.

The pace is that of the last hour (of the tier `hour`, or of the shortest tier that counts in the same unit). A fixed
window does not run out if it ends before it is full. In a rolling window old tasks expire; the forecast assumes that
they are spread evenly over the window, so a pace that the window can sustain never fills it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tidegate.budget._settings.tiers import CONCURRENCY, ROLLING_PERIODS
from tidegate.core._bounds import SECOND
from tidegate.core._calendar import Calendar
from tidegate.core._limit import parse_period

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidegate.budget._result import Usage
    from tidegate.budget._settings.tiers import Tier, TierPlan


class Forecast(NamedTuple):
    """The pace of a tier per second, and the seconds until it is used up (None: never at this pace)."""

    pace: float
    runs_out_in: float | None


def forecast(plan: TierPlan, usages: Mapping[str, Usage], now: int) -> dict[str, Forecast]:
    """Forecast every tier at an instant (microseconds)."""
    found = {}
    for tier in plan.tiers:
        usage = usages.get(tier.name)
        if usage is None or tier.period == CONCURRENCY:
            continue
        pace = pace_of(plan, usages, tier.unit, now)
        found[tier.name] = Forecast(pace, seconds_left(plan, tier, usage, pace, now))
    return found


def pace_of(plan: TierPlan, usages: Mapping[str, Usage], unit: str, now: int) -> float:
    """Return how much of a unit is currently used per second."""
    tiers = [tier for tier in plan.tiers if tier.unit == unit and tier.name in usages]
    tier = next((tier for tier in tiers if tier.period == "hour"), tiers[0])
    start, end = window(plan, tier, now)
    elapsed = now - start if plan.strategy == "fixed" else end - start
    return usages[tier.name].used * SECOND / max(elapsed, SECOND)


def seconds_left(plan: TierPlan, tier: Tier, usage: Usage, pace: float, now: int) -> float | None:
    """Return the seconds until a tier is used up at this pace; None if it is reset before."""
    if not usage.remaining:
        return 0.0
    start, end = window(plan, tier, now)
    if plan.strategy == "fixed":
        growth, left = pace, (end - now) / SECOND
    else:
        left = (end - start) / SECOND
        growth = pace - usage.used / left
    if growth <= 0:
        return None
    seconds = usage.remaining / growth
    return seconds if seconds < left else None


def window(plan: TierPlan, tier: Tier, now: int) -> tuple[int, int]:
    """Return the window of a tier that contains or ends at an instant, in microseconds."""
    if plan.strategy == "fixed":
        return Calendar(tier.period, plan.timezone).window(now)
    return now - parse_period(ROLLING_PERIODS[tier.period]), now
