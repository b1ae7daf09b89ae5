"""What the service has decided, in plain numbers: for /metrics, the dashboard and logs. Nothing here limits anybody."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.observe.names import LabelNames
from tidegate.service.dashboard.near_limit import NearLimitKeys

if TYPE_CHECKING:
    from tidegate.core.decision import Decision
    from tidegate.policy import Key

MAX_POLICIES: Final = 10_000  # policies that are counted one by one: requests of Envoy may bring some along
MAX_RECENT_DENIALS: Final = 200  # denials that are remembered one by one
LATENCY_BUCKETS: Final = (
    25,
    50,
    100,
    250,
    500,
    1000,
    2500,
    5000,
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    1_000_000,
    10_000_000,
)  # µs


class RecentDenial(NamedTuple):
    """One denial, as the dashboard shows it."""

    at: int
    policy: str
    key: Key
    violated: tuple[str, ...]
    retry: int
    shadow: bool


class DecisionCount:
    """Decisions of one slot: the hot path adds to these and does no more."""

    __slots__ = ("allowed", "denied", "local", "shadow")

    def __init__(self) -> None:
        """Start at nothing."""
        self.allowed = self.denied = self.shadow = self.local = 0


class LatencyHistogram:
    """How long requests took: a histogram in microseconds."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        """Start at nothing."""
        self.counts = [0] * (len(LATENCY_BUCKETS) + 1)
        self.total = 0

    def add(self, micros: int) -> None:
        """Count one request."""
        self.counts[bisect_left(LATENCY_BUCKETS, micros)] += 1
        self.total += micros


class Stats:
    """All counts of a desk. Policies and limits come from the file, so labels are bounded by it."""

    def __init__(self) -> None:
        """Start at nothing."""
        self._names = LabelNames(MAX_POLICIES)
        self.counts: dict[str, DecisionCount] = {}  # by the policy's name
        self.violated: Counter[tuple[str, str]] = Counter()  # by policy and limit
        self.last: dict[str, int] = {}  # when a policy last said no
        self.recent: deque[RecentDenial] = deque(maxlen=MAX_RECENT_DENIALS)
        self.near = NearLimitKeys()
        self.latency: dict[str, LatencyHistogram] = {}  # by verb
        self.errors: Counter[str] = Counter()  # answers that were no decision, by problem

    def count(self, policy: str) -> DecisionCount:
        """Give the counts of a policy."""
        found = self.counts.get(policy)
        if found is None:
            found = self.counts.setdefault(self._names.label(policy), DecisionCount())
        return found

    def deny(self, policy: str, key: Key, decision: Decision) -> None:
        """Remember that a policy said no (in shadow mode: would have)."""
        names = decision.violated
        policy = self._names.label(policy)
        for name in names:
            self.violated[policy, name] += 1
        self.last[policy] = decision.at
        self.recent.append(RecentDenial(decision.at, policy, key, names, decision.retry, decision.allowed))
        self.near.note(policy, key, decision)
