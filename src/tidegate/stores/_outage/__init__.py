"""Decides calls while a shared store is unavailable, and returns to the store after the outage.

guarded_store.py  GuardedStore: uses the store while it answers, and the fallback during an outage
breaker.py        circuit breaker: whether the store is unavailable, and when to probe it
fallback.py       decisions without the store: allow, deny, or by this process's share; what is settled afterwards
local_share.py    on_store_error: local: this process's share of a limit, and charging it to the store afterwards
process_share.py  which part of every limit this process may admit: processes count each other through the store
open.py           opens a guarded store from a URL
"""

from tidegate.stores._outage.guarded_store import GuardedStore
from tidegate.stores._outage.open import open_guarded

__all__ = ["GuardedStore", "open_guarded"]
