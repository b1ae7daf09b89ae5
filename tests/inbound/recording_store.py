"""A store of another package: it has nothing but `apply`, counts its calls, and tells what was charged."""

from tidegate.stores import MemoryStore, Store


class RecordingStore(Store):
    """Decides as a memory store does; `calls` counts what charges or corrects."""

    instant = True
    decides_alternatives = True

    def __init__(self, clock):
        super().__init__(clock)
        self.calls = 0
        self._inner = MemoryStore(clock=clock)
        self._policies = {}

    def apply(self, verb, asks, now=None, at=None):
        self.calls += verb != "peek"
        self._policies |= {(policy.name, key): policy for policy, key, _ in asks}
        return self._inner.apply(verb, asks, now, at)

    def usages(self):
        """Return the permits in use, by policy and key."""
        found = {}
        for (name, key), policy in self._policies.items():
            (peek,) = self._inner.apply("peek", [(policy, key, (0,) * len(policy.limits))])
            if used := policy.limits[0].burst - peek.views[0][0]:
                found[name, key] = used
        return found
