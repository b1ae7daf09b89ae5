"""Calendar windows: daylight saving, leap years, ISO weeks, reset days; and that windows partition time."""

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tidegate import ConfigError, Limit
from tidegate.core import calendar_bounds
from tidegate.core._calendar import PERIODS, Calendar

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
ZONES = (
    "UTC", "Europe/Berlin", "America/New_York", "America/Sao_Paulo", "Australia/Lord_Howe", "Asia/Kolkata",
    "Asia/Kathmandu", "Pacific/Apia", "Antarctica/Troll", "America/Caracas", "Asia/Pyongyang", "Africa/Cairo",
    "Pacific/Kiritimati", "America/Scoresbysund", "Asia/Gaza",
)  # fmt: skip


def micros(instant):
    return (instant - EPOCH) // timedelta(microseconds=1)


def at(zone, *fields):
    return datetime(*fields).replace(tzinfo=ZoneInfo(zone))  # noqa: DTZ001 - it gets one


@cases(
    ("zone", "day", "hours"),
    [
        ("Europe/Berlin", (2025, 3, 30), 23),
        ("Europe/Berlin", (2025, 10, 26), 25),
        ("Europe/Berlin", (2025, 6, 1), 24),
        ("America/New_York", (2025, 3, 9), 23),
        ("America/New_York", (2025, 11, 2), 25),
        ("America/Sao_Paulo", (2018, 11, 4), 23),  # midnight itself was skipped
        ("America/Sao_Paulo", (2018, 2, 17), 25),
        ("Australia/Lord_Howe", (2025, 10, 5), 23.5),
        ("Australia/Lord_Howe", (2025, 4, 6), 24.5),
        ("Asia/Kolkata", (2025, 3, 30), 24),
        ("Antarctica/Troll", (2025, 3, 30), 22),
    ],
)
def test_days_with_a_clock_change_have_23_or_25_hours(zone, day, hours):
    noon = at(zone, *day, 12)
    start, end = calendar_bounds("day", noon, zone)
    assert micros(end) - micros(start) == hours * 3600 * 10**6
    assert start <= noon < end
    assert end.date() == date(*day) + timedelta(days=1)
    before = calendar_bounds("day", micros(start) - 1, zone)
    after = calendar_bounds("day", end, zone)
    assert micros(before[1]) == micros(start)
    assert micros(after[0]) == micros(end)


def test_a_skipped_midnight_is_the_instant_of_the_skip():
    start, _ = calendar_bounds("day", at("America/Sao_Paulo", 2018, 11, 4, 12), "America/Sao_Paulo")
    assert start.astimezone(UTC) == datetime(2018, 11, 4, 3, tzinfo=UTC)
    assert start.isoformat() == "2018-11-04T01:00:00-02:00"


def test_a_day_that_a_zone_skips_has_no_window():
    last = at("Pacific/Apia", 2011, 12, 29, 12)
    _, end = calendar_bounds("day", last, "Pacific/Apia")
    following, _ = calendar_bounds("day", end, "Pacific/Apia")
    assert micros(following) == micros(end)
    assert following.isoformat() == "2011-12-31T00:00:00+14:00"


@cases(
    ("period", "instant", "start", "end"),
    [
        ("year", (2024, 2, 29), (2024, 1, 1), (2025, 1, 1)),
        ("month", (2024, 2, 29), (2024, 2, 1), (2024, 3, 1)),
        ("month", (2023, 2, 28, 23, 59), (2023, 2, 1), (2023, 3, 1)),
        ("month", (2025, 12, 31), (2025, 12, 1), (2026, 1, 1)),
        ("week", (2024, 12, 31), (2024, 12, 30), (2025, 1, 6)),  # the first ISO week of 2025
        ("week", (2021, 1, 3), (2020, 12, 28), (2021, 1, 4)),  # the 53rd of 2020
        ("week", (2026, 1, 1), (2025, 12, 29), (2026, 1, 5)),
        ("week", (2025, 6, 15), (2025, 6, 9), (2025, 6, 16)),  # Sunday is the last day
        ("day", (2024, 2, 29, 5), (2024, 2, 29), (2024, 3, 1)),
        ("hour", (2025, 1, 1, 0, 59, 59), (2025, 1, 1, 0), (2025, 1, 1, 1)),
        ("minute", (2025, 1, 1, 0, 59, 59), (2025, 1, 1, 0, 59), (2025, 1, 1, 1)),
    ],
)
def test_periods_in_utc(period, instant, start, end):
    found = calendar_bounds(period, at("UTC", *instant))
    assert found == (at("UTC", *start), at("UTC", *end))


@pytest.mark.parametrize(
    ("instant", "options", "start", "end"),
    [
        # The 31st is the last day of a shorter month.
        ((2025, 2, 27, 23), {"reset_day": 31}, (2025, 1, 31), (2025, 2, 28)),
        ((2025, 2, 28), {"reset_day": 31}, (2025, 2, 28), (2025, 3, 31)),
        ((2024, 2, 29), {"reset_day": 31}, (2024, 2, 29), (2024, 3, 31)),
        ((2025, 4, 30, 12), {"reset_day": 31}, (2025, 4, 30), (2025, 5, 31)),
        ((2025, 1, 14), {"reset_day": 15}, (2024, 12, 15), (2025, 1, 15)),
        ((2025, 1, 15, 8, 59), {"reset_day": 15, "reset_hour": 9}, (2024, 12, 15, 9), (2025, 1, 15, 9)),
        ((2025, 1, 15, 9), {"reset_day": 15, "reset_hour": 9}, (2025, 1, 15, 9), (2025, 2, 15, 9)),
    ],
)
def test_months_with_a_reset_day(instant, options, start, end):
    found = calendar_bounds("month", at("Europe/Berlin", *instant), "Europe/Berlin", **options)
    assert found == (at("Europe/Berlin", *start), at("Europe/Berlin", *end))


def test_other_periods_with_a_reset_day_and_hour():
    berlin = "Europe/Berlin"
    assert calendar_bounds("day", at(berlin, 2025, 5, 1, 3), berlin, reset_hour=4)[1] == at(berlin, 2025, 5, 1, 4)
    week = calendar_bounds("week", at(berlin, 2025, 6, 15), berlin, reset_day=3, reset_hour=12)
    assert week == (at(berlin, 2025, 6, 11, 12), at(berlin, 2025, 6, 18, 12))
    year = calendar_bounds("year", at(berlin, 2025, 1, 9), berlin, reset_day=10)
    assert year == (at(berlin, 2024, 1, 10), at(berlin, 2025, 1, 10))


@pytest.mark.parametrize("hour", [2, 3])
def test_a_reset_hour_that_is_skipped_or_repeated(hour):
    """In Berlin 2:00 does not exist on March 30th, 2025, and occurs twice on October 26th."""
    spring = calendar_bounds("day", at("Europe/Berlin", 2025, 3, 30, 12), "Europe/Berlin", reset_hour=hour)
    assert spring[0].astimezone(UTC) == datetime(2025, 3, 30, 1, tzinfo=UTC)
    autumn = calendar_bounds("day", at("Europe/Berlin", 2025, 10, 26, 12), "Europe/Berlin", reset_hour=hour)
    assert autumn[0].astimezone(UTC).hour == {2: 0, 3: 2}[hour]


def test_hours_of_a_zone_that_shifts_by_half_an_hour_do_not_overlap():
    zone = "Australia/Lord_Howe"
    now = micros(at(zone, 2025, 4, 5, 20))
    kind = Calendar("hour", zone)
    for _ in range(12):
        start, end = kind.window(now)
        assert start <= now < end
        assert end - start == 3600 * 10**6
        assert kind.window(end)[0] == end
        now = end


instants = st.integers(micros(at("UTC", 1975, 1, 1)), micros(at("UTC", 2090, 1, 1)))


@st.composite
def kinds(draw):
    period = draw(st.sampled_from(PERIODS))
    day = draw(st.integers(1, {"week": 7, "month": 31, "year": 31}.get(period, 1)))
    hour = draw(st.integers(0, 0 if period in ("minute", "hour") else 23))
    return Calendar(period, draw(st.sampled_from(ZONES)), day, hour)


@given(kind=kinds(), now=instants, inside=st.fractions(0, 1))
def test_windows_partition_time(kind, now, inside):
    """Every instant lies in exactly one window: it starts where another ends, and all its instants return it."""
    start, end = kind.window(now)
    assert start <= now < end
    assert kind.window(start) == kind.window(end - 1) == kind.window(start + int((end - 1 - start) * inside))
    assert kind.window(start) == (start, end)
    assert kind.window(end)[0] == end
    assert kind.window(start - 1)[1] == start


@given(zone=st.sampled_from(ZONES), period=st.sampled_from(["day", "month", "year"]), now=instants)
def test_windows_contain_exactly_the_instants_of_their_local_date(zone, period, now):
    """Independent check: the window contains exactly the instants with the same local date."""
    fields = {"year": 1, "month": 2, "day": 3}[period]

    def local(instant):
        return (EPOCH + timedelta(microseconds=instant)).astimezone(ZoneInfo(zone)).timetuple()[:fields]

    start, end = Calendar(period, zone).window(now)
    assert local(start) == local(now) == local(end - 1)
    assert local(start - 1) != local(now) != local(end)


@cases("year", [2007, 2015, 2016, 2018])
@cases("zone", ["America/Caracas", "Asia/Pyongyang"])
def test_hours_do_not_overlap_at_a_new_year_after_a_half_hour_change(zone, year):
    """Found by reading: hours overlapped at the end of a year in which the zone had shifted by 30 minutes."""
    now = micros(datetime(year, 12, 31, 0, tzinfo=UTC))
    kind = Calendar("hour", zone)
    for _ in range(60):
        start, end = kind.window(now)
        assert kind.window(end)[0] == end
        assert kind.window(end - 1) == (start, end)
        now = end


def test_instants_may_be_datetimes_seconds_or_microseconds():
    aware = datetime(2025, 6, 15, 12, tzinfo=UTC)
    expected = calendar_bounds("day", aware)
    assert expected == (datetime(2025, 6, 15, tzinfo=UTC), datetime(2025, 6, 16, tzinfo=UTC))
    assert calendar_bounds("day", aware.timestamp()) == expected
    assert calendar_bounds("day", micros(aware)) == expected
    assert calendar_bounds("day", aware.astimezone(ZoneInfo("Asia/Tokyo"))) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("decade", 0), "period: unknown calendar period 'decade': use one of minute, hour, day, week, month, year"),
        (("day", datetime(2025, 1, 1)),  # noqa: DTZ001 - that it is refused is the test
         "instant: must be an aware datetime: set its tzinfo"),
        (("day", 0, "Mars/Olympus"), "timezone: unknown time zone 'Mars/Olympus': use an IANA name such as 'UTC' or 'Europe/Berlin'"),  # noqa: E501 - one message
        (("day", 0, "../../etc/passwd"), "timezone: unknown time zone '../../etc/passwd': use an IANA name such as 'UTC' or 'Europe/Berlin'"),  # noqa: E501 - one message
    ],
)  # fmt: skip
def test_invalid_arguments_of_calendar_bounds_are_rejected(arguments, message):
    with pytest.raises(ConfigError) as error:
        calendar_bounds(*arguments)
    assert str(error.value) == message


def test_a_limit_counts_by_its_calendar():
    limit = Limit(2, "day", "calendar_window", timezone="Europe/Berlin")
    evening = micros(at("Europe/Berlin", 2025, 10, 25, 23))
    state = limit.charge(None, limit, 2, evening)
    assert limit.rules.view(state, limit, 1, evening)[1:] == (3600 * 10**6, 3600 * 10**6)
    midnight = evening + 3600 * 10**6
    state = limit.charge(state, limit, 2, midnight)
    assert limit.rules.view(state, limit, 1, midnight)[1] == 25 * 3600 * 10**6
    assert limit.rules.expires(state) == midnight + 25 * 3600 * 10**6
