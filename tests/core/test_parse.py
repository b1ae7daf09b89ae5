"""How limits and periods are parsed: what is accepted, what is refused, and the position in the error message."""

import copy
import pickle
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tests.core.strategies import NAMES, limits
from tidegate import ConfigError, Limit
from tidegate.core import parse_period
from tidegate.core._calendar import PERIODS

SECOND = 1_000_000
MINUTE, HOUR, DAY, WEEK = 60 * SECOND, 3600 * SECOND, 86_400 * SECOND, 604_800 * SECOND


@cases(("text", "micros"), [
        ("250ms", 250_000), ("30s", 30 * SECOND), ("5m", 5 * MINUTE), ("1h", HOUR), ("1d", DAY), ("1w", WEEK),
        ("1us", 1), ("1µs", 1), ("7microseconds", 7), ("1 millisecond", 1000), ("second", SECOND), ("sec", SECOND),
        ("10 secs", 10 * SECOND), ("minute", MINUTE), ("2 minutes", 2 * MINUTE), ("min", MINUTE), ("hour", HOUR),
        ("3hrs", 3 * HOUR), ("day", DAY), ("7 days", 7 * DAY), ("week", WEEK), ("2 weeks", 2 * WEEK),
        ("1.5h", 5400 * SECOND), ("0.001ms", 1), ("1_000ms", SECOND), (" 5m ", 5 * MINUTE), ("5 M".lower(), 5 * MINUTE),
        ("1H", HOUR), ("5 MIN", 5 * MINUTE), ("10S", 10 * SECOND), ("00030s", 30 * SECOND), ("1.50s", 1_500_000),
        (30, 30 * SECOND), (0.25, 250_000), (1e-6, 1), (timedelta(minutes=5), 5 * MINUTE),
        (timedelta(microseconds=1), 1), ("4503599627370496us", 2**52),
    ])  # fmt: skip
def test_periods(text, micros):
    assert parse_period(text) == micros


BETWEEN = "expected a period from 1 microsecond to 142 years, not"
MULTIPLE = "expected a multiple of 1 microsecond, not"
EXPECTED = "expected a period such as '30s', '5m', '1h', '1d' or '250ms'"


@cases(("period", "message"), [
        ("", f"period: {EXPECTED} (at the end of '')"),
        ("5", f"period: {EXPECTED} (at the end of '5')"),
        ("m5", f"period: {EXPECTED} (at column 1 of 'm5')"),
        ("-5s", f"period: {EXPECTED} (at column 1 of '-5s')"),
        ("5s3", f"period: {EXPECTED} (at column 3 of '5s3')"),
        ("1h 30m", f"period: {EXPECTED} (at column 4 of '1h 30m')"),
        ("5x", "period: unknown unit of time 'x': use ms, s, m, h, d or w (at column 2 of '5x')"),
        ("5M", "period: unknown unit of time 'M': use ms, s, m, h, d or w (at column 2 of '5M')"),
        ("2 moons", "period: unknown unit of time 'moons': use ms, s, m, h, d or w (at column 3 of '2 moons')"),
        ("month", ("period: a month has no fixed length: use '30d', or 'month' with the algorithm calendar_window "
         "(at column 1 of 'month')")),
        ("2 years", ("period: a year has no fixed length: use '30d', or 'year' with the algorithm calendar_window "
         "(at column 3 of '2 years')")),
        ("0s", f"period: {BETWEEN} '0s'"),
        ("0.5us", f"period: {MULTIPLE} '0.5us'"),
        ("1.0000001s", f"period: {MULTIPLE} '1.0000001s'"),
        ("4503599627370497us", f"period: {BETWEEN} '4503599627370497us'"),
        ("1000000w", f"period: {BETWEEN} '1000000w'"),
        (0, f"period: {BETWEEN} 0 seconds"),
        (-1, f"period: {BETWEEN} -1 seconds"),
        (1e-7, f"period: {BETWEEN} 1e-07 seconds"),
        (timedelta(0), f"period: {BETWEEN} datetime.timedelta(0)"),
        (True, "period: expected a string such as '30s', a timedelta or a number of seconds, not True"),
        (None, "period: expected a string such as '30s', a timedelta or a number of seconds, not None"),
        (float("nan"), "period: expected a string such as '30s', a timedelta or a number of seconds, not nan"),
        (float("inf"), "period: expected a string such as '30s', a timedelta or a number of seconds, not inf"),
    ])  # fmt: skip
def test_invalid_periods_are_rejected(period, message):
    with pytest.raises(ConfigError) as error:
        parse_period(period)
    assert str(error.value) == message
    assert error.value.field == "period"


@pytest.mark.parametrize("text", ["9" * 5000 + "s", "0." + "1" * 5000 + "s"])
def test_very_long_periods_are_rejected(text):
    """Found by reading: Python parses no integer of more than 4,300 digits, and raised a plain ValueError."""
    with pytest.raises(ConfigError, match=f"{BETWEEN}|{MULTIPLE}"):
        parse_period(text)


@cases(("text", "limit"), [
        ("60/1m", Limit(60, "1m")),
        ("60 / 1m", Limit(60, "1m")),
        ("  60/1m  ", Limit(60, "1m")),
        ("100/hour", Limit(100, "1h")),
        ("5 per 30s", Limit(5, "30s")),
        ("5 every 30s", Limit(5, "30s")),
        ("5 in 30 s", Limit(5, "30s")),
        ("10 requests per second", Limit(10, "1s")),
        ("10 calls/s", Limit(10, "1s")),
        ("1 hit / 250ms", Limit(1, "250ms")),
        ("90_000 tokens/1m", Limit(90_000, "1m", unit="tokens")),
        ("90_000 tokens per minute burst=120_000 name=x", Limit(90_000, "1m", unit="tokens", burst=120_000, name="x")),
        ("500/1d sliding_log", Limit(500, "1d", "sliding_log")),
        ("7500/month calendar_window", Limit(7500, "month", "calendar_window")),
        ("7500/month", Limit(7500, "month", "calendar_window")),
        ("7500/month timezone=Europe/Berlin reset_day=15 reset_hour=9",
         Limit(7500, "month", "calendar_window", timezone="Europe/Berlin", reset_day=15, reset_hour=9)),
        ("5/1d calendar_window", Limit(5, "day", "calendar_window")),
        ("5/day", Limit(5, "day", "calendar_window")),
        ("5 per Week timezone=Europe/Berlin", Limit(5, "week", "calendar_window", timezone="Europe/Berlin")),
        ("5/1 day", Limit(5, "1d", "token_bucket")),
        ("5/24h sliding_log", Limit(5, "1d", "sliding_log")),
        ("5/minute", Limit(5, "1m", "token_bucket")),
        ("5/1h calendar_window", Limit(5, "hour", "calendar_window")),
        ("10 concurrent-requests/5m concurrency", Limit(10, "5m", "concurrency", unit="concurrent-requests")),
        ('5/1s name="two words" unit="a \\"b\\" \\\\"', Limit(5, "1s", name="two words", unit='a "b" \\')),
        ("0060/1m", Limit(60, "1m")),
    ])  # fmt: skip
def test_limits(text, limit):
    assert Limit.parse(text) == limit


LIMIT = "expected a limit such as '60/1m' or '5 per 30s'"
KNOWN = "token_bucket, fixed_window, calendar_window, sliding_window, sliding_log, concurrency"
OPTIONS = "expected unit=, name=, burst=, margin=, timezone=, reset_day= or reset_hour="


@cases(("text", "message"), [
        ("", f"{LIMIT} (at the end of '')"),
        ("sixty/1m", f"{LIMIT} (at column 1 of 'sixty/1m')"),
        ("60", f"{LIMIT} (at the end of '60')"),
        ("60/", f"{LIMIT} (at the end of '60/')"),
        ("60/5", f"{LIMIT} (at column 4 of '60/5')"),
        ("-60/1m", f"{LIMIT} (at column 1 of '-60/1m')"),
        ("60:1m", f"{LIMIT} (at column 3 of '60:1m')"),
        ("60.5/1m", f"{LIMIT} (at column 3 of '60.5/1m')"),
        ("60/1x", "unknown unit of time 'x': use ms, s, m, h, d or w (at column 5 of '60/1x')"),
        ("60/1.2.3m", f"{EXPECTED} (at column 7 of '60/1.2.3m')"),
        ("60/2 months", ("a month has no fixed length: use '30d', or 'month' with the algorithm calendar_window "
         "(at column 6 of '60/2 months')")),
        ("60/1m leaky", f"unknown algorithm 'leaky': use one of {KNOWN} (at column 7 of '60/1m leaky')"),
        ("60/1m fixed_window sliding_log", "duplicate algorithm (at column 20 of '60/1m fixed_window sliding_log')"),
        ("60/1m 5/1s", "expected one limit: write several limits as a list (at column 7 of '60/1m 5/1s')"),
        ("60/1m, 5/1s", ("expected one limit without a comma: write several limits as a list "
         "(at column 4 of '60/1m, 5/1s')")),
        ("60/1m burst=5 burst=6", "duplicate burst (at column 15 of '60/1m burst=5 burst=6')"),
        ("60 tokens/1m unit=x", "duplicate unit (at column 14 of '60 tokens/1m unit=x')"),
        ("60/1m burst=many", "burst must be an integer (at column 13 of '60/1m burst=many')"),
        ("60/1m burst=", "burst must be an integer (at the end of '60/1m burst=')"),
        ("60/1m burst=_", "burst must be an integer (at column 13 of '60/1m burst=_')"),
        ("60/1m name=", f"{OPTIONS} (at column 7 of '60/1m name=')"),
        ("60/1m colour=red", f"{OPTIONS} (at column 7 of '60/1m colour=red')"),
        ("0/1m", "quota: must be an integer from 1 to 2**53 - 1, not 0 (at column 1 of '0/1m')"),
        ("60/0s", f"period: {BETWEEN} '0s' (at column 4 of '60/0s')"),
        ("60/day sliding_log", ("period: a calendar day needs the algorithm calendar_window, not sliding_log; for a "
         "duration, use '1d' (at column 4 of '60/day sliding_log')")),
        ("60/month token_bucket", ("period: a calendar month needs the algorithm calendar_window, not token_bucket; "
         "for a duration, use '30d' (at column 4 of '60/month token_bucket')")),
        ("60/days", "period: expected 'day', a calendar day, or '1d', not 'days' (at column 4 of '60/days')"),
        ("60/2d calendar_window",
         ("period: must be minute, hour, day, week, month or year for a calendar_window, not '2d' "
         "(at column 4 of '60/2d calendar_window')")),
        ("60/1m timezone=Europe/Berlin", ("timezone: requires the algorithm calendar_window, like reset_day "
         "and reset_hour (at column 7 of '60/1m timezone=Europe/Berlin')")),
        ("60/day calendar_window timezone=Nowhere",
         ("timezone: unknown time zone 'Nowhere': use an IANA name such as 'UTC' or 'Europe/Berlin' "
         "(at column 24 of '60/day calendar_window timezone=Nowhere')")),
        ("60/day calendar_window reset_day=2",
         ("reset_day: must be 1 (the default) for a limit per day, not 2 "
         "(at column 24 of '60/day calendar_window reset_day=2')")),
        ("60/hour calendar_window reset_hour=2",
         ("reset_hour: must be 0 (the default) for a limit per hour, not 2 "
         "(at column 25 of '60/hour calendar_window reset_hour=2')")),
        ("60/week calendar_window reset_day=8",
         ("reset_day: must be from 1 to 7 for a limit per week, not 8 "
         "(at column 25 of '60/week calendar_window reset_day=8')")),
        ("60/1m sliding_log burst=5", ("burst: requires the algorithm token_bucket, not sliding_log "
         "(at column 19 of '60/1m sliding_log burst=5')")),
    ])  # fmt: skip
def test_invalid_limits_are_rejected(text, message):
    with pytest.raises(ConfigError) as error:
        Limit.parse(text)
    assert str(error.value) == message


def test_numbers_with_too_many_digits_are_rejected():
    for text in ("9" * 5000 + "/1m", "1/1m burst=" + "9" * 5000):
        with pytest.raises(ConfigError, match="must be an integer from 1 to"):
            Limit.parse(text)
    assert Limit.parse("1/1m burst=1__0").burst == 10


@cases(("arguments", "message"), [
        ({"algorithm": "leaky"}, f"algorithm: unknown algorithm 'leaky': use one of {KNOWN}"),
        ({"algorithm": "tokenbucket"},
         f"algorithm: unknown algorithm 'tokenbucket': use one of {KNOWN}; did you mean 'token_bucket'?"),
        ({"unit": ""}, "unit: must be a non-empty string such as 'requests' or 'tokens', not ''"),
        ({"unit": 5}, "unit: must be a non-empty string such as 'requests' or 'tokens', not 5"),
        ({"name": 5}, "name: must be a string, not 5"),
        ({"burst": -1}, "burst: must be an integer from 1 to 2**53 - 1, not -1"),
        ({"period": "day", "algorithm": "calendar_window", "timezone": None},
         "timezone: unknown time zone None: use an IANA name such as 'UTC' or 'Europe/Berlin'"),
        ({"period": 86_400, "algorithm": "calendar_window"},
         "period: must be minute, hour, day, week, month or year for a calendar_window, not 86400"),
        ({"period": "month", "algorithm": "calendar_window", "reset_day": 32},
         "reset_day: must be from 1 to 31 for a limit per month, not 32"),
        ({"period": "month", "algorithm": "calendar_window", "reset_hour": True},
         "reset_hour: must be from 0 to 23 for a limit per month, not True"),
    ])  # fmt: skip
def test_invalid_arguments_are_rejected(arguments, message):
    with pytest.raises(ConfigError) as error:
        Limit(**{"quota": 5, "period": "1m", **arguments})
    assert str(error.value) == message


@pytest.mark.parametrize("what", [None, 60, b"60/1m"])
def test_only_strings_are_parsed(what):
    with pytest.raises(ConfigError, match="expected a string such as '60/1m'"):
        Limit.parse(what)


words = st.text(min_size=1, max_size=12).filter(str.strip)


@given(limit=limits(), name=st.one_of(st.just(""), words), unit=st.one_of(st.just("requests"), words))
def test_str_of_a_limit_is_parsed_back(limit, name, unit):
    whole = Limit(
        limit.quota, limit.period, limit.algorithm, unit, limit.burst if limit.algorithm == "token_bucket" else 0, name,
        limit.timezone,
    )  # fmt: skip
    again = Limit.parse(str(whole))
    assert again == whole
    assert hash(again) == hash(whole)


@given(text=st.text(max_size=30))
def test_any_string_is_a_limit_or_a_config_error(text):
    for read in (Limit.parse, parse_period):
        try:
            read(text)
        except ConfigError:
            continue


@given(
    quota=st.integers(0, 200),
    period=st.text("0123456789._ smhdw", max_size=6),
    rest=st.text(" =burstname_1", max_size=12),
)
def test_a_string_like_a_limit_is_a_limit_or_a_config_error(quota, period, rest):
    try:
        limit = Limit.parse(f"{quota}/{period} {rest}")
    except ConfigError:
        return
    assert Limit.parse(str(limit)) == limit


def test_periods_are_formatted_in_the_largest_unit():
    for given_, written in [("60s", "1m"), ("7d", "1w"), ("1500ms", "1500ms"), ("1us", "1us"), ("90m", "90m")]:
        assert Limit(5, given_).period == written
    assert Limit(5, "60s") == Limit(5, "1m") == Limit(5, 60) == Limit(5, timedelta(minutes=1))


def test_names():
    assert Limit(5, "1m").name == "1m"
    assert Limit(5, "1m", unit="tokens").name == "tokens-1m"
    assert Limit(5, "month", "calendar_window").name == "month"
    assert Limit(5, "1m", name="x").name == "x"


@pytest.mark.parametrize("algorithm", NAMES)
def test_limits_can_be_pickled(algorithm):
    """Found by reading: limits of most algorithms could not be pickled."""
    limit = Limit(5, "1m", algorithm)
    for other in (pickle.loads(pickle.dumps(limit)), copy.deepcopy(limit)):  # noqa: S301 - our own
        assert other == limit
        assert other.rules == limit.rules
        assert other.capacity == limit.capacity


@pytest.mark.parametrize(
    "text",
    [
        "60/1m",
        "60/1m burst=90 unit=tokens name=tpm",
        "500/1d sliding_log",
        "300/1m sliding_log margin=300ms",
        "7500/month calendar_window",
        "7500/month calendar_window timezone=Europe/Berlin reset_day=2 reset_hour=1",
        "7500/month calendar_window reset_day=31 reset_hour=23",
    ],
)
def test_str_of_a_limit(text):
    assert str(Limit.parse(text)) == text


def test_a_margin_lets_permits_of_a_log_count_longer():
    limit = Limit(300, "1m", "sliding_log", margin=300_000)
    assert (limit.length, limit.period, limit.name) == (60_300_000, "1m", "1m")
    assert limit != Limit(300, "1m", "sliding_log")
    for wrong in ("60/1m margin=1s", "60/1m sliding_log margin=soon", "60/1m sliding_log margin="):
        with pytest.raises(ConfigError):
            Limit.parse(wrong)
    with pytest.raises(ConfigError, match="margin"):
        Limit(300, "1m", "sliding_log", margin=-1)


def test_maximal_length_of_calendar_periods():
    lengths = {period: Limit(1, period, "calendar_window").length // 60_000_000 for period in PERIODS}
    day = 24 * 60
    assert lengths == {"minute": 1, "hour": 60, "day": day, "week": 7 * day, "month": 31 * day, "year": 366 * day}


def test_the_bare_words_of_the_calendar_choose_the_algorithm_of_a_limit():
    assert [Limit(5, word).algorithm for word in PERIODS] == ["token_bucket"] * 2 + ["calendar_window"] * 4
    assert Limit(5, "1d").algorithm == Limit(5, timedelta(days=1)).algorithm == "token_bucket"
    with pytest.raises(ConfigError, match="a calendar week needs the algorithm calendar_window, not fixed_window"):
        Limit(5, "week", "fixed_window")
