"""Writes a Decision as header fields."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal, get_args
from urllib.parse import quote

import http_sf

from tidegate.core._algorithms import NEVER
from tidegate.core._bounds import SECOND, ceil_div
from tidegate.errors import ConfigError
from tidegate.headers._dialects import IETF, RETRY_AFTER, X_RATELIMIT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core import Decision, Limit
    from tidegate.core._algorithms import View

Style = Literal["x", "ietf", "both", "none"]
STYLES: Final[tuple[str, ...]] = get_args(Style)
MAX_SF_INTEGER: Final = 10**15 - 1  # the largest Integer of a structured field
PRINTABLE: Final = "".join(map(chr, range(0x20, 0x7F)))  # the characters of a String in a structured field


def write(decision: Decision, style: Style = "x") -> list[tuple[str, str]]:
    """Return the header fields that describe a decision.

    `x` writes `X-RateLimit-Limit`, `-Remaining` and `-Reset` (seconds since 1970, rounded up) of the tightest limit;
    `ietf` writes `RateLimit-Policy` and `RateLimit` with all limits; `both` writes both, `none` neither.

    A denial has `Retry-After` in any style: seconds, rounded up, at least 1. It is left out if the call never fits.
    """
    check_style(style)
    limits, views = decision.policy_limits, decision.views
    fields = []
    if style in ("x", "both"):
        fields += _write_x_fields(limits, views, decision.at)
    if style in ("ietf", "both"):
        fields.append((IETF.policy, ", ".join(_write_policy(limit, decision.at) for limit in limits)))
        fields.append((IETF.state, ", ".join(map(_write_state, limits, views))))
    if not decision.allowed:
        waits = [view[1] for view in views]
        if NEVER not in waits:
            fields.append((RETRY_AFTER, str(max(1, ceil_div(max(waits), SECOND)))))
    return fields


def check_style(style: object) -> None:
    """Raise ConfigError if the style is unknown."""
    if style not in STYLES:
        raise ConfigError(f"must be one of {', '.join(STYLES)}, not {style!r}", field="headers")


def _write_x_fields(limits: Sequence[Limit], views: Sequence[View], at: int) -> list[tuple[str, str]]:
    limit, (remaining, _, reset) = find_tightest(limits, views) if len(limits) > 1 else (limits[0], views[0])
    return [
        (X_RATELIMIT.limit, str(limit.quota)),
        (X_RATELIMIT.remaining, str(max(0, min(remaining, limit.quota)))),
        (X_RATELIMIT.reset, str(ceil_div(at + reset, SECOND))),
    ]


def find_tightest(limits: Sequence[Limit], views: Sequence[View]) -> tuple[Limit, View]:
    """Return the limit that matters most to the caller.

    Of the violated limits, this is the one with the longest wait; if none is violated, the one with the fewest permits
    left, and among equals the one with the latest reset.
    """

    def tightness(pair: tuple[Limit, View]) -> tuple[bool, bool, int, int, int]:
        _, (remaining, retry, reset) = pair
        return retry != 0, retry == NEVER, retry, -max(0, remaining), reset

    return max(zip(limits, views, strict=True), key=tightness)


def _write_policy(limit: Limit, at: int) -> str:
    """Write an item of RateLimit-Policy: the quota, its unit unless that is requests, and the window in seconds."""
    item = f"{_write_string(limit.name)};{IETF.quota}={min(limit.quota, MAX_SF_INTEGER)}"
    if limit.rules.holds_slots:
        unit = "concurrent-requests" if limit.unit == "requests" else limit.unit
        # Slots have no window: they are free again when they are released.
        return f"{item};{IETF.unit}={_write_string(unit)}"
    if limit.unit != "requests":
        item += f";{IETF.unit}={_write_string(limit.unit)}"
    length = limit.length
    if limit.calendar is not None:
        start, end = limit.calendar.window(at)
        length = end - start
    # The window is optional, and the format has no fractions of a second.
    return item if length % SECOND else f"{item};{IETF.window}={length // SECOND}"


def _write_state(limit: Limit, view: View) -> str:
    """Write an item of RateLimit: the permits left, and the seconds until the limit resets.

    For a violated limit, these are the seconds until the call would be allowed, so that Retry-After is never shorter.
    """
    remaining, retry, reset = view
    item = f"{_write_string(limit.name)};{IETF.remaining}={max(0, min(remaining, limit.quota, MAX_SF_INTEGER))}"
    if limit.rules.holds_slots:
        return item
    return f"{item};{IETF.reset}={ceil_div(retry if retry > 0 else reset, SECOND)}"


@lru_cache(maxsize=1024)
def _write_string(text: str) -> str:
    """Write a String; characters that a String cannot contain are percent-encoded."""
    return http_sf.ser(quote(text, safe=PRINTABLE, errors="surrogatepass"))
