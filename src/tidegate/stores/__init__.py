"""Stores, which keep the state of keys. Packages add URL schemes to `open_store` by entry points `tidegate.stores`.

The classes of stores with a server or a file are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from tidegate.errors import CollectionFull, ValueConflict
from tidegate.stores._base import Ask, LostCorrection, Store, TryAcquire, WaitQueue
from tidegate.stores._cancellation import Correction, corrections
from tidegate.stores._delegating import DelegatingStore
from tidegate.stores._memory.group_shares import GroupOf
from tidegate.stores._memory.store import MemoryStore
from tidegate.stores._merged_asks import MergedAsks, merge
from tidegate.stores._registry import open_store
from tidegate.stores._values import ANYTHING, KEEP, Anything, Collection, Keep, Value, Write

if TYPE_CHECKING:
    from tidegate.stores._lease import Lease, LeasedStore, read_lease
    from tidegate.stores._outage import GuardedStore, open_guarded
    from tidegate.stores._postgres import PostgresStore, open_postgres
    from tidegate.stores._redis import RedisAddress, RedisStore, open_redis
    from tidegate.stores._sqlite import SQLiteStore, Synchronous, open_sqlite

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
    "GuardedStore",
    "Keep",
    "Lease",
    "LeasedStore",
    "LostCorrection",
    "MemoryStore",
    "MergedAsks",
    "PostgresStore",
    "RedisAddress",
    "RedisStore",
    "SQLiteStore",
    "Store",
    "Synchronous",
    "TryAcquire",
    "Value",
    "ValueConflict",
    "WaitQueue",
    "Write",
    "corrections",
    "merge",
    "open_guarded",
    "open_postgres",
    "open_redis",
    "open_sqlite",
    "open_store",
    "read_lease",
]

if not TYPE_CHECKING:  # a type checker would accept any name
    NAMES_BY_MODULE = {
        "tidegate.stores._lease": "Lease LeasedStore read_lease",
        "tidegate.stores._outage": "GuardedStore open_guarded",
        "tidegate.stores._postgres": "PostgresStore open_postgres",
        "tidegate.stores._redis": "RedisAddress RedisStore open_redis",
        "tidegate.stores._sqlite": "SQLiteStore Synchronous open_sqlite",
    }

    def __getattr__(name: str) -> object:
        """Import a public name from its module."""
        for module, names in NAMES_BY_MODULE.items():
            if name in names.split():
                value = globals()[name] = getattr(import_module(module), name)
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
