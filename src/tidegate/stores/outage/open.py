"""From a URL to a guarded store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, urlencode

from tidegate.core.bounds import SECOND
from tidegate.core.limit import parse_period
from tidegate.errors import ConfigError
from tidegate.stores.outage.guarded_store import CONNECT_DEADLINE, GuardedStore
from tidegate.stores.registry import open_store
from tidegate.urls import server_url

if TYPE_CHECKING:
    from tidegate.clock import Clock
    from tidegate.stores.base import Store

OPTIONS: Final = ("deadline", "local_for", "beat")
DEFAULT_DEADLINE: Final = 0.05
# A file does not hang as a server behind a network does: who waits for it waits for others that decide.
DEADLINES: Final = {"sqlite": 2.0}
# How stores that keep a deadline by themselves are told it: their option, and the unit this is written in.
REDIS_SCHEMES: Final = ("redis", "rediss", "valkey", "valkeys")
TIMEOUT_OPTIONS: Final = {
    **{f"{scheme}{kind}": ("timeout", "") for scheme in REDIS_SCHEMES for kind in ("", "+cluster", "+sentinel")},
    "sqlite": ("busy_timeout", "s"),
    "postgresql": ("silence", ""),
    "postgres": ("silence", ""),
}


def open_guarded(url: str, *, clock: Clock | None = None) -> Store:
    """Open the store that a URL names, guarded unless it is in memory, where nothing can be lost.

    The guard's options stand in the URL beside the store's: `redis://host?deadline=100ms&local_for=1h&beat=1s`.
    """
    parts = server_url(url, "store") if isinstance(url, str) and ":" in url else None
    if parts is None or parts.scheme == "memory":
        return open_store(url, clock=clock)
    query = parse_qsl(parts.query, keep_blank_values=True)
    options = {name: _seconds(name, value) for name, value in query if name in OPTIONS}
    rest = [(name, value) for name, value in query if name not in OPTIONS]
    options.setdefault("deadline", DEADLINES.get(parts.scheme, DEFAULT_DEADLINE))
    name, unit = TIMEOUT_OPTIONS.get(parts.scheme, ("", ""))
    if name and name not in dict(rest):
        rest.append((name, f"{options['deadline']:g}{unit}"))
    if name == "silence" and "connect_timeout" not in dict(rest):
        rest.append(("connect_timeout", f"{max(options['deadline'], CONNECT_DEADLINE):g}"))
    store = open_store(f"{url.partition('?')[0]}?{urlencode(rest)}".rstrip("?"), clock=clock)
    return GuardedStore(store, bounded=bool(name), **options)  # type: ignore[arg-type]  # OPTIONS are all numbers


def _seconds(name: str, text: str) -> float:
    try:
        return parse_period(float(text) if text.replace(".", "").isdecimal() else text) / SECOND
    except ConfigError as error:
        raise ConfigError(f"cannot use this store URL: {error}", field=name) from None
