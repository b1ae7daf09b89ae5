"""Reads numbers and times from header fields.

The text comes from other servers, so it is not trusted: a malformed value is None, an absurd one is clamped, no value
raises. Instants are seconds since 1970. Waits are seconds from `now` and never negative.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from tidegate.core._bounds import MAX_INTEGER

MAX_SECONDS: Final = 366 * 86_400.0  # of a wait or window: that of a yearly quota
MAX_FIELD_LENGTH: Final = 8192  # characters of a field; a longer field is ignored

MAX_DIGITS: Final = 20  # of a number; nanoseconds since 1970 have 19
NUMBER = re.compile(r"([0-9]+)(\.[0-9]+)?")
DURATION = re.compile(r"(?:[0-9]{1,15}(?:\.[0-9]{1,15})?(?:ms|us|µs|μs|ns|[dhms]))+")
DURATION_PART = re.compile(r"([0-9.]+)([a-zµμ]+)")
UNIT_SECONDS: Final = {"d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6,
                  "ns": 1e-9}  # fmt: skip
# (smallest number, units per second): a number from this one on is an instant, not a delay. A delay of 10**9 seconds is
# 31 years, the instant 10**9 was in 2001; the same factor separates seconds from milliseconds, and so on.
EPOCH_UNITS: Final = ((10**17, 10**9), (10**14, 10**6), (10**11, 10**3), (10**9, 1))

MONTHS: Final = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
MONTH: Final = f"(?P<month>{'|'.join(MONTHS)})"
CLOCK: Final = r"(?P<hour>[0-9]{2}):(?P<minute>[0-9]{2}):(?P<second>[0-9]{2})"
DAY: Final = "(?:mon|tue|wed|thu|fri|sat|sun)"
LONG_DAY: Final = "(?:mon|tues|wednes|thurs|fri|satur|sun)day"
HTTP_DATES: Final = tuple(
    re.compile(form, re.IGNORECASE | re.ASCII)
    for form in (
        rf"{DAY}, (?P<day>[0-9]{{2}}) {MONTH} (?P<year>[0-9]{{4}}) {CLOCK} GMT",  # IMF-fixdate, the current format
        rf"{LONG_DAY}, (?P<day>[0-9]{{2}})-{MONTH}-(?P<year>[0-9]{{2}}) {CLOCK} GMT",  # RFC 850
        rf"{DAY} {MONTH} (?P<day>[0-9 ][0-9]) {CLOCK} (?P<year>[0-9]{{4}})",  # asctime()
    )
)
# Jira leaves the seconds out: 2023-11-14T22:18Z.
RFC_3339 = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,9})?)?"
                      r"(?:[Zz]|[+-][0-9]{2}:[0-9]{2})")  # fmt: skip
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def parse_retry_after(value: object, now: float) -> float | None:
    """Read a Retry-After field, and return the seconds to wait from `now` (seconds since 1970), or None.

    By RFC 9110 the value is a number of seconds, or a date in one of three formats. A date in the past returns 0; a
    wait of more than 366 days is clamped to that; anything else returns None.
    """
    text = to_text(value)
    if text is None:
        return None
    if text.isascii() and text.isdecimal():
        return clamp(read_integer(text))
    instant = read_http_date(text, now)
    return None if instant is None else clamp(instant - now)


def seconds_until(text: str, now: float) -> float | None:
    """Read the time of a reset as seconds from `now`: from a delay, a duration (`6m0s`), an instant or a date."""
    number = NUMBER.fullmatch(text)
    if number:
        amount = read_integer(number[1]) + float(number[2] or 0)
        for least, per_second in EPOCH_UNITS:
            if amount >= least:
                return clamp(amount / per_second - now)
        return clamp(amount)
    if DURATION.fullmatch(text):
        return read_duration(text)
    instant = read_rfc_3339(text) if RFC_3339.fullmatch(text) else read_http_date(text, now)
    return None if instant is None else clamp(instant - now)


def read_seconds(text: str) -> float | None:
    """Read a number of seconds with a fraction, such as `2.0`."""
    number = NUMBER.fullmatch(text)
    return None if number is None else clamp(read_integer(number[1]) + float(number[2] or 0))


def read_duration(text: str) -> float:
    """Read a duration such as `1h6m0.5s` or `120ms`, in seconds."""
    return clamp(sum(float(amount) * UNIT_SECONDS[unit] for amount, unit in DURATION_PART.findall(text)))


def read_integer(digits: str) -> int:
    """Read an integer of any number of digits; a longer one than MAX_DIGITS is clamped."""
    digits = digits.lstrip("0")
    return 10**MAX_DIGITS if len(digits) > MAX_DIGITS else int(digits or "0")


def read_count(text: str) -> int | None:
    """Read a number of permits; a fraction is cut off."""
    number = NUMBER.fullmatch(text)
    return None if number is None else min(read_integer(number[1]), MAX_INTEGER)


def clamp(seconds: float) -> float:
    """Limit a wait to the range from 0 to MAX_SECONDS."""
    return min(max(0.0, float(seconds)), MAX_SECONDS)


def read_http_date(text: str, now: float) -> float | None:
    """Read an HTTP date, in any of its three formats, as seconds since 1970.

    The weekday is not checked against the date. A year of two digits is the one closest to `now`, so it is never more
    than 50 years ahead.
    """
    match = next(filter(None, (form.fullmatch(text) for form in HTTP_DATES)), None)
    if match is None:
        return None
    year, second = int(match["year"]), int(match["second"])
    try:
        if len(match["year"]) == 2:  # noqa: PLR2004 - the RFC 850 format
            this = (EPOCH + timedelta(seconds=now)).year
            year += this - this % 100
            year += 100 * ((year < this - 50) - (year > this + 50))
        month, day = MONTHS.index(match["month"].lower()) + 1, int(match["day"])
        # A leap second, 60, counts as the second after 59.
        minute = datetime(year, month, day, int(match["hour"]), int(match["minute"]), min(second, 59), tzinfo=UTC)
    except (ValueError, OverflowError):
        return None
    return (minute - EPOCH).total_seconds() + (second == 60) if second <= 60 else None  # noqa: PLR2004 - leap second


def read_rfc_3339(text: str) -> float | None:
    """Read an instant such as `2026-05-04T12:34:56Z` as seconds since 1970."""
    try:
        return (datetime.fromisoformat(text.upper()) - EPOCH).total_seconds()
    except (ValueError, OverflowError):
        return None


def to_text(value: object) -> str | None:
    """Return the value of a field as a stripped string; None if it has another type or is too long."""
    if isinstance(value, (bytes, bytearray)):
        value = value.decode("latin-1")
    elif isinstance(value, int) and not isinstance(value, bool):
        value = str(value) if abs(value) < 10**MAX_DIGITS else "9" * (MAX_DIGITS + 1)
    if not isinstance(value, str) or len(value) > MAX_FIELD_LENGTH:
        return None
    return value.strip(" \t")
