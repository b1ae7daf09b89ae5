"""Limit: `quota` permits per `period`, counted by an algorithm, in a unit; and its string format."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from tidegate._runtime.suggestions import hint
from tidegate.core import _algorithms as algorithms
from tidegate.core._bounds import MAX_DURATION, MAX_INTEGER, RATE_TOLERANCE, SECOND, ceil_div, rate_below
from tidegate.core._calendar import PERIODS, Calendar, find_zone
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.core._algorithms import State, View

PERIOD_UNITS: Final = {
    **dict.fromkeys(("us", "µs", "microsecond", "microseconds"), 1),
    **dict.fromkeys(("ms", "msec", "millisecond", "milliseconds"), 1000),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), SECOND),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60 * SECOND),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600 * SECOND),
    **dict.fromkeys(("d", "day", "days"), 86_400 * SECOND),
    **dict.fromkeys(("w", "week", "weeks"), 604_800 * SECOND),
}
SHORT_UNITS: Final = (
    ("w", PERIOD_UNITS["w"]),
    ("d", PERIOD_UNITS["d"]),
    ("h", PERIOD_UNITS["h"]),
    ("m", PERIOD_UNITS["m"]),
    ("s", SECOND),
    ("ms", 1000),
)
CALENDAR_PERIODS: Final = {
    **{name: name for name in PERIODS},
    **{f"1{name[0]}": name for name in PERIODS[:4]},
    "1y": "year",
}
NO_FIXED_LENGTH: Final = ("month", "months", "year", "years")
# Periods of the calendar if they have no number: `day`, not `1 day` or `24h`.
CALENDAR_WORDS: Final = {"day": "1d", "week": "1w", "month": "30d", "year": "365d"}  # with similar durations
PERIOD = re.compile(r"\s*(?P<count>\d+(?:_\d+)*(?:\.\d+)?)?\s*(?P<unit>[^\W\d_]+)\s*")
PERIOD_PARTS = re.compile(r"\s*(?:\d+[^\W\d_]+){2,}\s*")  # 1h30m
PER_WORDS: Final = r"(?:/|\bper\b|\bevery\b|\bin\b)"
LIMIT = re.compile(
    rf"\s*(?P<quota>\d[\d_]*)\s*(?P<unit>(?!(?:per|every|in)\b)[^\W\d][\w-]*)?\s*{PER_WORDS}\s*"
    r"(?P<period>(?:[\d_.]+\s*)?[^\W\d_]+(?:\d+[^\W\d_]+)*)(?P<rest>(?:\s.*)?)",
    re.DOTALL,
)
QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
ESCAPED = re.compile(r"\\(.)", re.DOTALL)
WORD = re.compile(rf"(?:{QUOTED.pattern}|\S)+", re.DOTALL)
MAX_DIGITS: Final = 100  # of a number in a limit
REQUEST_WORDS: Final = ("request", "call", "calls", "hit", "hits", "time", "times")  # synonyms of `requests`


@dataclass(frozen=True, slots=True)
class Limit:
    """`quota` permits per `period`, counted by `algorithm`, in `unit`.

    A Limit is immutable data; usage is a State, which a Store keeps. `burst` is for token buckets: how many permits may
    accumulate (the quota by default). `timezone`, `reset_day` and `reset_hour` are for calendar windows, which the bare
    periods `day`, `week`, `month` and `year` are (UTC, unless set); `1d` is a duration of 24 hours. For
    `concurrency`, the quota is the number of slots, and the period is how long a holder may keep one before the limit
    assumes that it crashed.

    `margin` is for sliding logs: how many microseconds longer than the period each permit counts.

    The name identifies the limit in decisions and, together with the algorithm, in the store: a limit that is changed
    under the same name keeps its usage. By default it is the period, prefixed by the unit unless that is `requests`.
    """

    quota: int
    period: str | timedelta | float
    algorithm: str = ""  # by default token_bucket; calendar_window for the bare periods
    unit: str = "requests"
    burst: int = 0
    name: str = ""
    timezone: str = "UTC"
    reset_day: int = 1
    reset_hour: int = 0
    margin: int = 0
    # Precomputed for the arithmetic. `length` is the period and the margin in microseconds (of a calendar period, its
    # maximal length without clock changes). The rate is `rate` / `scale` permits per microsecond; a bucket counts
    # in 1/scale permits up to `capacity` = burst * scale and never below `floor`; after `max_elapsed` microseconds, the
    # sum of the capacity and the refill could exceed MAX_INTEGER. Weighted windows count time in ticks of `tick`
    # microseconds.
    length: int = field(init=False, repr=False, compare=False)
    rate: int = field(init=False, repr=False, compare=False, default=0)
    scale: int = field(init=False, repr=False, compare=False, default=1)
    capacity: int = field(init=False, repr=False, compare=False, default=0)
    floor: int = field(init=False, repr=False, compare=False, default=0)
    max_elapsed: int = field(init=False, repr=False, compare=False, default=0)
    tick: int = field(init=False, repr=False, compare=False, default=1)
    calendar: Calendar | None = field(init=False, repr=False, compare=False, default=None)
    # The algorithm, and those of its functions that most calls need, which a look-up in `rules` would slow down.
    rules: algorithms.Algorithm = field(init=False, repr=False, compare=False)
    charge: Callable[[State | None, Limit, int, int], State | None] = field(init=False, repr=False, compare=False)
    view: Callable[[State | None, Limit, int, int], View] = field(init=False, repr=False, compare=False)
    remaining_of: Callable[[State | None, Limit, int], int] = field(init=False, repr=False, compare=False)
    retry_of: Callable[[State | None, Limit, int, int], int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the arguments and compute the derived numbers."""
        if not self.algorithm:
            self._set(algorithm=default_algorithm(self.period))
        rules = algorithms.ALGORITHMS.get(self.algorithm)
        if rules is None:
            raise ConfigError(_unknown_algorithm(self.algorithm), field="algorithm")
        _check_integer("quota", self.quota)
        if not isinstance(self.unit, str) or not self.unit:
            raise ConfigError(
                f"must be a non-empty string such as 'requests' or 'tokens', not {self.unit!r}", field="unit"
            )
        if not isinstance(self.name, str):
            raise ConfigError(f"must be a string, not {self.name!r}", field="name")
        self._set(rules=rules, charge=rules.charge, view=rules.view)
        self._set(remaining_of=rules.remaining, retry_of=rules.retry)
        if self.margin and not rules.rolling:
            raise ConfigError(f"requires the algorithm sliding_log, not {self.algorithm}", field="margin")
        if rules.by_calendar:
            self._set_calendar()
        else:
            self._check_bare_word()
            length = parse_period(self.period)
            if (self.timezone, self.reset_day, self.reset_hour) != ("UTC", 1, 0):
                message = "requires the algorithm calendar_window, like reset_day and reset_hour"
                raise ConfigError(message, field="timezone")
            _check_range("margin", self.margin, 0, MAX_DURATION - length, " microseconds")
            self._set(length=length + self.margin, period=period_text(length))
        self._set_numbers()
        if not self.name:
            self._set(name=self._default_name())

    @property
    def identity(self) -> tuple[str, str]:
        """What identifies the limit in the states of a key: its name and algorithm."""
        return self.name, self.algorithm

    def _default_name(self) -> str:
        return str(self.period) if self.unit == "requests" else f"{self.unit}-{self.period}"

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_bare_word(self) -> None:
        """Refuse `day` and `days`, which are no durations."""
        if word := calendar_word(self.period):
            duration = f"for a duration, use {CALENDAR_WORDS[word]!r}"
            message = f"a calendar {word} needs the algorithm calendar_window, not {self.algorithm}; {duration}"
            raise ConfigError(message, field="period")
        if isinstance(self.period, str) and (word := calendar_word(self.period.strip().removesuffix("s"))):
            message = f"expected {word!r}, a calendar {word}, or {CALENDAR_WORDS[word]!r}, not {self.period!r}"
            raise ConfigError(message, field="period")

    def _set_calendar(self) -> None:
        period = CALENDAR_PERIODS.get(self.period.strip().lower()) if isinstance(self.period, str) else None
        if period is None:
            known = f"{', '.join(PERIODS[:-1])} or {PERIODS[-1]}"
            message = f"must be {known} for a calendar_window, not {self.period!r}"
            raise ConfigError(message, field="period")
        find_zone(self.timezone)
        days = {"week": 7, "month": 31, "year": 31}.get(period, 1)
        _check_range("reset_day", self.reset_day, 1, days, f" for a limit per {period}")
        hours = 0 if period in ("minute", "hour") else 23
        _check_range("reset_hour", self.reset_hour, 0, hours, f" for a limit per {period}")
        longest = PERIOD_UNITS.get(period) or PERIOD_UNITS["d"] * (31 if period == "month" else 366)
        kind = Calendar(period, self.timezone, self.reset_day, self.reset_hour)
        self._set(period=period, length=longest, calendar=kind)

    def _set_numbers(self) -> None:
        if self.rules.refills:
            burst = self.burst or self.quota
            _check_integer("burst", burst)
            rate = rate_below(self.quota, self.length, burst)
            if rate is None or ceil_div(burst * rate[1], rate[0]) > MAX_DURATION:
                message = (
                    f"{self.quota} permits per {self.period} with a burst of {burst} cannot be counted with enough "
                    "precision: use a larger unit, a shorter period or a smaller burst"
                )
                raise ConfigError(message, field="quota")
            capacity = burst * rate[1]
            # A bucket in debt is at most MAX_INTEGER below full, and full again within MAX_DURATION.
            floor = capacity - min(MAX_INTEGER, rate[0] * MAX_DURATION)
            self._set(burst=burst, rate=rate[0], scale=rate[1], capacity=capacity, floor=floor)
            self._set(max_elapsed=(MAX_INTEGER - capacity) // rate[0])
            return
        if self.burst not in (0, self.quota):
            raise ConfigError(f"requires the algorithm token_bucket, not {self.algorithm}", field="burst")
        self._set(burst=self.quota)
        if self.rules.weighted:
            if self.length > MAX_DURATION // 2:  # a call counts for up to two periods
                raise ConfigError("must be at most 71 years for a sliding_window", field="period")
            tick = ceil_div(self.quota * self.length, MAX_INTEGER)
            if tick > 1 and tick > self.length * RATE_TOLERANCE:
                message = f"{self.quota} permits per {self.period} are too many for a sliding_window: use a larger unit"
                raise ConfigError(message, field="quota")
            self._set(tick=tick)

    @classmethod
    def parse(cls, text: str) -> Limit:
        """Parse a limit such as `60/1m`, `100/hour`, `5 per 30s`, `500/1d sliding_log`.

        After the period come the name of the algorithm and options as `name=value`: `burst=20`, `unit=tokens`,
        `name=tpm`, `timezone=Europe/Berlin`, `reset_day=15`, `reset_hour=9`, `margin=300ms`. The bare periods day,
        week, month and year are calendar windows.
        """
        if not isinstance(text, str):
            raise ConfigError(f"expected a string such as '60/1m', not {text!r}", field="limit")
        match = LIMIT.fullmatch(text)
        if match is None:
            several = "expected one limit without a comma: write several limits as a list"
            expected = several if "," in text else "expected a limit such as '60/1m' or '5 per 30s'"
            raise ConfigError(with_position(text, _error_position(text), expected))
        options: dict[str, str | int] = {}
        if match["unit"]:
            options["unit"] = "requests" if match["unit"].lower() in REQUEST_WORDS else match["unit"]
        period = match["period"].strip()
        for word in WORD.finditer(match["rest"]):
            name, value = _option(text, match.start("rest") + word.start(), word.group())
            if name in options:
                raise ConfigError(with_position(text, match.start("rest") + word.start(), f"duplicate {name}"))
            options[name] = value
        options.setdefault("algorithm", default_algorithm(period))
        if options["algorithm"] != "calendar_window" and not calendar_word(period.removesuffix("s")):
            try:
                _read_period(period)
            except _LimitTextError as error:
                raise ConfigError(with_position(text, match.start("period") + error.place, str(error))) from None
        try:
            return cls(_number(match["quota"]), period, **options)  # type: ignore[arg-type]  # checked by Limit
        except ConfigError as error:
            option = text.find(f"{error.field}=", match.start("rest"))
            place = match.start("period") if error.field == "period" else max(option, match.start("quota"))
            raise ConfigError(with_position(text, place, str(error))) from None

    def __str__(self) -> str:
        """Return the limit in the format that `parse` reads."""
        words = [f"{self.quota}/{self.period}"]
        if self.algorithm != "token_bucket":
            words.append(self.algorithm)
        if self.burst != self.quota:
            words.append(f"burst={self.burst}")
        if self.unit != "requests":
            words.append(f"unit={_quoted(self.unit)}")
        if self.name != self._default_name():
            words.append(f"name={_quoted(self.name)}")
        if self.margin:
            words.append(f"margin={period_text(self.margin)}")
        if self.calendar is not None:
            defaults = {"timezone": "UTC", "reset_day": 1, "reset_hour": 0}
            words += [f"{n}={getattr(self, n)}" for n, default in defaults.items() if getattr(self, n) != default]
        return " ".join(words)


def calendar_word(period: object) -> str | None:
    """Return the calendar period that a bare word names: `day`, `week`, `month` or `year`; None for other periods."""
    word = period.strip().lower() if isinstance(period, str) else ""
    return word if word in CALENDAR_WORDS else None


def default_algorithm(period: object, otherwise: str = "token_bucket") -> str:
    """Return the algorithm of a limit that names none: calendar_window for the bare periods."""
    return "calendar_window" if calendar_word(period) else otherwise


def parse_period(period: str | timedelta | float) -> int:
    """Return microseconds of a period: `250ms` `30s` `5m` `1h30m` `1d` `1w`, `hour`, `1.5h`, a timedelta or seconds."""
    if isinstance(period, timedelta):
        length = period // timedelta(microseconds=1)
        exact = True
    elif isinstance(period, (int, float)) and not isinstance(period, bool) and abs(period) < MAX_DURATION:
        length = round(period * SECOND)
        exact = True
    elif isinstance(period, str):
        try:
            length, exact = _read_period(period)
        except _LimitTextError as error:
            raise ConfigError(with_position(period, error.place, str(error)), field="period") from None
    else:
        message = f"expected a string such as '30s', a timedelta or a number of seconds, not {period!r}"
        raise ConfigError(message, field="period")
    if not exact or not 1 <= length <= MAX_DURATION:
        given = f"{period!r} seconds" if isinstance(period, (int, float)) else repr(period)
        expected = "a period from 1 microsecond to 142 years" if exact else "a multiple of 1 microsecond"
        raise ConfigError(f"expected {expected}, not {given}", field="period")
    return length


class _LimitTextError(Exception):
    """An error in a string, and its position."""

    def __init__(self, place: int, message: str) -> None:
        super().__init__(message)
        self.place = place


def _read_period(text: str) -> tuple[int, bool]:
    if PERIOD_PARTS.fullmatch(text):
        return _read_period_parts(text), True
    match = PERIOD.fullmatch(text)
    if match is None:
        good = re.match(r"\s*(?:\d+(?:_\d+)*(?:\.\d+)?\s*(?:[^\W\d_]+\s*)?)?", text)
        place = good.end() if good else 0
        raise _LimitTextError(place, "expected a period such as '30s', '5m', '1h', '1d' or '250ms'")
    unit = _unit_length(match)
    whole, _, part = (match["count"] or "1").replace("_", "").partition(".")
    if len(part) > MAX_DIGITS:
        return 0, False
    count = _number(whole) * 10 ** len(part) + _number(part)
    length, rest = divmod(count * unit, 10 ** len(part))
    return length, rest == 0


def _read_period_parts(text: str) -> int:
    """Read several integers with units, the largest unit first: 1h30m."""
    length, before = 0, MAX_DURATION + 1
    for match in re.finditer(r"(?P<count>\d+)(?P<unit>[^\W\d_]+)", text):
        unit = _unit_length(match)
        if unit >= before:
            message = f"expected a smaller unit than the one before {match.group()!r}, as in '1h30m'"
            raise _LimitTextError(match.start(), message)
        length, before = length + _number(match["count"]) * unit, unit
    return length


def _unit_length(match: re.Match[str]) -> int:
    """Return the microseconds of the unit that a pattern has found."""
    # Units may be upper-case, except M, which could mean minute or month.
    unit = match["unit"] if match["unit"] == "M" else match["unit"].lower()
    if unit in NO_FIXED_LENGTH:
        name = unit.removesuffix("s")
        message = f"a {name} has no fixed length: use '30d', or '{name}' with the algorithm calendar_window"
        raise _LimitTextError(match.start("unit"), message)
    if unit not in PERIOD_UNITS:
        raise _LimitTextError(match.start("unit"), f"unknown unit of time {match['unit']!r}: use ms, s, m, h, d or w")
    return PERIOD_UNITS[unit]


def period_text(length: int) -> str:
    """Format microseconds in the largest unit that divides them."""
    for unit, size in SHORT_UNITS:
        if length % size == 0:
            return f"{length // size}{unit}"
    return f"{length}us"


def _check_integer(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_INTEGER:
        raise ConfigError(f"must be an integer from 1 to 2**53 - 1, not {value!r}", field=name)


def _check_range(name: str, value: object, low: int, high: int, condition: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        expected = f"from {low} to {high}" if low < high else f"{low} (the default)"
        raise ConfigError(f"must be {expected}{condition}, not {value!r}", field=name)


def _unknown_algorithm(name: object) -> str:
    known = algorithms.ALGORITHMS
    return f"unknown algorithm {name!r}: use one of {', '.join(known)}{hint(name, known)}"


def _option(text: str, place: int, word: str) -> tuple[str, str | int]:
    name, is_option, value = word.partition("=")
    if not is_option:
        if "/" in word:
            raise ConfigError(with_position(text, place, "expected one limit: write several limits as a list"))
        if word not in algorithms.ALGORITHMS:
            raise ConfigError(with_position(text, place, _unknown_algorithm(word)))
        return "algorithm", word
    if name in ("burst", "reset_day", "reset_hour"):
        if not value.replace("_", "").isdecimal():
            raise ConfigError(with_position(text, place + len(name) + 1, f"{name} must be an integer"))
        return name, _number(value)
    if name == "margin":
        try:
            return name, _read_period(value)[0]
        except _LimitTextError as error:
            raise ConfigError(with_position(text, place + len(name) + 1 + error.place, str(error))) from None
    if name in ("unit", "name", "timezone") and value:
        return name, ESCAPED.sub(r"\1", value[1:-1]) if QUOTED.fullmatch(value) else value
    expected = "expected unit=, name=, burst=, margin=, timezone=, reset_day= or reset_hour="
    raise ConfigError(with_position(text, place, expected))


def _number(digits: str) -> int:
    """Parse an integer; only the first MAX_DIGITS digits count, which is already more than any limit allows."""
    return int(digits.replace("_", "").lstrip("0")[:MAX_DIGITS] or "0")


def _quoted(text: str) -> str:
    """Quote a string if `parse` needs it."""
    if re.fullmatch(r'[^\s"]+', text):
        return text
    escaped = re.sub(r'(["\\])', r"\\\1", text)
    return f'"{escaped}"'


def _error_position(text: str) -> int:
    """Return the position of the first error in a limit: after its number, or after its number and slash."""
    match = re.match(rf"\s*(?:\d[\d_]*\s*(?:{PER_WORDS}\s*)?)?", text)
    return match.end() if match else 0


def with_position(text: str, place: int, message: str) -> str:
    """Return an error message with the position in the text."""
    where = f"column {place + 1}" if place < len(text) else "the end"
    return f"{message} (at {where} of {text!r})"
