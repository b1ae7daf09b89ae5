"""What calls get while a shared store is lost, and how it is taken up again.

guard.py      GuardedStore: asks the store while it answers, decides without it while it does not
breaker.py    whether the store is lost, and when to look again
bounded.py    a deadline for stores that cannot keep one themselves
reckoning.py  what the server's clock shows, while the server cannot be asked
peers.py      who else shares a policy, what each may spend when cut off, and whether somebody is
share.py      on_store_error: local: deciding on this process's share, and charging that afterwards
opening.py    from a URL to a guarded store
"""

from tidegate.stores.outage.guarded_store import GuardedStore
from tidegate.stores.outage.open import open_guarded

__all__ = ["GuardedStore", "open_guarded"]
