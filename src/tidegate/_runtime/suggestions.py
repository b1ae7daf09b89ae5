"""Suggests the known name that is closest to an unknown one, for error messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_COMPARED_LENGTH: Final = 50  # characters of an unknown name that are compared


def closest(given: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar to the given one; None if none is similar."""
    from difflib import get_close_matches  # noqa: PLC0415 - only for errors

    near = get_close_matches(str(given)[:MAX_COMPARED_LENGTH], list(known), n=1, cutoff=cutoff)
    return near[0] if near else None


def did_you_mean(given: object, known: Iterable[str], prefix: str = "", suffix: str = "") -> str:
    """Return `did you mean 'x'?`, or an empty string; `prefix` and `suffix` complete the suggested name."""
    near = closest(given, known)
    return "" if near is None else f"did you mean {prefix + near + suffix!r}?"


def hint(given: object, known: Iterable[str], prefix: str = "", suffix: str = "") -> str:
    """Return the same, to append to a message."""
    near = did_you_mean(given, known, prefix, suffix)
    return near and f"; {near}"
