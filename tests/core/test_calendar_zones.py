"""Calendar windows where minutes, zones and machines are unusual."""

import time
from datetime import UTC, datetime

import pytest

from tests.core.oracle import CalendarWindow
from tidegate import Limit
from tidegate.core import calendar_bounds
from tidegate.core._calendar import Calendar, find_zone

SECOND = 1_000_000


def instant(*fields):
    return int(datetime(*fields, tzinfo=UTC).timestamp()) * SECOND


@pytest.mark.parametrize("period", ["day", "week", "month", "year"])
def test_windows_that_begin_within_a_minute(period):
    """Until 1972, clocks in Liberia were 44 minutes and 30 seconds behind UTC."""
    limit = Limit(1, period, "calendar_window", timezone="Africa/Monrovia")
    local = CalendarWindow(limit).period
    boundary = limit.calendar.window(instant(1971, 6, 15))[1]
    assert boundary % (60 * SECOND) == 30 * SECOND
    # One side of the boundary after the other, so that what is remembered of the minute is that of the other side.
    for now in (boundary, boundary - 1, boundary + 1, boundary - 30 * SECOND, boundary + 30 * SECOND - 1):
        start, end = limit.calendar.window(now)
        assert start <= now < end
        assert local(start) == local(now) == local(end - 1)
        assert local(start - 1) != local(now) != local(end)


@pytest.mark.parametrize(("zone", "year"), [("Asia/Tokyo", 2031), ("America/St_Johns", 2032)])
def test_windows_do_not_depend_on_the_time_zone_of_the_machine(monkeypatch, zone, year):
    noon, hours = instant(year, 5, 5, 12), 3600 * SECOND  # of years that no other test asks for: windows are remembered
    try:
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        find_zone.cache_clear()
        assert Calendar("day").window(noon) == (noon - 12 * hours, noon + 12 * hours)
        assert Calendar("month").window(noon) == (instant(year, 5, 1), instant(year, 6, 1))
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(("number", "year"), [(10**11, 1970), (10**11 - 1, 5138), (-(10**11), 1969), (0, 1970)])
def test_numbers_below_a_hundred_billion_are_seconds(number, year):
    assert calendar_bounds("year", number)[0].year == year


@pytest.mark.parametrize("zone", ["Asia/Kathmandu", "Pacific/Chatham", "Asia/Kolkata", "UTC"])
def test_hours_of_zones_beside_the_whole_hour(zone):
    limit = Limit(1, "hour", "calendar_window", timezone=zone)
    local = CalendarWindow(limit).period
    for now in (instant(2025, 6, 15, 12), instant(2025, 6, 15, 12, 14, 59), instant(2025, 6, 15, 12, 15)):
        start, end = limit.calendar.window(now)
        assert end - start == 3600 * SECOND
        assert local(start) == local(now) == local(end - 1)
        assert local(start - 1) != local(now) != local(end)
