"""When each tier runs out at the present pace.

The pace is that of the last hour (by the tier `hour`, or the shortest one that counts in the same unit). A fixed window
that ends before it is full lasts. A rolling window also loses what is old; taken as spread evenly over the window, a
pace that it can bear for ever never fills it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tidegate.budget.tiers import CONCURRENCY, ROLLING
from tidegate.core.bounds import SECOND
from tidegate.core.calendar import Calendar
from tidegate.core.limit import parse_period

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidegate.budget.result import Usage
    from tidegate.budget.tiers import Plan, Tier


class Forecast(NamedTuple):
    """What to expect of a tier: its pace per second, and in how many seconds it is used up; None: it lasts."""

    pace: float
    runs_out_in: float | None


def forecast(plan: Plan, usages: Mapping[str, Usage], now: int) -> dict[str, Forecast]:
    """Look ahead from an instant (microseconds)."""
    found = {}
    for tier in plan.tiers:
        usage = usages.get(tier.name)
        if usage is None or tier.period == CONCURRENCY:
            continue
        pace = pace_of(plan, usages, tier.unit, now)
        found[tier.name] = Forecast(pace, runs_out(plan, tier, usage, pace, now))
    return found


def pace_of(plan: Plan, usages: Mapping[str, Usage], unit: str, now: int) -> float:
    """Tell how much is used each second at present."""
    tiers = [tier for tier in plan.tiers if tier.unit == unit and tier.name in usages]
    tier = next((tier for tier in tiers if tier.period == "hour"), tiers[0])
    start, end = window(plan, tier, now)
    passed = now - start if plan.strategy == "fixed" else end - start
    return usages[tier.name].used * SECOND / max(passed, SECOND)


def runs_out(plan: Plan, tier: Tier, usage: Usage, pace: float, now: int) -> float | None:
    """Tell in how many seconds a tier is used up, at this pace; None: not before it is reset."""
    if not usage.remaining:
        return 0.0
    start, end = window(plan, tier, now)
    if plan.strategy == "fixed":
        growth, lasts = pace, (end - now) / SECOND
    else:
        lasts = (end - start) / SECOND
        growth = pace - usage.used / lasts
    if growth <= 0:
        return None
    seconds = usage.remaining / growth
    return seconds if seconds < lasts else None


def window(plan: Plan, tier: Tier, now: int) -> tuple[int, int]:
    """Give the window of a tier around or before an instant, in microseconds."""
    if plan.strategy == "fixed":
        return Calendar(tier.period, plan.timezone).window(now)
    return now - parse_period(ROLLING[tier.period]), now
