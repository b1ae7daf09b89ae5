"""`open_store`: opens a Store by its URL."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from tidegate._runtime.urls import find_opener, find_scheme, redact, server_url, unknown_option
from tidegate.errors import ConfigError
from tidegate.stores._memory.store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate._runtime.clock import Clock
    from tidegate.stores._base import Store

ENTRY_POINT_GROUP = "tidegate.stores"
INTEGER = re.compile(r"[0-9]{1,19}")
MEMORY_OPTIONS = ("max_entries", "overflow")
BUILT_IN = {
    "memory": "tidegate.stores._registry:open_memory",
    "sqlite": "tidegate.stores._sqlite:open_sqlite",
    "postgresql": "tidegate.stores._postgres:open_postgres",
    "postgres": "tidegate.stores._postgres:open_postgres",
    "redis": "tidegate.stores._redis:open_redis",
    "rediss": "tidegate.stores._redis:open_redis",
    "valkey": "tidegate.stores._redis:open_redis",
    "valkeys": "tidegate.stores._redis:open_redis",
    "redis+cluster": "tidegate.stores._redis:open_redis",
    "rediss+cluster": "tidegate.stores._redis:open_redis",
    "redis+sentinel": "tidegate.stores._redis:open_redis",
    "rediss+sentinel": "tidegate.stores._redis:open_redis",
}


def open_store(url: str, *, clock: Clock | None = None) -> Store:
    """Open the store of a URL: a built-in scheme such as `memory://`, or one that an installed package provides.

    The query holds options: `memory://?max_entries=10000&overflow=deny`.
    """
    check_is_url(url)
    scheme = server_url(url, "store").scheme
    opener: Callable[[str, Clock | None], Store] = find_opener(scheme, BUILT_IN, ENTRY_POINT_GROUP, "store")
    return opener(url, clock)


def check_is_url(url: object) -> None:
    """Raise ConfigError if this is not a URL."""
    if not isinstance(url, str) or ":" not in url:
        raise ConfigError(f"expected a URL such as 'memory://', not {redact(url)!r}", field="store")


def check_scheme(url: str) -> None:
    """Raise ConfigError if URLs with this scheme open no store. Opens and imports nothing."""
    check_is_url(url)
    find_scheme(url.partition(":")[0].lower(), BUILT_IN, ENTRY_POINT_GROUP, "store")


def open_memory(url: str, clock: Clock | None) -> Store:
    """Open a MemoryStore with the options of the URL's query."""
    parts = server_url(url, "store")
    if parts.netloc or parts.path not in ("", "/"):
        message = f"memory:// takes no host or path, only options after a '?', not {redact(url)!r}"
        raise ConfigError(message, field="store")
    options: dict[str, object] = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(options.keys() - set(MEMORY_OPTIONS))
    if unknown:
        raise ConfigError(unknown_option(unknown[0], MEMORY_OPTIONS), field="store")
    if INTEGER.fullmatch(str(options.get("max_entries", ""))):
        options["max_entries"] = int(str(options["max_entries"]))
    return MemoryStore(**options, clock=clock)  # type: ignore[arg-type]  # MemoryStore checks its options
