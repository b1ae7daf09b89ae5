"""Makes decisions in memory, from shares of permits that it takes in advance from a shared store.

store.py           LeasedStore: runs the flows in threads and tasks; what needs no request is decided by `specialize`
manager.py         LeaseManager: acquires, renews and returns shares, as flows of store requests
policy_leases.py   the leases of one policy
key_lease.py       the lease of one key: a table of states and events, and the size of the next request
share.py           permits of one key that a process may use for a while
denial.py          denials in memory, until the store is asked again
terms.py           how long a lease lasts, and the stricter limits for the store; the proof that no limit is exceeded
renewal.py         renews and returns shares in the background
steps.py           the steps of the flows, and the background jobs
alternatives.py    charges the first of several alternatives that a share or the store allows
"""

from tidegate.stores._lease.store import LeasedStore
from tidegate.stores._lease.terms import Lease, read_lease

__all__ = ["Lease", "LeasedStore", "read_lease"]
