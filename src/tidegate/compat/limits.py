"""Reads the limits of other rate limiters, so that a configuration can be kept as it is.

    parse_many("5 per minute; 100/hour")        limits, slowapi, Flask-Limiter
    from_drf("100/day")                         Django REST Framework
    from_django_ratelimit("5/10s")              django-ratelimit
    from_pyrate(Rate(5, Duration.MINUTE))       PyrateLimiter
    from_aiolimiter(100, 60)                    aiolimiter

Each returns a Limit (`parse_many`: a list of them), which every interface of tidegate accepts. A month has 30 days and
a year has 360 days, as in `limits`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Protocol

from tidegate.core._limit import Limit, with_position
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PyrateRate", "from_aiolimiter", "from_django_ratelimit", "from_drf", "from_pyrate", "parse", "parse_many"]

UNIT_SECONDS: Final = {
    "second": 1,
    "minute": 60,
    "hour": 3600,
    "day": 86_400,
    "month": 30 * 86_400,
    "year": 360 * 86_400,
}
UNIT_NAMES: Final = {**UNIT_SECONDS, **{f"{name}s": seconds for name, seconds in UNIT_SECONDS.items()}}
DRF_UNITS: Final = {
    **{name: seconds for name, seconds in UNIT_NAMES.items() if seconds <= UNIT_SECONDS["day"]},
    "s": 1,
    "sec": 1,
    "m": 60,
    "min": 60,
    "h": 3600,
    "hr": 3600,
    "d": 86_400,
}
SHORT_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
NUMBER = re.compile(r"\s*([0-9]+)\s*")
OPTIONAL_NUMBER = re.compile(r"\s*([0-9]*)\s*")
SLASH = re.compile(r"\s*(/)\s*")
SLASH_OR_PER = re.compile(r"\s*(/|per)\s*", re.IGNORECASE)
WORD = re.compile(r"\s*([a-z]*)\s*", re.IGNORECASE)
SEPARATOR = re.compile(r"[;,|]")
MAX_NUMBER_DIGITS: Final = 16  # longer numbers exceed 2**53


class PyrateRate(Protocol):
    """A `pyrate_limiter.Rate`: `limit` calls per `interval` milliseconds."""

    @property
    def limit(self) -> int:
        """The number of calls."""

    @property
    def interval(self) -> int:
        """The interval in milliseconds."""


def parse(text: str, *, algorithm: str = "sliding_log") -> Limit:
    """Parse one limit in the syntax of `limits`, such as "5 per minute" or "10/2 hours"."""
    found = parse_many(text, algorithm=algorithm)
    if len(found) > 1:
        separator = SEPARATOR.search(text)
        place = separator.start() if separator else 0
        raise ConfigError(with_position(text, place, "expected one limit: use parse_many for several"), field="limit")
    return found[0]


def parse_many(text: str, *, algorithm: str = "sliding_log") -> list[Limit]:
    """Parse limits in the syntax of `limits`, separated by ; or , or |, such as "5 per minute; 100/hour".

    The strategies of `limits` are the algorithms `fixed_window`, `sliding_log` (moving-window) and `sliding_window`
    (sliding-window-counter).
    """
    reader = _LimitReader(text, "a limit such as '5 per minute'")
    found: list[Limit] = []
    while True:
        found.append(reader.limit(SLASH_OR_PER, "'/' or 'per'", UNIT_NAMES, algorithm, found))
        if reader.at_end:
            return found
        reader.match(SEPARATOR, "';', ',', '|' or the end")


def from_drf(rate: str, *, algorithm: str = "sliding_log") -> Limit:
    """Parse a rate of Django REST Framework, such as "100/day" or "5/m".

    REST Framework reads only the first letter of the period, so that "100/month" is 100 per minute. This function
    rejects such a rate.
    """
    reader = _LimitReader(rate, "a rate such as '100/day'")
    return reader.last(reader.limit(SLASH, "'/'", DRF_UNITS, algorithm))


def from_django_ratelimit(rate: str | Sequence[int], *, algorithm: str = "sliding_log") -> Limit:
    """Parse a rate of django-ratelimit: "5/m", "5/10s", "100/300" (seconds), or a pair (count, seconds)."""
    if not isinstance(rate, str) and len(rate) == 2:  # noqa: PLR2004 - a pair
        return Limit(rate[0], rate[1], algorithm)
    reader = _LimitReader(rate, "a rate such as '5/m' or '100/300', or a pair (count, seconds)")
    return reader.last(reader.limit(SLASH, "'/'", SHORT_UNITS, algorithm))


def from_pyrate(rate: PyrateRate, *, algorithm: str = "sliding_log") -> Limit:
    """Convert a `pyrate_limiter.Rate`."""
    return Limit(rate.limit, f"{int(rate.interval)}ms", algorithm)


def from_aiolimiter(max_rate: float, time_period: float = 60) -> Limit:
    """Convert the arguments of `aiolimiter.AsyncLimiter`, a leaky bucket that holds `max_rate`."""
    if max_rate != int(max_rate):
        message = f"must be an integer, not {max_rate!r}: multiply max_rate and time_period by the same number"
        raise ConfigError(message, field="max_rate")
    return Limit(int(max_rate), time_period, "token_bucket")


class _LimitReader:
    """Reads a string from left to right; errors name the position and what is expected there."""

    def __init__(self, text: object, expected: str) -> None:
        if not isinstance(text, str):
            raise ConfigError(f"expected {expected}, not {text!r}", field="limit")
        self._text = text
        self._place = 0

    @property
    def at_end(self) -> bool:
        return self._place == len(self._text)

    def match(self, pattern: re.Pattern[str], expected: str) -> str:
        """Read what the pattern matches at the current position."""
        found = pattern.match(self._text, self._place)
        if found is None:
            raise self._error(self._skip_spaces(), f"expected {expected}")
        self._place = found.end()
        return found[found.lastindex or 0]

    def limit(
        self,
        per: re.Pattern[str],
        per_words: str,
        units: dict[str, int],
        algorithm: str,
        earlier: Sequence[Limit] = (),
    ) -> Limit:
        """Read a number, `per`, an optional number and a unit of time."""
        start = self._skip_spaces()
        quota = self._number(NUMBER)
        self.match(per, per_words)
        place = self._skip_spaces()
        count = self._number(OPTIONAL_NUMBER, default=1)
        seconds = self._unit(units) * count
        if not seconds:
            raise self._error(place, "expected a period of at least one second")
        try:
            limit = Limit(quota, f"{seconds}s", algorithm)
            same = sum(other.length == limit.length for other in earlier)
            return Limit(quota, f"{seconds}s", algorithm, name=f"{limit.name}-{same + 1}") if same else limit
        except ConfigError as error:
            raise self._error(place if error.field == "period" else start, str(error)) from None

    def last(self, limit: Limit) -> Limit:
        """Return the limit; raise ConfigError if anything follows it."""
        if not self.at_end:
            raise self._error(self._place, "expected the end")
        return limit

    def _number(self, pattern: re.Pattern[str], default: int = 0) -> int:
        place = self._skip_spaces()
        digits = self.match(pattern, "a number").lstrip("0") or "0"
        if len(digits) > MAX_NUMBER_DIGITS:
            raise self._error(place, "expected a number below 2**53")
        return int(digits) if self._text[place : self._place].strip() else default

    def _unit(self, units: dict[str, int]) -> int:
        place = self._skip_spaces()
        word = self.match(WORD, "a unit of time").lower()
        if word not in units:
            names = ", ".join(name for name in units if name and not (name[:-1] and name[:-1] in units))
            raise self._error(place, f"expected a unit of time: {names}")
        return units[word]

    def _skip_spaces(self) -> int:
        """Return the position of the next character that is not a space."""
        return len(self._text) - len(self._text[self._place :].lstrip())

    def _error(self, place: int, message: str) -> ConfigError:
        return ConfigError(with_position(self._text, place, message), field="limit")
