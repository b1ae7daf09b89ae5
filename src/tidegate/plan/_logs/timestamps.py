"""Reads the timestamps of logs: as integer microseconds since 1970, with the resolution that their text has."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Final

from tidegate.core._bounds import SECOND

if TYPE_CHECKING:
    from collections.abc import Callable

    ReadTime = Callable[[str], int]

MONTHS: Final = {
    name: number
    for number, name in enumerate(
        ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"), start=1
    )
}
MILLISECONDS_FROM: Final = 10**11  # seconds since 1970 reach this in the year 5138
MICROSECONDS_FROM: Final = 10**14
NANOSECONDS_FROM: Final = 10**17
EPOCH = re.compile(r"\s*(\d{1,19})(?:\.(\d+))?\s*")
FRACTION = re.compile(r"\d[.,](\d+)")
MAX_DIGITS: Final = 6  # of microseconds
EPOCH_START: Final = datetime(1970, 1, 1, tzinfo=UTC)
BACK_BY: Final = 60 * SECOND  # a local time that is this much earlier is the second one of a change of clocks


def read_common(text: str) -> int:
    """Read a time such as `10/Oct/2026:13:55:36 -0700`, of nginx and Apache."""
    if text[11] != ":" or text[2] != "/" or text[20:21] != " " or len(text) != 26:  # noqa: PLR2004 - its only length
        raise ValueError(f"expected a time such as 10/Oct/2026:13:55:36 +0000, not {text!r}")
    day, hour, minute, second = int(text[:2]), int(text[12:14]), int(text[15:17]), int(text[18:20])
    moment = microseconds(datetime(int(text[7:11]), MONTHS[text[3:6]], day, hour, minute, second, tzinfo=UTC))
    offset = (int(text[22:24]) * 3600 + int(text[24:26]) * 60) * SECOND
    return moment + offset if text[21] == "-" else moment - offset


def read_epoch(text: str) -> int:
    """Read a number since 1970: of seconds, with or without a fraction, or of milli-, micro- or nanoseconds."""
    match = EPOCH.fullmatch(text)
    if match is None:
        raise ValueError(f"expected a number of seconds since 1970, not {text!r}")
    whole, fraction = int(match[1]), match[2] or ""
    if whole >= NANOSECONDS_FROM:
        return whole // 1000
    if whole >= MICROSECONDS_FROM:
        return whole
    scale = 1000 if whole >= MILLISECONDS_FROM else SECOND
    return whole * scale + int((fraction + "000000")[:MAX_DIGITS]) * scale // SECOND


class LocalTimes:
    """Reads ISO 8601 times; times without an offset are in a time zone.

    When clocks go back, an hour of local time occurs twice. The times of a log rise, so one that falls by more than
    a minute within that hour is of its second occurrence.
    """

    def __init__(self, zone: tzinfo = UTC) -> None:
        """Read times without an offset in this zone."""
        self._zone = zone
        self._last = 0

    def read(self, text: str) -> int:
        """Read a time; raises ValueError."""
        moment = datetime.fromisoformat(text.strip().replace(",", "."))
        if moment.tzinfo is not None:
            return microseconds(moment)
        moment = moment.replace(tzinfo=self._zone)
        found = microseconds(moment)
        later = microseconds(moment.replace(fold=1))
        if later > found and self._last - found > BACK_BY:
            found = later
        self._last = found
        return found


def microseconds(moment: datetime) -> int:
    """Return a moment as microseconds since 1970, without a float."""
    return (moment - EPOCH_START) // timedelta(microseconds=1)


def has_no_offset(text: str) -> bool:
    """Return whether a time is a local time, without an offset or a zone."""
    try:
        return EPOCH.fullmatch(text) is None and datetime.fromisoformat(text.strip()).tzinfo is None
    except ValueError:
        return False


def resolution_of(text: str) -> int:
    """Return the resolution of a timestamp, in microseconds: a second, if it has no fraction."""
    number = EPOCH.fullmatch(text)
    if number is not None and int(number[1]) >= MILLISECONDS_FROM:
        return 1000 if int(number[1]) < MICROSECONDS_FROM else 1
    fraction = FRACTION.search(text)
    return SECOND if fraction is None else 10 ** (MAX_DIGITS - min(MAX_DIGITS, len(fraction[1])))


def choose_reader(text: str, zone: tzinfo = UTC) -> ReadTime:
    """Return the function that reads timestamps that look like this one; raises ValueError if there is none."""
    readers: list[ReadTime] = [read_epoch, LocalTimes(zone).read, read_common]
    for read in readers:
        try:
            read(text)
        except (ValueError, KeyError, IndexError):
            continue
        return read
    raise ValueError(f"expected a time such as 2026-10-10T13:55:36Z or 1791640536.123, not {text!r}")


def read_duration(text: str, unit: int) -> int:
    """Read a duration in a unit of so many microseconds; raises ValueError."""
    whole, _, fraction = text.partition(".")
    return int(whole) * unit + int((fraction + "000000")[:MAX_DIGITS]) * unit // SECOND
