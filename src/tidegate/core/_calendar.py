"""Start and end of calendar windows: minutes to years, in a time zone, with daylight saving.

A window is named by its period (`minute` `hour` `day` `week` `month` `year`) and starts at the zone's local reset time:
by default midnight, Monday (ISO weeks), the 1st, January 1st. A day with a daylight-saving change has 23 or 25 hours.
Every instant is in exactly one window.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from tidegate.core._bounds import SECOND
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

PERIODS = ("minute", "hour", "day", "week", "month", "year")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


class Calendar(NamedTuple):
    """A kind of calendar window: its period, its zone, and the day and hour at which it resets.

    `day` counts from 1: the ISO weekday of a week (1 is Monday), the day of a month (31 means the last day of a
    shorter month) or of a year's January. `hour` is local time.
    """

    period: str
    zone: str = "UTC"
    day: int = 1
    hour: int = 0

    def window(self, now: int) -> tuple[int, int]:
        """Return the window around `now` in microseconds: start, and end (exclusive)."""
        start, end = _recent(self, now // (60 * SECOND))
        return (start, end) if start <= now < end else _bounds(self, now)


@lru_cache(maxsize=1024)
def _recent(kind: Calendar, minute: int) -> tuple[int, int]:
    """Cache windows by minute: every boundary lies on a full minute, so a minute lies in one window."""
    return _bounds(kind, minute * 60 * SECOND)


def _bounds(kind: Calendar, now: int) -> tuple[int, int]:
    zone = find_zone(kind.zone)
    local = (EPOCH + now * MICROSECOND).astimezone(zone)
    if kind.period in ("minute", "hour"):
        # Minutes and hours always last 60 s and 3600 s. They are counted from the local new year, because a zone that
        # shifts by half an hour would otherwise have overlapping hours. If the shift is permanent, the last hour of
        # that year is shorter.
        length = (60 if kind.period == "minute" else 3600) * SECOND
        new_year, next_year = (_instant(kind, date(year, 1, 1), zone) for year in (local.year, local.year + 1))
        start = now - (now - new_year) % length
        return start, min(start + length, next_year)
    first = _first_day(kind, local.date())
    while _instant(kind, first, zone) > now:
        first = _step(kind, first, -1)
    while (end := _instant(kind, following := _step(kind, first, 1), zone)) <= now:
        first = following
    return _instant(kind, first, zone), end


def _first_day(kind: Calendar, day: date) -> date:
    """Return the reset day of the calendar period that contains `day`."""
    if kind.period == "day":
        return day
    if kind.period == "week":
        return day - timedelta(days=day.isoweekday() - kind.day)
    return _in_month(day.year, 1 if kind.period == "year" else day.month, kind.day)


def _step(kind: Calendar, first: date, steps: int) -> date:
    """Move a reset day by a number of periods."""
    if kind.period in ("day", "week"):
        return first + steps * timedelta(days=1 if kind.period == "day" else 7)
    months = first.year * 12 + first.month - 1 + steps * (12 if kind.period == "year" else 1)
    return _in_month(months // 12, months % 12 + 1, kind.day)


def _in_month(year: int, month: int, day: int) -> date:
    from calendar import monthrange  # noqa: PLC0415 - most limits have no calendar, and it is slow to import

    return date(year, month, min(day, monthrange(year, month)[1]))


def _instant(kind: Calendar, day: date, zone: ZoneInfo | timezone) -> int:
    """Convert the local reset time to microseconds; a skipped local time means the instant of the skip."""
    local = datetime(day.year, day.month, day.day, kind.hour, tzinfo=zone)
    return (local.astimezone(UTC) - EPOCH) // MICROSECOND


@lru_cache(maxsize=256)
def find_zone(name: str) -> ZoneInfo | timezone:
    """Return the time zone with an IANA name."""
    if name == "UTC":
        return UTC
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError  # noqa: PLC0415 - most limits have no zone

    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError, TypeError):
        message = f"unknown time zone {name!r}: use an IANA name such as 'UTC' or 'Europe/Berlin'"
        raise ConfigError(message, field="timezone") from None


def calendar_bounds(
    period: str, instant: datetime | float, timezone: str = "UTC", *, reset_day: int = 1, reset_hour: int = 0
) -> tuple[datetime, datetime]:
    """Return the calendar window around an instant as aware datetimes in its zone; the end is exclusive.

    The instant is an aware datetime or a time since 1970. Numbers below 10**11 are seconds; larger ones are
    microseconds, as everywhere in the core.
    """
    if period not in PERIODS:
        raise ConfigError(f"unknown calendar period {period!r}: use one of {', '.join(PERIODS)}", field="period")
    if isinstance(instant, datetime):
        if instant.tzinfo is None:
            raise ConfigError("must be an aware datetime: set its tzinfo", field="instant")
        now = (instant - EPOCH) // MICROSECOND
    else:
        now = int(instant) if abs(instant) >= 10**11 else int(instant * SECOND)
    zone = find_zone(timezone)
    start, end = Calendar(period, timezone, reset_day, reset_hour).window(now)
    return (EPOCH + start * MICROSECOND).astimezone(zone), (EPOCH + end * MICROSECOND).astimezone(zone)
