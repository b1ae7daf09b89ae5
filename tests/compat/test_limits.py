"""Limits of other rate limiters, read by tidegate.compat.limits."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyrate_limiter import Duration, Rate

from tests.cases import cases
from tidegate import ConfigError, Limiter
from tidegate.compat.limits import from_aiolimiter, from_django_ratelimit, from_drf, from_pyrate, parse, parse_many
from tidegate.core._bounds import SECOND
from tidegate.inbound.functions import Limits
from tidegate.testing import ManualClock

DAY = 86_400
# The seconds of each unit in `limits`: a month has 30 days, a year 12 such months.
UNITS = {"second": 1, "minute": 60, "hour": 3600, "day": DAY, "month": 30 * DAY, "year": 360 * DAY}


def numbers(limits):
    return [(one.quota, one.length // SECOND) for one in limits]


# ---- the syntax of `limits` ------------------------------------------------------------------------------------------


@cases(
    ("text", "expected"),
    [  # the examples of the documentation of limits, slowapi and Flask-Limiter
        ("10 per hour", [(10, 3600)]),
        ("10/hour", [(10, 3600)]),
        ("10/hour;100/day;2000 per year", [(10, 3600), (100, DAY), (2000, 360 * DAY)]),
        ("100/day, 500/7days", [(100, DAY), (500, 7 * DAY)]),
        ("1 per 1 month", [(1, 30 * DAY)]),
        ("10/2 minutes", [(10, 120)]),
        ("5/minute,100/hour", [(5, 60), (100, 3600)]),
        ("5/minute | 100/hour", [(5, 60), (100, 3600)]),
        ("1 PER Second", [(1, 1)]),
        ("1per second", [(1, 1)]),
        (" 200 per day ", [(200, DAY)]),
    ],
)
def test_a_string_of_limits_is_read(text, expected):
    assert numbers(parse_many(text)) == expected


items = st.tuples(
    st.integers(1, 10**6),
    st.sampled_from(["/", " / ", " per ", "per ", " PER "]),
    st.integers(1, 24),
    st.sampled_from(sorted(UNITS)),
    st.booleans(),
)


def item_text(item):
    quota, per, count, unit, plural = item
    return f"{quota}{per}{count} {unit}{'s' if plural else ''}"


@given(st.lists(items, min_size=1, max_size=5), st.sampled_from([";", ",", "|", " ; ", ", "]))
def test_any_string_of_the_grammar_gives_its_numbers_and_distinct_names(items, separator):
    limits = parse_many(separator.join(map(item_text, items)))
    assert numbers(limits) == [(quota, count * UNITS[unit]) for quota, _, count, unit, _ in items]
    assert len({one.name for one in limits}) == len(limits)
    Limiter(limits)  # a policy accepts them all


@given(st.text(alphabet="0159 /;,|permintuhosday", max_size=20))
def test_any_other_string_is_a_config_error_with_a_position(text):
    try:
        parse_many(text)
    except ConfigError as error:
        assert re.search(r"at column \d+ of |at the end of ", str(error))  # noqa: PT017 - most strings are invalid


@cases(
    ("text", "message"),
    [
        ("", "limit: expected a number (at the end of '')"),
        ("5", "limit: expected '/' or 'per' (at the end of '5')"),
        ("5 every minute", "limit: expected '/' or 'per' (at column 3 of '5 every minute')"),
        (
            "5/week",
            "limit: expected a unit of time: second, minute, hour, day, month, year (at column 3 of '5/week')",
        ),
        ("5/minute;", "limit: expected a number (at the end of '5/minute;')"),
        ("5/minute 6/hour", "limit: expected ';', ',', '|' or the end (at column 10 of '5/minute 6/hour')"),
        ("5/0 minutes", "limit: expected a period of at least one second (at column 3 of '5/0 minutes')"),
        ("9" * 17 + "/day", f"limit: expected a number below 2**53 (at column 1 of '{'9' * 17}/day')"),
        (5, "limit: expected a limit such as '5 per minute', not 5"),
    ],
)
def test_an_error_names_the_position_and_what_is_expected(text, message):
    with pytest.raises(ConfigError) as raised:
        parse_many(text)
    assert str(raised.value) == message


def test_parse_reads_one_limit_and_rejects_several():
    assert numbers([parse("5 per minute")]) == [(5, 60)]
    with pytest.raises(ConfigError, match=r"use parse_many for several \(at column 9"):
        parse("5/minute;100/hour")


@pytest.mark.parametrize("algorithm", ["sliding_log", "fixed_window", "sliding_window", "token_bucket"])
def test_the_algorithm_can_be_chosen(algorithm):
    assert parse("5/minute", algorithm=algorithm).algorithm == algorithm


def test_an_unknown_algorithm_is_an_error():
    with pytest.raises(ConfigError, match="unknown algorithm 'moving-window'"):
        parse("5/minute", algorithm="moving-window")


def test_all_limits_of_a_string_are_decided_together():
    clock = ManualClock(start=1_728_000_000)
    calls = []

    @Limits(clock=clock).limit(parse_many("2 per minute; 3/hour"))
    def act():
        calls.append(1)

    def tries(count):
        for _ in range(count):
            try:
                act()
            except Exception as error:  # noqa: BLE001 - Denied; its limits are compared
                yield error.decision.violated
            else:
                yield ()

    assert list(tries(4)) == [(), (), ("1m",), ("1m",)]
    clock.advance(60)
    # The denied calls used nothing of the hour.
    assert list(tries(2)) == [(), ("1h",)]


# ---- other packages --------------------------------------------------------------------------------------------------


@cases(
    ("rate", "expected"),
    [
        ("100/day", (100, DAY)),
        ("5/m", (5, 60)),
        ("5/min", (5, 60)),
        ("3/sec", (3, 1)),
        ("1/s", (1, 1)),
        ("10/hour", (10, 3600)),
        ("10/h", (10, 3600)),
        ("10/d", (10, DAY)),
    ],
)
def test_a_rate_of_rest_framework_is_read(rate, expected):
    assert numbers([from_drf(rate)]) == [expected]


def test_a_month_is_rejected_because_rest_framework_reads_it_as_a_minute():
    with pytest.raises(ConfigError, match="at column 5 of '100/month'"):
        from_drf("100/month")


@cases(
    ("rate", "expected"),
    [
        ("5/s", (5, 1)),
        ("5/10s", (5, 10)),
        ("100/5m", (100, 300)),
        ("100/300s", (100, 300)),
        ("100/300", (100, 300)),
        ("10/h", (10, 3600)),
        ("1/d", (1, DAY)),
        ((100, 60), (100, 60)),
    ],
)
def test_a_rate_of_django_ratelimit_is_read(rate, expected):
    assert numbers([from_django_ratelimit(rate)]) == [expected]


@pytest.mark.parametrize("rate", ["5/w", "5/m x", "m/5", "/m", "5"])
def test_another_rate_is_a_config_error(rate):
    for read in (from_drf, from_django_ratelimit):
        with pytest.raises(ConfigError, match=r"at column \d of|at the end of"):
            read(rate)


@pytest.mark.parametrize(
    ("interval", "seconds"), [(Duration.MINUTE, 60), (Duration.SECOND * 10, 10), (Duration.DAY, DAY)]
)
def test_a_rate_of_pyrate_limiter_is_read(interval, seconds):
    assert numbers([from_pyrate(Rate(5, interval))]) == [(5, seconds)]


def test_an_aiolimiter_is_a_token_bucket():
    bucket = from_aiolimiter(100)
    assert (bucket.quota, bucket.period, bucket.algorithm, bucket.burst) == (100, "1m", "token_bucket", 100)
    assert str(from_aiolimiter(4, 0.25)) == "4/250ms"


def test_a_fractional_max_rate_is_an_error():
    with pytest.raises(ConfigError, match=r"max_rate: must be an integer, not 0\.5"):
        from_aiolimiter(0.5, 1)
