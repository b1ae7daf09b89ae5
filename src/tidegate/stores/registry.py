"""From a URL to a Store."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

from tidegate.errors import ConfigError
from tidegate.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.clock import Clock
    from tidegate.stores.base import Store

GROUP = "tidegate.stores"


def open_store(url: str, *, clock: Clock | None = None) -> Store:
    """Open the store that a URL names: `memory://`, or a scheme that an installed package provides.

    Options follow as a query: `memory://?max_entries=10000&overflow=deny`.
    """
    scheme = urlsplit(url).scheme if isinstance(url, str) else ""
    if not scheme:
        raise ConfigError(f"a store is named by a URL such as 'memory://', not {url!r}", field="store")
    opener = _openers().get(scheme)
    if opener is None:
        known = ", ".join(f"{name}://" for name in _openers())
        raise ConfigError(f"no store for {scheme}:// in {url!r}: known are {known}", field="store")
    return opener(url, clock)


def _openers() -> dict[str, Callable[[str, Clock | None], Store]]:
    found = {point.name: _load(point) for point in entry_points(group=GROUP)}
    return {"memory": open_memory, **found}


def _load(point: object) -> Callable[[str, Clock | None], Store]:
    """Import a third party's opener only when its scheme is asked for."""
    return lambda url, clock: point.load()(url, clock)  # type: ignore[attr-defined,no-any-return]  # an EntryPoint


def open_memory(url: str, clock: Clock | None) -> Store:
    """Open a MemoryStore with the options of the URL's query."""
    parts = urlsplit(url)
    if parts.netloc or parts.path not in ("", "/"):
        raise ConfigError(f"memory:// takes no host or path, as in {url!r}: options follow a '?'", field="store")
    options: dict[str, object] = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(options.keys() - {"max_entries", "overflow"})
    if unknown:
        raise ConfigError(f"memory:// has no option {unknown[0]!r}: use max_entries or overflow", field="store")
    if str(options.get("max_entries", "")).isdecimal():
        options["max_entries"] = int(str(options["max_entries"]))
    return MemoryStore(**options, clock=clock)  # type: ignore[arg-type]  # MemoryStore checks its options
