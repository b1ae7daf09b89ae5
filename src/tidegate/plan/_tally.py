"""Counts the outcomes of a replay: by limit, category, client, endpoint, hour.

The memory is bounded by the number of clients, not of requests: for each client, some integers, and how much of each
limit it has used at most. Endpoints beyond `MAX_ENDPOINTS` are counted together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tidegate.core._bounds import SECOND

if TYPE_CHECKING:
    from tidegate.core._decision import Decision
    from tidegate.core._limit import Limit
    from tidegate.plan._rules.base import Outcome

MAX_ENDPOINTS: Final = 1000
OTHER_ENDPOINTS: Final = "(other endpoints)"
MINUTE: Final = 60 * SECOND
MAX_WAITS: Final = 10_000  # of denials, of which every n-th is kept once there are more


class Counts:
    """Requests, and how many of them were denied."""

    __slots__ = ("denied", "requests")

    def __init__(self) -> None:
        """Start at zero."""
        self.requests: int = 0
        self.denied: int = 0

    def add(self, other: Counts) -> None:
        """Add other counts."""
        self.requests += other.requests
        self.denied += other.denied


class ClientCounts(Counts):
    """What is known of a client. `peaks`: by policy and limit, how many permits were in use at most."""

    __slots__ = ("first_denied", "key", "last_denied", "peaks", "shadow_denied")

    def __init__(self, key: object) -> None:
        """Count a client with this key."""
        super().__init__()
        self.key: object = key
        self.first_denied: int = 0
        self.last_denied: int = 0
        self.shadow_denied: int = 0
        self.peaks: dict[str, int] = {}


class PolicyCounts(Counts):
    """What is known of a policy, and its denials by limit."""

    __slots__ = ("by_limit", "labels", "name", "shadow_denied")

    def __init__(self, name: str) -> None:
        """Count a policy."""
        super().__init__()
        self.name: str = name
        self.shadow_denied: int = 0
        self.by_limit: dict[str, int] = {}
        self.labels: dict[int, tuple[str, ...]] = {}  # by the identity of the limits of a variant

    def merge(self, other: PolicyCounts) -> None:
        """Add the counts of other clients."""
        self.add(other)
        self.shadow_denied += other.shadow_denied
        for label, denied in other.by_limit.items():
            self.by_limit[label] = self.by_limit.get(label, 0) + denied


@dataclass
class Waits:
    """The waits of denied requests until they would have been allowed; a sample, if there are many."""

    kept: list[int] = field(default_factory=list)
    count: int = 0
    never: int = 0
    _every: int = 1

    def add(self, wait: int | None) -> None:
        """Count a wait in microseconds; None: never."""
        if wait is None:
            self.never += 1
            return
        self.count += 1
        if self.count % self._every == 0:
            self.kept.append(wait)
        if len(self.kept) >= MAX_WAITS:
            del self.kept[::2]
            self._every *= 2

    def merge(self, other: Waits) -> None:
        """Add the waits of another sample."""
        self.count += other.count
        self.never += other.never
        self.kept += other.kept


class Tally:
    """Counts the outcomes of one replay."""

    def __init__(self) -> None:
        """Start at zero."""
        self.clients: dict[object, ClientCounts] = {}
        self.policies: dict[str, PolicyCounts] = {}
        self.endpoints: dict[str, Counts] = {}
        self.minutes: dict[int, Counts] = {}
        self.waits: Waits = Waits()
        self.requests: int = 0
        self.limited: int = 0
        self.denied: int = 0
        self.blocked: int = 0
        self.first: int = 0
        self.last: int = 0
        self._minute = -1
        self._minute_counts = Counts()

    def merge(self, other: Tally) -> None:
        """Add the counts of other clients."""
        self.clients |= other.clients
        for name, counts in other.endpoints.items():
            self.endpoints.setdefault(name, Counts()).add(counts)
        for minute, counts in other.minutes.items():
            self.minutes.setdefault(minute, Counts()).add(counts)
        for name, policy in other.policies.items():
            self.policy(name).merge(policy)
        self.waits.merge(other.waits)
        for total in ("requests", "limited", "denied", "blocked"):
            setattr(self, total, getattr(self, total) + getattr(other, total))
        self.first = min(filter(None, (self.first, other.first)), default=0)
        self.last = max(self.last, other.last)

    def client(self, key: object) -> ClientCounts:
        """Return the counts of a client."""
        found = self.clients.get(key)
        if found is None:
            found = self.clients[key] = ClientCounts(key)
        return found

    def endpoint(self, name: str) -> Counts:
        """Return the counts of an endpoint."""
        found = self.endpoints.get(name)
        if found is None:
            if len(self.endpoints) >= MAX_ENDPOINTS:
                name = OTHER_ENDPOINTS
            found = self.endpoints.setdefault(name, Counts())
        return found

    def policy(self, name: str) -> PolicyCounts:
        """Return the counts of a policy."""
        found = self.policies.get(name)
        if found is None:
            found = self.policies[name] = PolicyCounts(name)
        return found

    def count(self, now: int, client: ClientCounts, endpoint: Counts, outcome: Outcome) -> None:
        """Count a request and its outcome."""
        self.requests += 1
        client.requests += 1
        endpoint.requests += 1
        minute = now // MINUTE
        if minute != self._minute:
            self._minute = minute
            self._minute_counts = self.minutes.get(minute) or self.minutes.setdefault(minute, Counts())
            self.first = min(self.first, now) if self.first else now
        self.last = max(self.last, now)
        self._minute_counts.requests += 1
        allowed, charged, _, blocked = outcome
        if charged:
            self.limited += 1
            peaks = client.peaks
            for name, decision in charged:
                policy = self.policies.get(name) or self.policy(name)
                policy.requests += 1
                note_peaks(policy, decision, peaks)
                if not decision[0] and allowed:  # in shadow mode
                    self._count_shadow(policy, client, decision)
        if not allowed:
            self._count_denial(now, client, endpoint, outcome)
            self.blocked += blocked

    def _count_shadow(self, policy: PolicyCounts, client: ClientCounts, decision: Decision) -> None:
        policy.shadow_denied += 1
        client.shadow_denied += 1
        for label in violated(policy, decision):
            policy.by_limit[label] = policy.by_limit.get(label, 0) + 1

    def _count_denial(self, now: int, client: ClientCounts, endpoint: Counts, outcome: Outcome) -> None:
        self.denied += 1
        client.denied += 1
        client.first_denied = client.first_denied or now
        client.last_denied = now
        endpoint.denied += 1
        self._minute_counts.denied += 1
        self.waits.add(outcome.retry)
        for name, decision in outcome.denied_by:
            policy = self.policy(name)
            policy.denied += 1
            for label in violated(policy, decision):
                policy.by_limit[label] = policy.by_limit.get(label, 0) + 1


def labels_of(policy: PolicyCounts, limits: tuple[Limit, ...]) -> tuple[str, ...]:
    """Return the names of the limits of a policy."""
    return tuple(f"{policy.name} {limit.name}" for limit in limits)


def note_peaks(policy: PolicyCounts, decision: Decision, peaks: dict[str, int]) -> None:
    """Keep how much of each limit is in use, if it is more than before."""
    labels = labels_for(policy, decision)
    states = decision.states
    if states is None:
        used = decision.used
    else:
        now = decision[1]
        pairs = zip(decision[2], states, strict=True)
        used = [0 if state is None else limit.burst - limit.remaining_of(state, limit, now) for limit, state in pairs]
    for label, amount in zip(labels, used, strict=True):
        if amount > peaks.get(label, 0):
            peaks[label] = amount


def labels_for(policy: PolicyCounts, decision: Decision) -> tuple[str, ...]:
    """Return the names of the limits of a decision; overrides of a policy have limits of their own."""
    found = policy.labels.get(id(decision[2]))
    if found is None:
        found = policy.labels[id(decision[2])] = labels_of(policy, decision[2])
    return found


def violated(policy: PolicyCounts, decision: Decision) -> list[str]:
    """Return the names of the limits that denied."""
    return [label for label, view in zip(labels_for(policy, decision), decision.views, strict=True) if view[1]]
