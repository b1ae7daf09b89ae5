"""Numbers and times as servers write them.

Everything here takes text that a stranger wrote: what is not understood is None, what is absurd is clamped, and nothing
raises. Instants are seconds since 1970, waits are seconds from `now` and never negative.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from tidegate.core.bounds import MAX

LONGEST: Final = 366 * 86_400.0  # the longest wait or window that is believed: a yearly quota that was just used up
LONGEST_FIELD: Final = 8192  # characters of a field that are worth reading; a longer one is ignored

DIGITS: Final = 20  # of a number that is worth computing with: nanoseconds since 1970 have 19
NUMBER = re.compile(r"([0-9]+)(\.[0-9]+)?")
DURATION = re.compile(r"(?:[0-9]{1,15}(?:\.[0-9]{1,15})?(?:ms|us|µs|μs|ns|[dhms]))+")
DURATION_PART = re.compile(r"([0-9.]+)([a-zµμ]+)")
SECONDS: Final = {"d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6,
                  "ns": 1e-9}  # fmt: skip
# From this number on it is an instant, not a delay, and so many make a second. A delay of 10**9 seconds is 31 years,
# an instant of 10**9 seconds was in 2001; the same distance separates seconds from milliseconds and so on.
EPOCHS: Final = ((10**17, 10**9), (10**14, 10**6), (10**11, 10**3), (10**9, 1))

MONTHS: Final = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
MONTH: Final = f"(?P<month>{'|'.join(MONTHS)})"
CLOCK: Final = r"(?P<hour>[0-9]{2}):(?P<minute>[0-9]{2}):(?P<second>[0-9]{2})"
DAY: Final = "(?:mon|tue|wed|thu|fri|sat|sun)"
LONG_DAY: Final = "(?:mon|tues|wednes|thurs|fri|satur|sun)day"
HTTP_DATES: Final = tuple(
    re.compile(form, re.IGNORECASE | re.ASCII)
    for form in (
        rf"{DAY}, (?P<day>[0-9]{{2}}) {MONTH} (?P<year>[0-9]{{4}}) {CLOCK} GMT",  # IMF-fixdate: what is sent today
        rf"{LONG_DAY}, (?P<day>[0-9]{{2}})-{MONTH}-(?P<year>[0-9]{{2}}) {CLOCK} GMT",  # RFC 850
        rf"{DAY} {MONTH} (?P<day>[0-9 ][0-9]) {CLOCK} (?P<year>[0-9]{{4}})",  # asctime()
    )
)
RFC_3339 = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,9})?"
                      r"(?:[Zz]|[+-][0-9]{2}:[0-9]{2})")  # fmt: skip
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def parse_retry_after(value: object, now: float) -> float | None:
    """Read a Retry-After field: seconds to wait from `now` (an instant in seconds since 1970), or None.

    By RFC 9110 the value is whole seconds, or a date in one of three forms. A date that has passed is a wait of 0; one
    that is absurdly far away is clamped to 366 days; anything else is None.
    """
    text = text_of(value)
    if text is None:
        return None
    if text.isascii() and text.isdecimal():
        return clamp(whole(text))
    instant = http_date(text, now)
    return None if instant is None else clamp(instant - now)


def seconds_until(text: str, now: float) -> float | None:
    """Read when a limit resets, as seconds from `now`: a delay, a duration (`6m0s`), an instant or a date."""
    number = NUMBER.fullmatch(text)
    if number:
        amount = whole(number[1]) + float(number[2] or 0)
        for least, per_second in EPOCHS:
            if amount >= least:
                return clamp(amount / per_second - now)
        return clamp(amount)
    if DURATION.fullmatch(text):
        return duration(text)
    instant = rfc_3339(text) if RFC_3339.fullmatch(text) else http_date(text, now)
    return None if instant is None else clamp(instant - now)


def duration(text: str) -> float:
    """Add up a duration such as `1h6m0.5s` or `120ms`."""
    return clamp(sum(float(amount) * SECONDS[unit] for amount, unit in DURATION_PART.findall(text)))


def whole(digits: str) -> int:
    """Read digits, however many; a number too long to mean anything is the largest that is computed with."""
    digits = digits.lstrip("0")
    return 10**DIGITS if len(digits) > DIGITS else int(digits or "0")


def count(text: str) -> int | None:
    """Read a number of permits: not negative, fractions dropped."""
    number = NUMBER.fullmatch(text)
    return None if number is None else min(whole(number[1]), MAX)


def clamp(seconds: float) -> float:
    """Keep a wait between nothing and the longest that is believed."""
    return min(max(0.0, float(seconds)), LONGEST)


def http_date(text: str, now: float) -> float | None:
    """Read a date of HTTP, in any of its three forms, as seconds since 1970.

    The weekday is not checked against the date. Two digits of a year mean the one that is closest to `now`, so never
    one that is more than 50 years ahead.
    """
    match = next(filter(None, (form.fullmatch(text) for form in HTTP_DATES)), None)
    if match is None:
        return None
    year, second = int(match["year"]), int(match["second"])
    try:
        if len(match["year"]) == 2:  # noqa: PLR2004 - the RFC 850 form
            this = (EPOCH + timedelta(seconds=now)).year
            year += this - this % 100
            year += 100 * ((year < this - 50) - (year > this + 50))
        month, day = MONTHS.index(match["month"].lower()) + 1, int(match["day"])
        # A leap second, 60, is taken for the second after 59.
        minute = datetime(year, month, day, int(match["hour"]), int(match["minute"]), min(second, 59), tzinfo=UTC)
    except (ValueError, OverflowError):
        return None
    return (minute - EPOCH).total_seconds() + (second == 60) if second <= 60 else None  # noqa: PLR2004 - leap second


def rfc_3339(text: str) -> float | None:
    """Read an instant such as `2026-05-04T12:34:56Z` as seconds since 1970."""
    try:
        return (datetime.fromisoformat(text.upper()) - EPOCH).total_seconds()
    except (ValueError, OverflowError):
        return None


def text_of(value: object) -> str | None:
    """Take a field's value for text, without the white space around it; None if it is none or too long to read."""
    if isinstance(value, (bytes, bytearray)):
        value = value.decode("latin-1")
    elif isinstance(value, int) and not isinstance(value, bool):
        value = str(value) if abs(value) < 10**DIGITS else "9" * (DIGITS + 1)
    if not isinstance(value, str) or len(value) > LONGEST_FIELD:
        return None
    return value.strip(" \t")
