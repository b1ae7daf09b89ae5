"""Stores, which keep the state of keys. Packages add URL schemes to `open_store` by entry points `tidegate.stores`."""

from tidegate.errors import CollectionFull, ValueConflict
from tidegate.stores._base import Ask, Store, TryAcquire, WaitQueue
from tidegate.stores._cancellation import Correction, corrections
from tidegate.stores._delegating import DelegatingStore
from tidegate.stores._memory.group_shares import GroupOf
from tidegate.stores._memory.store import MemoryStore
from tidegate.stores._merged_asks import MergedAsks, merge
from tidegate.stores._registry import open_store
from tidegate.stores._values import ANYTHING, KEEP, Anything, Collection, Keep, Value, Write

__all__ = [
    "ANYTHING",
    "KEEP",
    "Anything",
    "Ask",
    "Collection",
    "CollectionFull",
    "Correction",
    "DelegatingStore",
    "GroupOf",
    "Keep",
    "MemoryStore",
    "MergedAsks",
    "Store",
    "TryAcquire",
    "Value",
    "ValueConflict",
    "WaitQueue",
    "Write",
    "corrections",
    "merge",
    "open_store",
]
