"""Errors about fields of requests: which field, what was given, and what is expected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate._runtime.suggestions import did_you_mean
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_SHOWN_NAME: Final = 50  # characters of an unknown name or a number that are compared or shown


class BadFieldError(ConfigError):
    """An invalid field of a request; `pointer` is its JSON pointer (RFC 6901)."""

    def __init__(self, pointer: str, message: str) -> None:
        """Set the field and the reason."""
        super().__init__(message, field=pointer.replace("/", ".").strip(".") or None)
        self.pointer = pointer


def type_name(value: object) -> str:
    """Return the name of the JSON type of a value."""
    names: tuple[tuple[type, str], ...] = (
        (bool, "a boolean"),
        (int, "an integer"),
        (float, "a number"),
        (str, "a string"),
        (list, "an array"),
        (dict, "an object"),
    )
    return next((name for each, name in names if isinstance(value, each)), "null")


def describe_value(value: object) -> str:
    """Return a JSON value as error messages show it: a number itself, its type otherwise."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return shorten_number(value)
    if isinstance(value, str) and len(value) > MAX_SHOWN_NAME:
        return f"a string of {len(value)} characters"
    if isinstance(value, list) and value:
        unexpected = next((each for each in value if not isinstance(each, str)), None)
        return f"an array of {len(value)} items" if unexpected is None else f"an array with {type_name(unexpected)}"
    if isinstance(value, (str, list)) and not value:
        return f"an empty {'string' if isinstance(value, str) else 'array'}"
    return type_name(value)


def shorten_number(value: float) -> str:
    """Write a number; its first digits if it has too many."""
    try:
        return repr(value)[:MAX_SHOWN_NAME]
    except ValueError:  # Python refuses to write thousands of digits
        return "a number with too many digits"


def suggest(name: str, known: Sequence[str]) -> str:
    """Return advice for an unknown name: the closest known name, or all of them."""
    return did_you_mean(name, known) or f"expected one of {', '.join(known)}"


def escape_pointer(name: str) -> str:
    """Escape a name as part of a JSON pointer; a long name is truncated."""
    return name[:100].replace("~", "~0").replace("/", "~1")
