"""Reads the arguments of commands: `policy key [COST n | COST unit n …] [TIMEOUT s] [PRIORITY p] [TTL s]`."""

from __future__ import annotations

import re
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

from tidegate.core._bounds import MAX_INTEGER
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate._policy import Cost

OPTION_WORDS: Final = ("COST", "TIMEOUT", "PRIORITY", "TTL")
INTEGER: Final = re.compile(r"[+-]?[0-9]{1,19}")
MAX_SHOWN: Final = 50  # characters of an argument in an error message


class ArgumentError(ConfigError):
    """An argument is invalid."""


def read_words(command: Sequence[bytes]) -> list[str]:
    """Decode the arguments of a command, without its name."""
    try:
        return [word.decode() for word in command[1:]]
    except UnicodeDecodeError:
        raise ArgumentError("an argument is not valid UTF-8") from None


def read_options(words: Sequence[str], allowed: Sequence[str]) -> dict[str, Any]:
    """Read the options after the fixed arguments of a command, by their lower-case names."""
    found: dict[str, Any] = {}
    position = 0
    while position < len(words):
        name = words[position].upper()
        if name not in allowed:
            expected = " or ".join(allowed) or "no further arguments"
            raise ArgumentError(f"unexpected argument {shorten(words[position])}: expected {expected}")
        if name.lower() in found:
            raise ArgumentError(f"{name} is given twice")
        end = next(
            (n for n in range(position + 1, len(words)) if words[n].upper() in OPTION_WORDS),
            len(words),
        )
        values = words[position + 1 : end]
        found[name.lower()] = read_cost(values) if name == "COST" else read_number(name, values)
        position = end
    return found


def read_cost(values: Sequence[str]) -> Cost:
    """Read a cost: an integer, or units with an integer each."""
    if len(values) == 1:
        return read_amount(values[0])
    if not values or len(values) % 2:
        raise ArgumentError("COST: expected an integer, or units with an integer each, such as COST tokens 100")
    units = values[::2]
    if len(set(units)) < len(units):
        raise ArgumentError("COST: a unit is given twice")
    return {unit: read_amount(amount) for unit, amount in zip(units, values[1::2], strict=True)}


def read_amount(text: str) -> int:
    """Read an amount of permits."""
    amount = read_integer(text)
    if amount is None or not 0 <= amount <= MAX_INTEGER:
        raise ArgumentError(f"COST: expected an integer from 0 to {MAX_INTEGER}, not {shorten(text)}")
    return amount


def read_number(name: str, values: Sequence[str]) -> float:
    """Read the number of an option."""
    try:
        (text,) = values
        number = float(text)
    except ValueError:
        number = float("nan")
    if not isfinite(number):
        raise ArgumentError(f"{name}: expected one number, not {shorten(' '.join(values))}")
    return number


def read_integer(text: str) -> int | None:
    """Read a whole number of at most 64 bits; None if the text is not one."""
    number = int(text) if INTEGER.fullmatch(text) else None
    return number if number is not None and -(2**63) <= number < 2**63 else None


def shorten(text: str) -> str:
    """Return an argument as error messages show it."""
    return repr(text[:MAX_SHOWN])
