"""From a URL to a Store."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from tidegate.errors import ConfigError
from tidegate.stores.memory.store import MemoryStore
from tidegate.urls import redact, server_url

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.clock import Clock
    from tidegate.stores.base import Store

ENTRY_POINT_GROUP = "tidegate.stores"
WHOLE = re.compile(r"[0-9]{1,19}")
BUILT_IN = {
    "memory": "tidegate.stores.registry:open_memory",
    "sqlite": "tidegate.stores.sqlite:open_sqlite",
    "postgresql": "tidegate.stores.postgres:open_postgres",
    "postgres": "tidegate.stores.postgres:open_postgres",
    "redis": "tidegate.stores.redis:open_redis",
    "rediss": "tidegate.stores.redis:open_redis",
    "valkey": "tidegate.stores.redis:open_redis",
    "valkeys": "tidegate.stores.redis:open_redis",
    "redis+cluster": "tidegate.stores.redis:open_redis",
    "rediss+cluster": "tidegate.stores.redis:open_redis",
    "redis+sentinel": "tidegate.stores.redis:open_redis",
    "rediss+sentinel": "tidegate.stores.redis:open_redis",
}


def open_store(url: str, *, clock: Clock | None = None) -> Store:
    """Open the store that a URL names: `memory://`, or a scheme that an installed package provides.

    Options follow as a query: `memory://?max_entries=10000&overflow=deny`.
    """
    if not isinstance(url, str) or ":" not in url:
        raise ConfigError(f"a store is named by a URL such as 'memory://', not {redact(url)!r}", field="store")
    scheme = server_url(url, "store").scheme
    openers = _openers()
    if scheme not in openers:
        known = ", ".join(f"{name}://" for name in openers)
        raise ConfigError(f"no store for {scheme}://: known are {known}", field="store")
    module, _, function = openers[scheme].partition(":")
    opener: Callable[[str, Clock | None], Store] = getattr(import_module(module), function)
    return opener(url, clock)


def _openers() -> dict[str, str]:
    """Map schemes to where their openers are, as `module:function`, imported only when asked for; ours stay ours."""
    found = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    return {**found, **BUILT_IN}


def open_memory(url: str, clock: Clock | None) -> Store:
    """Open a MemoryStore with the options of the URL's query."""
    parts = server_url(url, "store")
    if parts.netloc or parts.path not in ("", "/"):
        message = f"memory:// takes no host or path, as in {redact(url)!r}: options follow a '?'"
        raise ConfigError(message, field="store")
    options: dict[str, object] = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(options.keys() - {"max_entries", "overflow"})
    if unknown:
        raise ConfigError(f"memory:// has no option {unknown[0]!r}: use max_entries or overflow", field="store")
    if WHOLE.fullmatch(str(options.get("max_entries", ""))):
        options["max_entries"] = int(str(options["max_entries"]))
    return MemoryStore(**options, clock=clock)  # type: ignore[arg-type]  # MemoryStore checks its options
