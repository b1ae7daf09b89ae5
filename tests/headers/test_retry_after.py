"""Retry-After in all its formats, and malformed values."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tidegate.headers import parse_retry_after
from tidegate.headers._values import MAX_SECONDS, seconds_until

NOW = datetime(1994, 11, 6, 8, 49, 30, tzinfo=UTC).timestamp()


@cases(
    ("value", "seconds"),
    [
        ("0", 0),
        ("120", 120),
        (" 120\t", 120),
        ("007", 7),
        (b"120", 120),
        (120, 120),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 7),
        ("Sunday, 06-Nov-94 08:49:37 GMT", 7),
        ("Sun Nov  6 08:49:37 1994", 7),
        ("sun, 06 nov 1994 08:49:37 gmt", 7),
        ("Mon, 06 Nov 1994 08:49:37 GMT", 7),  # a wrong weekday is ignored
        ("Sun, 06 Nov 1994 08:49:60 GMT", 30),  # a leap second
        ("Sun, 06 Nov 1994 08:49:29 GMT", 0),  # in the past
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
        ("999999999999", MAX_SECONDS),
        ("9" * 5000, MAX_SECONDS),  # more digits than Python reads
        ("Fri, 31 Dec 9999 23:59:59 GMT", MAX_SECONDS),
    ],
)
def test_valid_values_are_read(value, seconds):
    assert parse_retry_after(value, NOW) == seconds


@cases("value", [None, "", " ", "-1", "+1", "1.5", "1e3", "0x10", "1_000", "12 34", "1, 2", "soon", "NaN",
     "inf", "\u0661\u0662", "\u00b2", True,
     3.5, [], {}, "\0", "1\n", "9" * 10_000,
     "Sun, 06 Nov 1994 08:49:37", "Sun, 06 Nov 1994 08:49:37 CET", "Sun, 06 Nov 1994 08:49:37 +0000",
     "Sun, 6 Nov 1994 08:49:37 GMT", "Sun, 31 Feb 1994 08:49:37 GMT", "Sun, 06 Nov 1994 24:00:00 GMT",
     "Sun, 06 Nov 1994 08:49:61 GMT", "Sun, 00 Nov 1994 08:49:37 GMT", "Sun, 06 Nov 0000 08:49:37 GMT",
     "Sun Nov 6 08:49:37 1994", "2026-05-04T12:34:56Z"])  # fmt: skip
def test_malformed_values_are_none(value):
    assert parse_retry_after(value, NOW) is None


@pytest.mark.parametrize(
    ("now", "year"), [(1994, 2043), (1994, 1945), (1999, 2000), (2026, 2076), (2026, 1977), (2051, 2001), (2100, 2099)]
)
def test_a_two_digit_year_is_never_more_than_fifty_years_ahead(now, year):
    instant = datetime(now, 1, 1, tzinfo=UTC).timestamp()
    expected = min(MAX_SECONDS, max(0, datetime(year, 1, 1, tzinfo=UTC).timestamp() - instant))
    assert parse_retry_after(f"Monday, 01-Jan-{year % 100:02} 00:00:00 GMT", instant) == expected


@given(st.datetimes(min_value=datetime(1970, 1, 1), max_value=datetime(2200, 1, 1)), st.integers(-(10**6), 10**6))  # noqa: DTZ001 - Hypothesis needs naive datetimes
def test_every_date_is_read_in_every_format(date, ahead):
    date = date.replace(microsecond=0, tzinfo=UTC)
    now = date.timestamp() - ahead
    for form in ("%a, %d %b %Y %H:%M:%S GMT", "%A, %d-%b-%y %H:%M:%S GMT", "%a %b %e %H:%M:%S %Y"):
        assert parse_retry_after(date.strftime(form), now) == max(0, ahead)


@given(st.one_of(st.text(), st.binary(), st.integers(), st.floats(), st.none()), st.floats(0, 1e12))
def test_any_value_gives_none_or_a_bounded_wait(value, now):
    seconds = parse_retry_after(value, now)
    assert seconds is None or 0 <= seconds <= MAX_SECONDS


@cases(
    ("text", "seconds"),
    [
        ("30", 30),
        ("1.5", 1.5),
        ("784111830", MAX_SECONDS),  # too short for an instant after 2001, so a delay, and an absurd one
        ("6m0s", 360),
        ("1s", 1),
        ("120ms", 0.12),
        ("1h2m3.5s", 3723.5),
        ("1d", 86_400),
        ("250us", 0.00025),
        ("99999999h", MAX_SECONDS),
    ],
)
def test_delays_and_durations_are_read(text, seconds):
    assert seconds_until(text, NOW) == pytest.approx(seconds)


@cases("text", ["1728000060", "1728000060.0", "1728000060000", "1728000060000000", "1728000060000000000",
     "2024-10-04T00:01:00Z", "2024-10-04t00:01:00.000z", "2024-10-04T02:01:00+02:00", "2024-10-03 19:01:00-05:00",
     "Fri, 04 Oct 2024 00:01:00 GMT"])  # fmt: skip
def test_instants_and_dates_are_read(text):
    assert seconds_until(text, 1_728_000_000.0) == pytest.approx(60)


@cases("text", ["", "-5", "1x", "m", "1h-2m", "2024-10-04", "2024-10-04T00:01:00", "2024-13-04T00:01:00Z"])
def test_malformed_times_are_none(text):
    assert seconds_until(text, 1_728_000_000.0) is None


@given(st.text(st.sampled_from("0123456789.dhmsuµn-:TZ+ "), max_size=40), st.floats(0, 1e12))
def test_times_never_raise(text, now):
    seconds = seconds_until(text, now)
    assert seconds is None or 0 <= seconds <= MAX_SECONDS
