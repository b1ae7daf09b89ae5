"""`open_store`: opens a Store by its URL."""

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from tidegate.errors import ConfigError
from tidegate.stores.memory.store import MemoryStore
from tidegate.urls import redact, server_url, unknown_option

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.clock import Clock
    from tidegate.stores.base import Store

ENTRY_POINT_GROUP = "tidegate.stores"
INTEGER = re.compile(r"[0-9]{1,19}")
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
    """Open the store of a URL: a built-in scheme such as `memory://`, or one that an installed package provides.

    The query holds options: `memory://?max_entries=10000&overflow=deny`.
    """
    if not isinstance(url, str) or ":" not in url:
        raise ConfigError(f"expected a URL such as 'memory://', not {redact(url)!r}", field="store")
    scheme = server_url(url, "store").scheme
    openers = BUILT_IN if scheme in BUILT_IN else _openers()
    if scheme not in openers:
        from difflib import get_close_matches  # noqa: PLC0415 - only for this error

        known = ", ".join(f"{name}://" for name in openers)
        close = get_close_matches(scheme, openers, n=1)
        hint = f"; did you mean '{close[0]}://'?" if close else ""
        raise ConfigError(f"unknown store {scheme}://: expected {known}{hint}", field="store")
    module, _, function = openers[scheme].partition(":")
    opener: Callable[[str, Clock | None], Store] = getattr(import_module(module), function)
    return opener(url, clock)


def _openers() -> dict[str, str]:
    """Map schemes to their openers, as `module:function`, imported on use; packages cannot replace built-in ones."""
    from importlib.metadata import entry_points  # noqa: PLC0415 - slow to import

    found = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    return {**found, **BUILT_IN}


def open_memory(url: str, clock: Clock | None) -> Store:
    """Open a MemoryStore with the options of the URL's query."""
    parts = server_url(url, "store")
    if parts.netloc or parts.path not in ("", "/"):
        message = f"memory:// takes no host or path, only options after a '?', not {redact(url)!r}"
        raise ConfigError(message, field="store")
    options: dict[str, object] = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(options.keys() - {"max_entries", "overflow"})
    if unknown:
        raise ConfigError(unknown_option(unknown[0], ("max_entries", "overflow")), field="store")
    if INTEGER.fullmatch(str(options.get("max_entries", ""))):
        options["max_entries"] = int(str(options["max_entries"]))
    return MemoryStore(**options, clock=clock)  # type: ignore[arg-type]  # MemoryStore checks its options
