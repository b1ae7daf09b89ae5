"""Decisions per second and latencies of the last five minutes.

They are computed from counters that the service has anyway, so a decision costs no more.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from tidegate.core.bounds import SECOND
from tidegate.service.decisions.stats import LATENCY_BUCKETS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from tidegate.clock import Clock
    from tidegate.service.dashboard.status import StatusSource
    from tidegate.service.decisions.stats import LatencyHistogram

HISTORY_SECONDS: Final = 300
MAX_POLICIES: Final = 200
DECIDING_VERBS: Final = ("acquire", "batch", "check", "peek", "reserve")  # verbs whose latency is shown
MEDIAN, P99 = 0.5, 0.99


class PolicyHistory:
    """The calls of one policy: admitted and denied in each second, and waiting at the end of each second."""

    __slots__ = ("admitted", "denied", "last_counts", "waiting")

    def __init__(self, seconds: int) -> None:
        """Fill the past seconds with zeros, so that all policies have the same length."""
        self.admitted: deque[int] = deque([0] * seconds, maxlen=HISTORY_SECONDS)
        self.denied: deque[int] = deque([0] * seconds, maxlen=HISTORY_SECONDS)
        self.waiting: deque[int] = deque([0] * seconds, maxlen=HISTORY_SECONDS)
        self.last_counts: tuple[int, int] = (0, 0)

    def add(self, seconds: int, admitted: int, denied: int, waiting: int) -> None:
        """Add the seconds since the last call; `admitted` and `denied` are totals, `waiting` is the current number."""
        before, self.last_counts = self.last_counts, (admitted, denied)
        self.admitted.extend(spread(admitted - before[0], seconds))
        self.denied.extend(spread(denied - before[1], seconds))
        self.waiting.extend([waiting] * seconds)


class DecisionHistory:
    """The history of all policies, and latencies. `tick` is the current second of the monotonic clock."""

    def __init__(self, source: StatusSource, clock: Clock) -> None:
        """Start with the current second."""
        self.source = source
        self._clock = clock
        self.tick: int = clock.steady() // SECOND
        self.policies: dict[str, PolicyHistory] = {}
        self.median: deque[int | None] = deque(maxlen=HISTORY_SECONDS)  # microseconds; None: no request
        self.p99: deque[int | None] = deque(maxlen=HISTORY_SECONDS)
        self._latency_counts = [0] * (len(LATENCY_BUCKETS) + 1)

    def sample(self) -> None:
        """Add the seconds that have passed since the last sample."""
        tick = self._clock.steady() // SECOND
        passed = tick - self.tick
        if passed <= 0:
            return
        self.tick = tick
        seconds = min(passed, HISTORY_SECONDS)
        totals, waiting = self.source.totals(), self.source.waiting_by_policy()
        for name, count in totals.counts.items():
            policy = self.policies.get(name)
            if policy is None:
                if len(self.policies) >= MAX_POLICIES:
                    continue
                policy = self.policies[name] = PolicyHistory(len(self.median))
            policy.add(seconds, count.allowed + count.shadow, count.denied, waiting.get(name, 0))
        self._sample_latency(seconds, totals.latency)

    def _sample_latency(self, seconds: int, latencies: Mapping[str, LatencyHistogram]) -> None:
        counts = [0] * len(self._latency_counts)
        for verb in DECIDING_VERBS:
            latency = latencies.get(verb)
            if latency is not None:
                counts = [a + b for a, b in zip(counts, latency.counts, strict=True)]
        new = [after - before for after, before in zip(counts, self._latency_counts, strict=True)]
        self._latency_counts = counts
        self.median.extend([quantile(new, MEDIAN)] * seconds)
        self.p99.extend([quantile(new, P99)] * seconds)

    def dump(self) -> dict[str, Any]:
        """Describe the history for JSON."""
        return {
            "tick": self.tick,
            "policies": {
                name: [list(each.admitted), list(each.denied), list(each.waiting), each.last_counts]
                for name, each in self.policies.items()
            },
            "median": list(self.median),
            "p99": list(self.p99),
            "latency_counts": self._latency_counts,
        }

    def restore(self, dumped: dict[str, Any]) -> None:
        """Continue the history that another process of the service has dumped."""
        self.tick = dumped["tick"]
        self.median.extend(dumped["median"])
        self.p99.extend(dumped["p99"])
        self._latency_counts = dumped["latency_counts"]
        for name, (admitted, denied, waiting, last_counts) in dumped["policies"].items():
            policy = self.policies[name] = PolicyHistory(0)
            policy.admitted.extend(admitted)
            policy.denied.extend(denied)
            policy.waiting.extend(waiting)
            policy.last_counts = (last_counts[0], last_counts[1])

    def count_since(self, since: int | None) -> int:
        """Return how many seconds there are from `since` on; all if it is None."""
        length = len(self.median)
        return length if since is None else min(length, max(0, self.tick - since))


def last_values(values: Sequence[int | None] | deque[int] | deque[int | None], count: int) -> list[int | None]:
    """Return the last `count` values."""
    return list(values) if count == len(values) else [values[index] for index in range(-count, 0)]


def spread(amount: int, seconds: int) -> Iterable[int]:
    """Distribute an amount evenly over seconds."""
    if seconds == 1:
        return (amount,)
    return (amount * (i + 1) // seconds - amount * i // seconds for i in range(seconds))


def quantile(counts: Sequence[int], fraction: float) -> int | None:
    """Return a quantile of a latency histogram in microseconds, interpolated within its bucket; None if it is empty."""
    total = sum(counts)
    if not total:
        return None
    rank = fraction * total
    edges = (0, *LATENCY_BUCKETS, LATENCY_BUCKETS[-1])
    for index, reached in enumerate(accumulate(counts)):
        if reached >= rank and counts[index]:
            low, high = edges[index], edges[index + 1]
            return round(high - (high - low) * (reached - rank) / counts[index])
    return LATENCY_BUCKETS[-1]
