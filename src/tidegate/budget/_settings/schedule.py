"""Rules that change the quotas of tiers by time of day, by weekday and by load."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Final

from tidegate.core._calendar import find_zone
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from fractions import Fraction

WEEKDAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
BETWEEN: Final = re.compile(r"\s*([01]?\d|2[0-3]):([0-5]\d)\s*-\s*([01]?\d|2[0-4]):([0-5]\d)\s*")
DAY_MINUTES: Final = 24 * 60


@dataclass(frozen=True)
class ScheduleRule:
    """Quotas that apply at certain times, above a certain load, or both: given by tier, or as a scale of all quotas.

    `between` is local time, such as 22:00-06:00 (a span over midnight belongs to the day it starts on); `days` are
    weekdays. `load_above` is compared with the result of the budget's `load` function.
    """

    name: str
    between: tuple[int, int] = (0, DAY_MINUTES)  # minutes of the day
    days: frozenset[int] = frozenset(range(7))  # 0 is Monday
    load_above: float | None = None
    scale: Fraction | None = None
    limits: Mapping[str, int] = field(default_factory=dict)

    def applies(self, now: int, zone: str, load: float) -> bool:
        """Return whether the rule applies at an instant (microseconds), at this load."""
        if self.load_above is not None and not load > self.load_above:
            return False
        local = datetime.fromtimestamp(now / 1_000_000, find_zone(zone))
        minute, day = local.hour * 60 + local.minute, local.weekday()
        start, end = self.between
        if start < end:
            return start <= minute < end and day in self.days
        return (minute >= start and day in self.days) or (minute < end and (day - 1) % 7 in self.days)

    def change(self, quotas: dict[str, int]) -> None:
        """Change quotas by tier in place: scale all of them (at least 1 remains), then set those of `limits`."""
        if self.scale is not None:
            for name, quota in quotas.items():
                quotas[name] = max(1, int(quota * self.scale))
        quotas.update(self.limits)


def read_between(text: str) -> tuple[int, int]:
    """Read a time span of the day, such as 22:00-06:00."""
    match = BETWEEN.fullmatch(text)
    if match is None:
        raise ConfigError(f"expected a time span such as 22:00-06:00, not {text!r}", field="between")
    start, end = int(match[1]) * 60 + int(match[2]), int(match[3]) * 60 + int(match[4])
    if end > DAY_MINUTES or start == end:
        message = f"expected a time span that ends at 24:00 or before and is not empty, not {text!r}"
        raise ConfigError(message, field="between")
    return start, end


def read_days(text: str) -> frozenset[int]:
    """Read weekdays such as `mon-fri` or `sat,sun`."""
    found: set[int] = set()
    for part in text.lower().split(","):
        first, _, last = (word.strip()[:3] for word in part.partition("-"))
        if first not in WEEKDAYS or (last and last not in WEEKDAYS):
            raise ConfigError(f"expected weekdays such as mon-fri or sat,sun, not {text!r}", field="days")
        begin, end = WEEKDAYS.index(first), WEEKDAYS.index(last or first)
        found.update(day % 7 for day in range(begin, (end if end >= begin else end + 7) + 1))
    return frozenset(found)
