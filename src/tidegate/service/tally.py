"""What the service has decided, in plain numbers: for /metrics, the dashboard and logs. Nothing here limits anybody."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.observe.names import Names
from tidegate.service.dashboard.near import Notes

if TYPE_CHECKING:
    from tidegate.core.decision import Decision
    from tidegate.policy import Key

MOST: Final = 10_000  # policies that are counted one by one: requests of Envoy may bring some along
RECENT: Final = 200  # denials that are remembered one by one
BUCKETS: Final = (
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


class Denial(NamedTuple):
    """One denial, as the dashboard shows it."""

    at: int
    policy: str
    key: Key
    violated: tuple[str, ...]
    retry: int
    shadow: bool


class Count:
    """Decisions of one slot: the hot path adds to these and does no more."""

    __slots__ = ("allowed", "denied", "local", "shadow")

    def __init__(self) -> None:
        """Start at nothing."""
        self.allowed = self.denied = self.shadow = self.local = 0


class Latency:
    """How long requests took: a histogram in microseconds."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        """Start at nothing."""
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0

    def add(self, micros: int) -> None:
        """Count one request."""
        self.counts[bisect_left(BUCKETS, micros)] += 1
        self.total += micros


class Tally:
    """All counts of a desk. Policies and limits come from the file, so labels are bounded by it."""

    def __init__(self) -> None:
        """Start at nothing."""
        self._names = Names(MOST)
        self.counts: dict[str, Count] = {}  # by the policy's name
        self.violated: Counter[tuple[str, str]] = Counter()  # by policy and limit
        self.last: dict[str, int] = {}  # when a policy last said no
        self.recent: deque[Denial] = deque(maxlen=RECENT)
        self.near = Notes()
        self.latency: dict[str, Latency] = {}  # by verb
        self.errors: Counter[str] = Counter()  # answers that were no decision, by problem

    def count(self, policy: str) -> Count:
        """Give the counts of a policy."""
        found = self.counts.get(policy)
        if found is None:
            found = self.counts.setdefault(self._names.label(policy), Count())
        return found

    def deny(self, policy: str, key: Key, decision: Decision) -> None:
        """Remember that a policy said no (in shadow mode: would have)."""
        names = decision.violated
        policy = self._names.label(policy)
        for name in names:
            self.violated[policy, name] += 1
        self.last[policy] = decision.at
        self.recent.append(Denial(decision.at, policy, key, names, decision.retry, decision.allowed))
        self.near.note(policy, key, decision)
