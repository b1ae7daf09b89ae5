"""Replays requests that were sent to providers: the gate of the transports decides, and nothing waits.

A request of the log names a URL, or a model if there is one provider. A request that the quota denies at once would
have waited: the time until it would be allowed is in the outcome.
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import ConfigError
from tidegate.outbound._quota.gate import Gate
from tidegate.plan._rules.base import UNLIMITED, Outcome, PolicyDecision
from tidegate.plan._rules.endpoints import endpoint_name
from tidegate.stores._memory.store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidegate._policy import Cost
    from tidegate.core._limit import Limit
    from tidegate.outbound import Provider, Providers
    from tidegate.outbound._quota.pending_charge import PendingCharge
    from tidegate.plan._clock import ReplayClock
    from tidegate.plan._logs.batch import LogSender, LogSubject

MAX_KEYS: Final = 50_000_000


class OutboundRules:
    """The quotas of providers."""

    def __init__(self, providers: Providers, clock: ReplayClock, *, has_durations: bool = True) -> None:
        """Replay against these providers."""
        self.clock: ReplayClock = clock
        self.providers: Providers = providers
        self.limits: Mapping[str, tuple[Limit, ...]] = {each.title: each.limits for each in self.providers}
        if not has_durations and any(limit.rules.holds_slots for own in self.limits.values() for limit in own):
            raise ConfigError("a limit of concurrent requests can only be replayed from a log with durations")
        self.patterns: dict[str, list[str]] = {}
        self.notes: list[str] = ["a denied request would have waited in the client; the replay does not move it"]
        self.gate: Gate = Gate(self.providers, MemoryStore(clock=clock, max_entries=MAX_KEYS), timeout=0, reload=None)
        self._open: list[tuple[int, int, PendingCharge]] = []
        self._order = count()

    @property
    def due(self) -> int | None:
        """When the next response ends."""
        return self._open[0][0] if self._open else None

    def settle(self) -> None:
        """Settle the charges of responses that have ended."""
        now = self.clock.steady()
        while self._open and self._open[0][0] <= now:
            heapq.heappop(self._open)[2].commit()

    def settle_later(self, pending: PendingCharge, duration: int) -> None:
        """Settle a charge when its response has ended; without a duration, at once."""
        if duration <= 0:
            pending.commit()
        else:
            heapq.heappush(self._open, (self.clock.steady() + duration, next(self._order), pending))

    def find_key(self, sender: LogSender) -> str:
        """Return who sent a request; the quota of a provider does not depend on it."""
        return sender.name or "all"

    def name_of(self, key: object) -> str:
        """Return the name of a sender."""
        return str(key)

    def find(self, subject: LogSubject) -> OutboundSubject:
        """Return the provider of a request."""
        return OutboundSubject(self, subject)

    def close(self) -> None:
        """Close the gate."""
        self.gate.close()


class OutboundSubject:
    """Requests to one URL, or for one model."""

    def __init__(self, rules: OutboundRules, subject: LogSubject) -> None:
        """Find the provider."""
        self._rules = rules
        providers = list(rules.providers)
        self.provider: Provider | None = rules.providers.match(subject.path) if "://" in subject.path else None
        if "://" not in subject.path:
            if len(providers) != 1:
                names = ", ".join(each.name for each in providers)
                raise ConfigError(f"the log does not say which of the providers {names} a request went to: it needs a "
                                  "column 'url'")  # fmt: skip
            self.provider = providers[0]
        self._target: Any = subject.path if "://" in subject.path else providers[0].name
        self.limited: bool = self.provider is not None
        self.policies: tuple[str, ...] = () if self.provider is None else (self.provider.title,)
        self.endpoint: str = endpoint_name(*subject, ()) if subject.method else subject.path or str(self._target)

    def decide(self, key: object, status: int, duration: int, cost: Cost) -> Outcome:
        """Take permits as `Gate.try_acquire` does."""
        del key, status
        provider = self.provider
        if provider is None:
            return UNLIMITED
        given: Cost | None = None if cost == 1 else cost
        if not isinstance(cost, int):
            given = {unit: amount for unit, amount in cost.items() if unit in provider.policy.units}
        pending = self._rules.gate.try_acquire(self._target, given)
        if pending.decision is None:
            return UNLIMITED
        charged = (PolicyDecision(provider.title, pending.decision),)
        if not pending.allowed:
            return Outcome(False, charged, charged)  # noqa: FBT003 - as a decision
        self._rules.settle_later(pending, duration)
        return Outcome(True, charged)  # noqa: FBT003 - as above
