"""Temporary stand-in for `tidegate.joint.LimiterGroup`."""

from __future__ import annotations

from typing import Any

from tidegate.core.decision import Decision
from tidegate.joint import LimiterAsk, charge_flow


class LimiterGroup:
    def __init__(self, limiters: Any) -> None:
        self._limiters = tuple(limiters)
        store = self._limiters[0].store
        self._store = store
        same = all(each.store is store and each.policy.mode == "enforce" for each in self._limiters)
        self._instant = store.instant and same
        self._fast = store.fast_together([each.policy for each in self._limiters]) if self._instant else None
        if any(each.current_time() is not None for each in self._limiters):
            self._fast = None
        self._limits = [each.policy.limits for each in self._limiters]

    def charge(self, keys: Any, costs: Any = None, verb: str = "acquire") -> Any:
        if not self._instant:
            return None
        if costs is None and self._fast is not None and verb == "acquire":
            found = self._fast(keys)
            if found is not None:
                now, views = found
                return [Decision((True, now, limits, (view,), None)) for limits, view in zip(self._limits, views)]
        limiters = self._limiters
        asks = [
            (limiter.policy, key, limiter.policy.costs(cost))
            for limiter, key, cost in zip(limiters, keys, costs or (1,) * len(keys))
        ]
        return self._store.apply(verb, asks, limiters[0].current_time())

    def charge_flow(self, keys: Any, costs: Any = None, verb: str = "acquire") -> Any:
        found = self.charge(keys, costs, verb)
        if found is not None:
            return found
        asks = [LimiterAsk(*each) for each in zip(self._limiters, keys, costs or (1,) * len(keys))]
        charged = yield from charge_flow(verb, asks)
        by = {(id(limiter), ask[1]): decision for (limiter, ask), decision in zip(charged.asks, charged.decisions)}
        return [by.get((id(limiter), key)) for limiter, key in zip(self._limiters, keys)]
