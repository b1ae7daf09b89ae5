"""Calls of a memory store that its tests share."""

from tidegate import Limit, Policy
from tidegate.stores import Store

NOW = 1_750_000_000 * 1_000_000
SECOND = 1_000_000
HOUR = 3600 * SECOND
HOURLY = Policy("hourly", (Limit(1, "1h"),))


def ask(store, key, now=NOW, policy=HOURLY, costs=(1,), verb="acquire", at=None):
    return store.apply_one(verb, policy, key, costs, now, at)


class OnlyApply(Store):
    """A store of another package: it has nothing but `apply`."""

    def __init__(self, inner):
        super().__init__(inner.clock)
        self.inner = inner

    def apply(self, verb, asks, now=None, at=None):
        return self.inner.apply(verb, asks, now, at)
