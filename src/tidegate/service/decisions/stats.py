"""Counts of decisions, denials and latencies, for /metrics, the dashboard and logs."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.observe.labels import LabelNames
from tidegate.service.decisions.denied_keys import DeniedKeys
from tidegate.service.decisions.near_limit import NearLimitKeys

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.core.decision import Decision
    from tidegate.policy import Key

MAX_POLICIES: Final = 10_000  # policies with counts of their own: requests from Envoy may carry policies
MAX_RECENT_DENIALS: Final = 200
BLOCKED: Final = ("blocked",)  # the name of the limit of a denial of a blocked key: see `blocks`
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
    """A denial, as the dashboard shows it."""

    at: int
    policy: str
    key: Key
    violated: tuple[str, ...]
    retry: int
    shadow: bool


class DecisionCount:
    """The decisions of one policy, by outcome; the hot path only increments these."""

    __slots__ = ("allowed", "denied", "local", "shadow")
    allowed: int
    denied: int
    local: int
    shadow: int

    def __init__(self) -> None:
        """Start at zero."""
        self.allowed = self.denied = self.shadow = self.local = 0


class LatencyHistogram:
    """A histogram of request times, in microseconds."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        """Start at zero."""
        self.counts: list[int] = [0] * (len(LATENCY_BUCKETS) + 1)
        self.total: int = 0

    def add(self, micros: int) -> None:
        """Count one request."""
        self.counts[bisect_left(LATENCY_BUCKETS, micros)] += 1
        self.total += micros


class Latencies(dict[str, LatencyHistogram]):
    """The histogram of each verb, which is created when it is first used."""

    def __init__(self, create: Callable[[str], LatencyHistogram]) -> None:
        """Create histograms with this function."""
        super().__init__()
        self._create = create

    def __missing__(self, verb: str) -> LatencyHistogram:
        """Add the histogram of a verb."""
        found = self[verb] = self._create(verb)
        return found


class Stats:
    """All counts of a Decider. Labels are names of policies and limits, so the file bounds their number."""

    def __init__(self) -> None:
        """Start at zero."""
        self._lock = threading.Lock()  # threads of gRPC count the first decision of a policy, too
        self._names = LabelNames(MAX_POLICIES)
        self.counts: dict[str, DecisionCount] = {}  # by the policy's name
        self.violated: Counter[tuple[str, str]] = Counter()  # by policy and limit
        self.last_denied: dict[str, int] = {}  # when a policy last denied a call
        # The last denial of each key for one reason, the latest last: a key that is denied often does not fill it.
        self.recent: OrderedDict[tuple[str, Key, tuple[str, ...], bool], RecentDenial] = OrderedDict()
        self.near_limit: NearLimitKeys = NearLimitKeys()
        self.denied_keys: DeniedKeys = DeniedKeys()
        self.latency: dict[str, LatencyHistogram] = Latencies(self._new_latency)  # by verb
        self.errors: Counter[str] = Counter()  # responses without a decision, by problem

    def count(self, policy: str) -> DecisionCount:
        """Return the counts of a policy."""
        found = self.counts.get(policy)
        return self._add_count(policy) if found is None else found

    def _add_count(self, policy: str) -> DecisionCount:
        with self._lock:
            label = self._names.label(policy)
            found = self.counts.get(label)
            if found is None:
                found = self.counts[label] = self._new_count(label)
            return found

    def _new_count(self, _policy: str) -> DecisionCount:
        return DecisionCount()

    def _new_latency(self, _verb: str) -> LatencyHistogram:
        return LatencyHistogram()

    def record_denial(self, policy: str, key: Key, decision: Decision) -> None:
        """Record that a policy denied a call (in shadow mode: would have denied it)."""
        names = decision.violated
        policy = self._names.label(policy)
        for name in names:
            self.violated[policy, name] += 1
        self.last_denied[policy] = decision.at
        place = (policy, key, names, decision.allowed)
        self.recent[place] = RecentDenial(decision.at, policy, key, names, decision.retry, decision.allowed)
        self.recent.move_to_end(place)
        if len(self.recent) > MAX_RECENT_DENIALS:
            self.recent.popitem(last=False)
        if not decision.allowed:
            self.denied_keys.record(policy, key, names, decision.at)
        if names != BLOCKED:  # a block is no limit, and does not end with the decision
            self.near_limit.record(policy, key, decision)
