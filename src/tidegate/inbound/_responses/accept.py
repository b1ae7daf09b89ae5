"""Chooses the format of a denial by the Accept header: plain text, problem details (JSON) or HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from tidegate.headers import PROBLEM_TYPE

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_ACCEPT_LENGTH: Final = 1024  # longer Accept headers are truncated
Format = Literal["plain", "json", "html"]
FORMATS: Final[dict[str, Format]] = {
    "text/plain": "plain",
    "text/*": "plain",
    "application/json": "json",
    PROBLEM_TYPE: "json",
    "text/html": "html",
    "application/xhtml+xml": "html",
}


def mentions(headers: Iterable[tuple[bytes, bytes]], words: tuple[bytes, ...]) -> bool:
    """Return whether Accept mentions one of these words at all; if not, `choose_format` need not be called."""
    for name, value in headers:  # any() would create a generator for each denial
        if name == b"accept":
            lowered = value.lower()
            for word in words:
                if word in lowered:
                    return True
    return False


def choose_format(accept: str | None, *, html: bool = False) -> Format:
    """Return the format that an Accept header prefers; never raises.

    Of the named types, the one with the largest q wins; among equals, the first. `*/*` means plain text. HTML is only
    chosen with `html`.
    """
    best: Format = "plain"
    best_weight = (0.0, 0)
    accept = accept[:MAX_ACCEPT_LENGTH].lower() if accept else ""
    for place, entry in enumerate(accept.split(",")):
        kind, *parameters = (part.strip() for part in entry.split(";"))
        found = FORMATS.get(kind)
        if found is None or (found == "html" and not html):
            continue
        weight = (_quality(parameters), -place)
        if weight[0] > 0 and weight > best_weight:
            best, best_weight = found, weight
    return best


def _quality(parameters: Iterable[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                quality = float(value)
            except ValueError:
                return 0.0
            return quality if 0 <= quality <= 1 else 0.0
    return 1.0
