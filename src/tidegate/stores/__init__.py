"""WHERE state lives. `open_store` takes a URL; third parties add schemes by the entry point group `tidegate.stores`."""

from tidegate.stores.base import Store
from tidegate.stores.memory.store import MemoryStore
from tidegate.stores.registry import open_store

__all__ = ["MemoryStore", "Store", "open_store"]
