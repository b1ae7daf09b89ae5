"""The numbers of a limit, at the last values that are accepted and the first that are refused."""

import pytest

from tests.cases import cases
from tidegate import ConfigError, Limit
from tidegate.core import parse_period
from tidegate.core._bounds import MAX_DURATION, MAX_INTEGER, ceil_div

DAY = 86_400_000_000
NOT_A_PERIOD = "period: expected a string such as '30s', a timedelta or a number of seconds, not {}"
TOO_LONG = "period: expected a period from 1 microsecond to 142 years, not {} seconds"


@pytest.mark.parametrize(
    ("period", "message"),
    [
        (MAX_DURATION, NOT_A_PERIOD),
        (-MAX_DURATION, NOT_A_PERIOD),
        (MAX_DURATION - 1, TOO_LONG),
        (MAX_DURATION // 10**6 + 1, TOO_LONG),
        (0, TOO_LONG),
        (-1, TOO_LONG),
    ],
)
def test_numbers_of_seconds_that_are_refused(period, message):
    with pytest.raises(ConfigError) as error:
        parse_period(period)
    assert str(error.value) == message.format(period)


def test_the_shortest_and_the_longest_period():
    assert parse_period("1us") == 1
    assert parse_period(f"{MAX_DURATION}us") == MAX_DURATION
    assert parse_period(MAX_DURATION // 10**6) == MAX_DURATION // 10**6 * 10**6
    for text in ("0us", f"{MAX_DURATION + 1}us"):
        with pytest.raises(ConfigError):
            parse_period(text)


@cases(
    ("quota", "length", "tick"),
    [
        (9_007_199_254, 2 * 10**6, 2),  # exactly a millionth of the period
        (9_007_199_255, 2 * 10**6, None),
        (9_007_199_254, 3 * 10**6, 3),
        (4_503_599_627, 2 * 10**6, 1),
        (4_503_599_628, 2 * 10**6, 2),
        (8_000_000_000, 1_500_000, None),  # two microseconds would be more than a millionth
        (6_000_000_000, 1_500_000, 1),
        (MAX_INTEGER, 1, 1),
        (MAX_INTEGER, 2, None),
        (1, 2**51, 1),
        (1, 2**51 + 1, None),
    ],
)
def test_ticks_of_sliding_windows(quota, length, tick):
    if tick is None:
        with pytest.raises(ConfigError):
            Limit(quota, f"{length}us", "sliding_window")
    else:
        assert Limit(quota, f"{length}us", "sliding_window").tick == tick == ceil_div(quota * length, MAX_INTEGER)


@pytest.mark.parametrize(
    ("quota", "length", "burst"), [(10, 10**7, 10), (1, 1, 5), (MAX_INTEGER, 1, 7), (1, 1, 2**52), (2, 3, 4)]
)
def test_the_floor_of_a_bucket(quota, length, burst):
    limit = Limit(quota, f"{length}us", burst=burst)
    assert limit.capacity == burst * limit.scale
    assert limit.capacity - limit.floor == min(MAX_INTEGER, limit.rate * 2**52)


def test_a_bucket_fills_within_the_longest_duration():
    assert Limit(1, "1us", burst=MAX_DURATION).capacity == MAX_DURATION
    with pytest.raises(ConfigError):
        Limit(1, "1us", burst=MAX_DURATION + 1)
    assert Limit(2, f"{2**52}us", burst=2).capacity == 2**52
    with pytest.raises(ConfigError):
        Limit(2, f"{2**52}us", burst=3)  # 2**52 + 2**51 microseconds


@pytest.mark.parametrize(
    ("period", "days", "hours", "length"),
    [
        ("minute", 1, 0, DAY // 1440),
        ("hour", 1, 0, DAY // 24),
        ("day", 1, 23, DAY),
        ("week", 7, 23, 7 * DAY),
        ("month", 31, 23, 31 * DAY),
        ("year", 31, 23, 366 * DAY),
    ],
)
def test_resets_of_calendar_windows(period, days, hours, length):
    limit = Limit(1, period, "calendar_window", reset_day=days, reset_hour=hours)
    assert limit.length == length
    assert limit.calendar == (period, "UTC", days, hours)
    for options in ({"reset_day": days + 1}, {"reset_day": 0}, {"reset_hour": hours + 1}, {"reset_hour": -1}):
        with pytest.raises(ConfigError):
            Limit(1, period, "calendar_window", **options)


def test_what_only_calendar_windows_have_is_refused_elsewhere():
    for options in ({"reset_day": 2}, {"reset_hour": 1}, {"timezone": "Europe/Berlin"}):
        with pytest.raises(ConfigError):
            Limit(1, "1h", **options)


def test_a_hundred_decimals_are_read_and_no_more():
    assert parse_period("1." + "0" * 100 + "s") == 10**6
    with pytest.raises(ConfigError):
        parse_period("1." + "0" * 101 + "s")


@cases(("text", "length"), [("1.0", 10**6), ("12.0", 12 * 10**6), ("00012.5", 12_500_000), ("0.5", 500_000)])
@cases("decimals", [1, 50, 97, 98, 99])
def test_further_decimals_do_not_change_a_period(text, length, decimals):
    """Found by a mutant: of more than a hundred digits the last were cut off, and 12.000…s became 1.2 s."""
    assert parse_period(text + "0" * decimals + "s") == length


def test_short_names_of_calendar_periods():
    names = {"1m": "minute", "1h": "hour", "1d": "day", "1w": "week", "1y": "year"}
    assert {text: Limit(1, text, "calendar_window").period for text in names} == names


@cases("text", ["1/1h", "7/1m", "5_000_000/1s", "3_000_000_007/1s", "90_000/1m burst=120_000", "1/142d"])
def test_a_bucket_adds_what_it_refills_only_as_long_as_that_fits(text):
    limit = Limit.parse(text)
    assert limit.capacity + limit.max_elapsed * limit.rate <= MAX_INTEGER
    assert limit.capacity + (limit.max_elapsed + 1) * limit.rate > MAX_INTEGER
