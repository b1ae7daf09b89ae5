"""Chooses the format of a denial by the Accept header: plain text, or problem details (JSON)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate.headers import PROBLEM_TYPE

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_ACCEPT_LENGTH: Final = 1024  # longer Accept headers are truncated
JSON_TYPES: Final = ("application/json", PROBLEM_TYPE)
TYPES: Final = ("text/plain", "text/*", *JSON_TYPES)


def mentions_json(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether Accept mentions JSON at all; if not, `prefers_json` need not be called."""
    for name, value in headers:  # noqa: SIM110 - any() would create a generator for each denial
        if name == b"accept" and b"json" in value.lower():
            return True
    return False


def prefers_json(accept: str | None) -> bool:
    """Return whether an Accept header prefers JSON to plain text; never raises.

    Of the named types, the one with the largest q wins; among equals, the first. `*/*` means plain text.
    """
    best, best_weight = "text/plain", (0.0, 0)
    accept = accept[:MAX_ACCEPT_LENGTH].lower() if accept else ""
    for place, entry in enumerate(accept.split(",")):
        kind, *parameters = (part.strip() for part in entry.split(";"))
        if kind not in TYPES:
            continue
        weight = (_quality(parameters), -place)
        if weight[0] > 0 and weight > best_weight:
            best, best_weight = kind, weight
    return best in JSON_TYPES


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
