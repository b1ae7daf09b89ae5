"""Stores, which keep the state of keys. Packages add URL schemes to `open_store` by entry points `tidegate.stores`."""

from tidegate.stores.base import Store
from tidegate.stores.memory.store import MemoryStore
from tidegate.stores.registry import open_store

__all__ = ["MemoryStore", "Store", "open_store"]
