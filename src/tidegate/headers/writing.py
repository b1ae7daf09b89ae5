"""A Decision as header fields."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal, get_args
from urllib.parse import quote

import http_sf

from tidegate.core.algorithms import NEVER
from tidegate.core.bounds import SECOND, ceil_div
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core import Decision, Limit
    from tidegate.core.algorithms import View

Style = Literal["x", "ietf", "both", "none"]
STYLES: Final[tuple[str, ...]] = get_args(Style)
LARGEST: Final = 10**15 - 1  # the largest Integer of a structured field
PRINTABLE: Final = "".join(map(chr, range(0x20, 0x7F)))  # what a String of a structured field may hold


def write(decision: Decision, style: Style = "x") -> list[tuple[str, str]]:
    """Tell a client how it stands, as header fields.

    `x` writes `X-RateLimit-Limit`, `-Remaining` and `-Reset` (an instant: whole seconds since 1970, rounded up) of the
    tightest limit; `ietf` writes `RateLimit-Policy` and `RateLimit` with all limits; `both` and `none` do as they say.

    A denial carries `Retry-After` in any style: whole seconds, rounded up, at least 1; not if it never will be allowed.
    """
    check_style(style)
    limits, views = decision[2], decision.views
    fields = []
    if style in ("x", "both"):
        fields += _x_fields(limits, views, decision.at)
    if style in ("ietf", "both"):
        fields.append(("RateLimit-Policy", ", ".join(_policy(limit, decision.at) for limit in limits)))
        fields.append(("RateLimit", ", ".join(map(_state, limits, views))))
    if not decision.allowed:
        waits = [view[1] for view in views]
        if NEVER not in waits:
            fields.append(("Retry-After", str(max(1, ceil_div(max(waits), SECOND)))))
    return fields


def check_style(style: object) -> None:
    """Refuse a style that is none."""
    if style not in STYLES:
        raise ConfigError(f"must be one of {', '.join(STYLES)}, not {style!r}", field="headers")


def _x_fields(limits: Sequence[Limit], views: Sequence[View], at: int) -> list[tuple[str, str]]:
    limit, (remaining, _, reset) = tightest(limits, views) if len(limits) > 1 else (limits[0], views[0])
    return [
        ("X-RateLimit-Limit", str(limit.quota)),
        ("X-RateLimit-Remaining", str(min(remaining, limit.quota))),
        ("X-RateLimit-Reset", str(ceil_div(at + reset, SECOND))),
    ]


def tightest(limits: Sequence[Limit], views: Sequence[View]) -> tuple[Limit, View]:
    """Choose the limit that matters most to the caller.

    Of those that said no, the one that will do so longest; if none did, the one with the fewest permits left, and among
    equals the one that takes longest to reset.
    """

    def tightness(pair: tuple[Limit, View]) -> tuple[bool, bool, int, int, int]:
        _, (remaining, retry, reset) = pair
        return retry != 0, retry == NEVER, retry, -remaining, reset

    return max(zip(limits, views, strict=True), key=tightness)


def _policy(limit: Limit, at: int) -> str:
    """Write an item of RateLimit-Policy: the quota, its unit unless that is requests, and the window in seconds."""
    item = f"{_string(limit.name)};q={min(limit.quota, LARGEST)}"
    if limit.algorithm == "concurrency":
        unit = "concurrent-requests" if limit.unit == "requests" else limit.unit
        return f"{item};qu={_string(unit)}"  # slots have no window: they come back when they are released
    if limit.unit != "requests":
        item += f";qu={_string(limit.unit)}"
    length = limit.length
    if limit.calendar is not None:
        start, end = limit.calendar.window(at)
        length = end - start
    # There is no way to write a fraction of a second, and the window is optional.
    return item if length % SECOND else f"{item};w={length // SECOND}"


def _state(limit: Limit, view: View) -> str:
    """Write an item of RateLimit: what remains, and for how many seconds that is all there is.

    For a limit that said no, that is until the call would be allowed, so that Retry-After never points before it.
    """
    remaining, retry, reset = view
    item = f"{_string(limit.name)};r={min(remaining, limit.quota, LARGEST)}"
    if limit.algorithm == "concurrency":
        return item
    return f"{item};t={ceil_div(retry if retry > 0 else reset, SECOND)}"


@lru_cache(maxsize=1024)
def _string(text: str) -> str:
    """Write a String; characters that one cannot hold are percent-encoded."""
    return http_sf.ser(quote(text, safe=PRINTABLE, errors="surrogatepass"))
