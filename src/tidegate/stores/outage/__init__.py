"""Decides calls while a shared store is unavailable, and returns to the store after the outage.

guarded_store.py  GuardedStore: uses the store while it answers, and the fallback during an outage
breaker.py        circuit breaker: whether the store is unavailable, and when to probe it
store_calls.py    calls to the store within the deadline; refunds for cancelled calls
double_cost.py    asks at double cost, while a process may be disconnected
bounded_calls.py  deadlines for stores that do not enforce one themselves
server_clock.py   bounds of the server's time during an outage
fallback.py       decisions without the store: allow, deny, or spend this process's share
local_share.py    on_store_error: local: this process's share of a limit, and charging it to the store afterwards
peers.py          which processes share a policy, what each may spend when disconnected, and whether one is disconnected
open.py           opens a guarded store from a URL
"""

from tidegate.stores.outage.guarded_store import GuardedStore
from tidegate.stores.outage.open import open_guarded

__all__ = ["GuardedStore", "open_guarded"]
