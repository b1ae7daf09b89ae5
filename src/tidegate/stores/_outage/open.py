"""Opens a guarded store from a URL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, urlencode

from tidegate._runtime.urls import server_url
from tidegate.core._bounds import SECOND
from tidegate.core._limit import parse_period
from tidegate.errors import ConfigError
from tidegate.stores._outage.guarded_store import GuardedStore
from tidegate.stores._registry import open_store

if TYPE_CHECKING:
    from tidegate._runtime.clock import Clock
    from tidegate.stores._base import Store

OPTIONS: Final = ("deadline", "processes")
DEFAULT_DEADLINE: Final = 0.05
MIN_DEADLINE: Final = 0.001  # seconds
MAX_DEADLINE: Final = 1_000_000
CONNECT_DEADLINE: Final = 1.0  # seconds for a call that has to connect
# A file does not hang like a server behind a network: a call that waits usually waits for other decisions.
DEADLINES: Final = {"sqlite": 2.0}
# The option that sets the deadline of stores that enforce it themselves, and the unit of its value.
REDIS_SCHEMES: Final = ("redis", "rediss", "valkey", "valkeys")
TIMEOUT_OPTIONS: Final = {
    **{f"{scheme}{kind}": ("timeout", "") for scheme in REDIS_SCHEMES for kind in ("", "+cluster", "+sentinel")},
    "sqlite": ("busy_timeout", "s"),
    "postgresql": ("silence", ""),
    "postgres": ("silence", ""),
}


def open_guarded(url: str, *, clock: Clock | None = None) -> Store:
    """Open the store at a URL. It is guarded unless it is in memory, which is always available.

    The URL contains the options of GuardedStore and of the store: `redis://host?deadline=100ms&processes=4`.
    """
    parts = server_url(url, "store") if isinstance(url, str) and ":" in url else None
    if parts is None or parts.scheme == "memory":
        return open_store(url, clock=clock)
    query = parse_qsl(parts.query, keep_blank_values=True)
    name, unit = TIMEOUT_OPTIONS.get(parts.scheme, ("", ""))
    own = OPTIONS if name else ("processes",)  # a store of another package reads its deadline itself
    options = {option: _read_option(option, value) for option, value in query if option in own}
    rest = [(option, value) for option, value in query if option not in own]
    deadline = options.pop("deadline", DEADLINES.get(parts.scheme, DEFAULT_DEADLINE))
    if name and name not in dict(rest):
        rest.append((name, f"{deadline:g}{unit}"))
    if name == "silence" and "connect_timeout" not in dict(rest):
        rest.append(("connect_timeout", f"{max(deadline, CONNECT_DEADLINE):g}"))
    store = open_store(f"{url.partition('?')[0]}?{urlencode(rest)}".rstrip("?"), clock=clock)
    return GuardedStore(store, **options)  # type: ignore[arg-type]  # the only option left, processes, is an integer


def _read_option(name: str, text: str) -> float:
    if name == "processes":
        if not text.isdecimal():
            raise ConfigError(f"cannot use this store URL: must be an integer, not {text!r}", field=name)
        return int(text)
    try:
        deadline = parse_period(float(text) if text.replace(".", "").isdecimal() else text) / SECOND
    except ConfigError as error:
        raise ConfigError(f"cannot use this store URL: {error}", field=name) from None
    if not MIN_DEADLINE <= deadline <= MAX_DEADLINE:
        message = f"cannot use this store URL: must be from {MIN_DEADLINE:g} to {MAX_DEADLINE:,} seconds, not {text!r}"
        raise ConfigError(message, field=name)
    return deadline
