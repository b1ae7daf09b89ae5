"""Decides at memory speed from shares of permits, taken ahead from any shared store in one round trip.

store.py    LeasedStore: drives the steps for threads and tasks; the short way of a call that a share answers
steps.py    what is asked, answered, renewed and returned, as generators
book.py     what is held under one policy
share.py    what is held of one key
terms.py    how long a lease lasts, and under which limits the shared one is never exceeded: the proof
keeper.py   renews and returns in the background
"""

from tidegate.stores.lease.store import LeasedStore
from tidegate.stores.lease.terms import Lease, read_lease

__all__ = ["Lease", "LeasedStore", "read_lease"]
