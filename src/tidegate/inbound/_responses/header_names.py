"""The names of the rate limit headers: a style, or custom names in place of `X-RateLimit-*`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from tidegate._runtime.suggestions import did_you_mean
from tidegate.errors import ConfigError
from tidegate.headers import STYLES, check_style
from tidegate.headers._dialects import RETRY_AFTER, X_RATELIMIT

if TYPE_CHECKING:
    from tidegate.headers import Style

DEFAULT_NAMES: Final = {"limit": X_RATELIMIT.limit, "remaining": X_RATELIMIT.remaining, "reset": X_RATELIMIT.reset}
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def read_header_names(headers: object) -> tuple[Style, dict[str, str]]:
    """Return the style and the names of the X headers; raises ConfigError.

    A mapping such as `{"limit": "X-My-Limit"}` means the style `x` with these names; the others keep theirs.
    """
    if not isinstance(headers, Mapping):
        if isinstance(headers, str) and headers in STYLES:
            return headers, DEFAULT_NAMES  # type: ignore[return-value]  # one of the styles
        check_style(headers)
    for role, name in headers.items():  # type: ignore[attr-defined]  # a mapping
        _check_role(role)
        if not isinstance(name, str) or not HEADER_NAME.fullmatch(name):
            message = f"must be the name of a header such as 'X-My-{role.title()}', not {name!r}"
            raise ConfigError(message, field=f"headers.{role}")
    names = {**DEFAULT_NAMES, **headers}  # type: ignore[dict-item]  # a mapping
    taken = {RETRY_AFTER.lower(): "Retry-After"}
    for role, name in names.items():
        other = taken.setdefault(name.lower(), role)
        if other != role:
            raise ConfigError(f"{name!r} is already the name of {other}", field=f"headers.{role}")
    return "x", names


def _check_role(role: object) -> None:
    if role in DEFAULT_NAMES:
        return
    if str(role).lower().replace("-", "_") == "retry_after":
        raise ConfigError(
            "Retry-After cannot be renamed: clients and proxies read only this name", field=f"headers.{role}"
        )
    expected = did_you_mean(role, DEFAULT_NAMES) or f"expected one of {', '.join(DEFAULT_NAMES)}"
    raise ConfigError(f"unknown header: {expected}", field=f"headers.{role}")
