r"""Periods, and limits such as `60/1m`, as regular expressions of JSON schemas, from the tables of the parser.

The expressions (ECMA 262) have no flags, so a word in any case is written `[mM][iI][nN]`. `\w` is an ASCII letter.
"""

from __future__ import annotations

from typing import Final

from tidegate.core._algorithms import ALGORITHMS
from tidegate.core._limit import CALENDAR_PERIODS, CALENDAR_WORDS, PER_WORDS, PERIOD_UNITS


def any_case(word: str) -> str:
    """Return an expression for a word in lower and upper case; a single M could mean a month, so it has no match."""
    return "m" if word == "m" else "".join(f"[{c}{c.upper()}]" if c.isascii() and c.isalpha() else c for c in word)


def whole(expression: str) -> str:
    """Return an expression that matches entire strings only."""
    return f"^(?:{expression})$"


def _either(words: list[str]) -> str:
    return f"(?:{'|'.join(any_case(word) for word in sorted(words, key=len, reverse=True))})"


def _parts() -> str:
    """Return an expression for several integers with units, the largest unit first: 1h30m."""
    sizes = sorted(set(PERIOD_UNITS.values()), reverse=True)
    units = [_either([name for name, size in PERIOD_UNITS.items() if size == each]) for each in sizes]
    return r"(?=\d)" + "".join(rf"(?:\d+{unit})?" for unit in units)


LETTER: Final = r"[A-Za-z_\u0080-\uffff]"
NOT_ZERO: Final = r"(?!(?:[0_.]+\s*[A-Za-zµ]+)+(?:\s|$))"
COUNT: Final = r"\d+(?:_\d+)*(?:\.\d+)?"
BARE: Final = _either(list(CALENDAR_WORDS))  # calendar periods; `days` is refused
LENGTH: Final = rf"(?!{BARE}s?(?:\s|$)){NOT_ZERO}(?:(?:{COUNT})?\s*{_either(list(PERIOD_UNITS))}|{_parts()})"
CALENDAR: Final = (
    f"(?:{'|'.join(''.join(any_case(c) if c != 'm' else '[mM]' for c in name) for name in CALENDAR_PERIODS)})"
)
FIXED_PERIOD: Final = rf"\s*{LENGTH}\s*"
CALENDAR_PERIOD: Final = rf"\s*{CALENDAR}\s*"

# What follows the period of a limit: the name of an algorithm, and options.
WORD: Final = r'(?:"(?:[^"\\]|\\.)*"|[^\s"])+'
INTEGER: Final = r"_*\d[\d_]*"
ONCE: Final = (
    rf"(?!(?:\s+{WORD})*\s+([a-z_]+=)(?:{WORD})(?:\s+{WORD})*\s+\1)"
    rf"(?!(?:\s+{WORD})*\s+(?:{'|'.join(ALGORITHMS)})(?:\s+{WORD})*\s+(?:{'|'.join(ALGORITHMS)})(?:\s|$))"
)
NAMES: Final = rf"(?:unit|name)={WORD}|burst={INTEGER}"
FIXED_OPTIONS: Final = (
    "|".join((*(name for name in ALGORITHMS if name != "calendar_window"), NAMES, "timezone=UTC", "reset_day=0*1"))
    + rf"|reset_hour=0+|margin={LENGTH}"
)
CALENDAR_OPTIONS: Final = (
    rf"calendar_window|{NAMES}|timezone={WORD}|reset_day=0*(?:[1-9]|[12]\d|3[01])|reset_hour=0*(?:\d|1\d|2[0-3])"
)
UNIT: Final = rf"(?:(?!(?:per|every|in)\b){LETTER}(?:\w|[\u0080-\uffff-])*)?"
QUOTA: Final = r"(?=\d)[0_]*[1-9][\d_]*"
DECIMAL: Final = r"\d[\d_]*\.\d{1,6}"


def _starts(quota: str) -> str:
    return rf"\s*{quota}\s*{UNIT}\s*{PER_WORDS}\s*"


def _counts(unit: str) -> str:
    """Return an expression for what is ahead: a limit that counts one of these units."""
    return rf"(?=\s*[\d_.]+\s*(?:{unit})\s*{PER_WORDS}|.*\sunit=\"?(?:{unit})\"?(?:\s|$))"


CURRENCY: Final = "[a-z]{3}"
MONEY: Final = rf"{CURRENCY}(?:_micros)?"
_MARGIN: Final = rf"(?=(?:\s+{WORD})*\s+sliding_log(?:\s|$)|(?!(?:\s+{WORD})*\s+margin=))"  # of a sliding log only
_FIXED_END: Final = rf"{LENGTH}{ONCE}{_MARGIN}(?:\s+(?:{FIXED_OPTIONS}))*\s*"
_CALENDAR_END: Final = rf"{CALENDAR}{ONCE}(?:\s+(?:{CALENDAR_OPTIONS}))*\s*"
_BY_CALENDAR: Final = rf"(?=.*\scalendar_window(?:\s|$)|.*{PER_WORDS}\s*{BARE}(?:\s|$))"
MONEY_LIMIT_TEXT: Final = (
    rf"{_counts(MONEY)}{_starts(QUOTA)}(?:{_FIXED_END}|{_CALENDAR_END})"
    rf"|{_counts(CURRENCY)}{_starts(DECIMAL)}(?:{_FIXED_END}|{_CALENDAR_END})"
)
LIMIT_TEXT: Final = rf"{_starts(QUOTA)}{_FIXED_END}|{_BY_CALENDAR}{_starts(QUOTA)}{_CALENDAR_END}|{MONEY_LIMIT_TEXT}"
