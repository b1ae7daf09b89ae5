"""A store of another package: it has nothing but `apply`, counts its calls, and tells what was charged."""

from tidegate.stores import MemoryStore, Store


class RecordingStore(Store):
    """Decides as a memory store does, or as `inner` does; `calls` counts what charges or corrects."""

    instant = True
    decides_alternatives = True

    def __init__(self, clock, inner=None):
        super().__init__(clock)
        self.calls = 0
        self._inner = inner or MemoryStore(clock=clock)
        if inner is not None:
            self.instant = False
        self._policies = {}
        self._asked = set()

    def apply(self, verb, asks, now=None, at=None):
        self.calls += verb != "peek"
        self._policies |= {(policy.name, key): policy for policy, key, _ in asks}
        self._asked |= {(policy, key) for policy, key, _ in asks}
        return self._inner.apply(verb, asks, now, at)

    def usages(self):
        """Return the permits in use, by policy and key."""
        found = {}
        for (name, key), policy in self._policies.items():
            (peek,) = self._inner.apply("peek", [(policy, key, (0,) * len(policy.limits))])
            if used := policy.limits[0].burst - peek.views[0][0]:
                found[name, key] = used
        return found

    def usages_by_limit(self):
        """Return the permits in use, by name of the limit and key, also of policies that share a name."""
        found = {}
        for policy, key in self._asked:
            (peek,) = self._inner.apply("peek", [(policy, key, (0,) * len(policy.limits))])
            for limit, view in zip(policy.limits, peek.views, strict=True):
                if used := limit.burst - view[0]:
                    found[limit.name, key] = used
        return found

    def close(self):
        self._inner.close()
