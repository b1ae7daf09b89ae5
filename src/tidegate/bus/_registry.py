"""Opens a Bus by its URL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate._runtime.urls import find_opener, redact, split_url
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate._runtime.clock import Clock
    from tidegate.bus._base import Bus

ENTRY_POINT_GROUP: Final = "tidegate.buses"
BUILT_IN: Final = {
    "local": "tidegate.bus._local:open_local",
    "nats": "tidegate.bus._nats:open_nats",
    "tls": "tidegate.bus._nats:open_nats",
    "redis": "tidegate.bus._redis:open_redis",
    "rediss": "tidegate.bus._redis:open_redis",
    "valkey": "tidegate.bus._redis:open_redis",
    "valkeys": "tidegate.bus._redis:open_redis",
}


def open_bus(url: str, *, clock: Clock | None = None) -> Bus:
    """Open the bus of a URL: `local://NAME`, `nats://host:4222`, `redis://host:6379`.

    Returns immediately and keeps trying to connect; `bus.wait(seconds)` returns whether there is a connection.
    """
    if not isinstance(url, str) or ":" not in url:
        raise ConfigError(f"must be a URL such as 'nats://127.0.0.1:4222', not {redact(url)!r}", field="bus")
    scheme = "local" if url.startswith("local:") else split_url(url, "bus").scheme
    opener: Callable[[str, Clock | None], Bus] = find_opener(scheme, BUILT_IN, ENTRY_POINT_GROUP, "bus")
    return opener(url, clock)
