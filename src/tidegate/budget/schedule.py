"""Limits by time of day and by load: rules that change the quotas of tiers while they apply."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Final

from tidegate.core.calendar import find_zone
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from fractions import Fraction

DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
BETWEEN: Final = re.compile(r"\s*([01]?\d|2[0-3]):([0-5]\d)\s*-\s*([01]?\d|2[0-4]):([0-5]\d)\s*")
FULL_DAY: Final = 24 * 60


@dataclass(frozen=True)
class Rule:
    """Quotas that hold at certain times, or under load, or both: given by tier, or as a scale of all of them.

    `between` is local time, such as 22:00-06:00 (a span over midnight belongs to the day it begins); `days` are those
    of `mon` to `sun`. `load_above` is compared with what the budget's `load` function tells.
    """

    name: str
    between: tuple[int, int] = (0, FULL_DAY)  # minutes of the day
    days: frozenset[int] = frozenset(range(7))  # 0 is Monday
    load_above: float | None = None
    scale: Fraction | None = None
    limits: Mapping[str, int] = field(default_factory=dict)

    def applies(self, now: int, zone: str, load: float) -> bool:
        """Tell whether the rule holds at an instant (microseconds), at this load."""
        if self.load_above is not None and not load > self.load_above:
            return False
        local = datetime.fromtimestamp(now / 1_000_000, find_zone(zone))
        minute, day = local.hour * 60 + local.minute, local.weekday()
        start, end = self.between
        if start < end:
            return start <= minute < end and day in self.days
        return (minute >= start and day in self.days) or (minute < end and (day - 1) % 7 in self.days)

    def change(self, quotas: dict[str, int]) -> None:
        """Change the quotas: what is named to what is said, or all by the scale, at least 1."""
        if self.scale is not None:
            for name, quota in quotas.items():
                quotas[name] = max(1, int(quota * self.scale))
        quotas.update(self.limits)


def read_between(text: str) -> tuple[int, int]:
    """Read a span of the day, such as 22:00-06:00."""
    match = BETWEEN.fullmatch(text)
    if match is None:
        raise ConfigError(f"expected a span of the day such as 22:00-06:00, not {text!r}", field="between")
    start, end = int(match[1]) * 60 + int(match[2]), int(match[3]) * 60 + int(match[4])
    if end > FULL_DAY or start == end:
        raise ConfigError(f"{text!r} is no span of a day: it ends by 24:00, and not where it begins", field="between")
    return start, end


def read_days(text: str) -> frozenset[int]:
    """Read days such as `mon-fri`, `sat,sun`."""
    found: set[int] = set()
    for part in text.lower().split(","):
        first, _, last = (word.strip()[:3] for word in part.partition("-"))
        if first not in DAYS or (last and last not in DAYS):
            raise ConfigError(f"expected days such as mon-fri or sat,sun, not {text!r}", field="days")
        begin, end = DAYS.index(first), DAYS.index(last or first)
        found.update(day % 7 for day in range(begin, (end if end >= begin else end + 7) + 1))
    return frozenset(found)
