"""Counts of decisions, denials and latencies, for /metrics, the dashboard and logs.

Counters are rows of one table (`observe._counters`), whether the service has one process or several. Labels are names
of policies and limits, so the file bounds their number.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate._runtime.lock import locked
from tidegate.observe._counters import Counters, LabelledCounts, RowField, RowKind, by_label
from tidegate.observe._histogram import Histogram, row_width
from tidegate.observe._labels import LabelNames
from tidegate.service._decisions.denied_keys import DeniedKeys
from tidegate.service._decisions.near_limit import NearLimitKeys

if TYPE_CHECKING:
    from tidegate._policy import Key
    from tidegate.core._decision import Decision
    from tidegate.observe._counters import Row

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
OUTCOMES: Final = ("allowed", "denied", "shadow", "local")
ALLOWED, DENIED, SHADOW, LOCAL = range(len(OUTCOMES))
DECISIONS: Final = RowKind("decisions", len(OUTCOMES))  # by policy
LATENCY: Final = RowKind("latency", row_width(LATENCY_BUCKETS))  # by verb
VIOLATED: Final = RowKind("violated")  # by policy and limit
LAST_DENIED: Final = RowKind("last denied", combine=max)  # by policy
ERRORS: Final = RowKind("errors")  # responses without a decision, by kind of problem


class RecentDenial(NamedTuple):
    """A denial, as the dashboard shows it."""

    at: int
    policy: str
    key: Key
    violated: tuple[str, ...]
    retry: int
    shadow: bool


class DecisionCount:
    """The decisions of one policy, by outcome. The path of a decision adds to the row itself: `row[ALLOWED] += 1`."""

    __slots__ = ("row",)
    allowed: RowField = RowField(ALLOWED)
    denied: RowField = RowField(DENIED)
    shadow: RowField = RowField(SHADOW)
    local: RowField = RowField(LOCAL)

    def __init__(self, row: Row) -> None:
        """Count in this row."""
        self.row: Row = row

    @property
    def admitted(self) -> int:
        """The calls that were let through."""
        return self.row[ALLOWED] + self.row[SHADOW]

    @property
    def refused(self) -> int:
        """The calls that were not let through, also those that a limit denied because the store was unavailable."""
        return self.row[DENIED] + self.row[LOCAL]


class Latencies(dict[str, Histogram]):
    """The histogram of each verb, which is created when it is first used."""

    def __init__(self, counters: Counters) -> None:
        """Count in this table."""
        super().__init__()
        self._counters = counters

    def __missing__(self, verb: str) -> Histogram:
        """Add the histogram of a verb."""
        found = self[verb] = Histogram(LATENCY_BUCKETS, self._counters.row(LATENCY, verb))
        return found


class Totals(NamedTuple):
    """The sums of all counters, or those of one process."""

    counts: dict[str, DecisionCount]  # by policy
    violated: dict[tuple[str, str], int]  # by policy and limit
    last_denied: dict[str, int]  # when a policy last denied a call
    latency: dict[str, Histogram]  # by verb
    errors: dict[str, int]  # by problem


class Stats:
    """All counts of a Decider, and what the dashboard shows of single denials. Threads of gRPC may use it, too."""

    def __init__(self, counters: Counters | None = None) -> None:
        """Count in this table. Default: a table of this process."""
        self.counters: Counters = Counters() if counters is None else counters
        self.lock: threading.Lock = threading.Lock()
        self._names = LabelNames(MAX_POLICIES)
        self._counts: dict[str, DecisionCount] = {}  # by the policy's name
        self.violated: LabelledCounts = LabelledCounts(self.counters, VIOLATED)
        self.errors: LabelledCounts = LabelledCounts(self.counters, ERRORS)
        self.latency: dict[str, Histogram] = Latencies(self.counters)
        # The last denial of each key for one reason, the latest last: a key that is denied often does not fill it.
        self._recent: OrderedDict[tuple[str, Key, tuple[str, ...], bool], RecentDenial] = OrderedDict()
        self.near_limit: NearLimitKeys = NearLimitKeys()
        self.denied_keys: DeniedKeys = DeniedKeys()

    def count(self, policy: str) -> DecisionCount:
        """Return the counts of a policy."""
        found = self._counts.get(policy)
        return self._add_count(policy) if found is None else found

    @locked
    def _add_count(self, policy: str) -> DecisionCount:
        label = self._names.label(policy)
        found = self._counts.get(label)
        if found is None:
            found = self._counts[label] = DecisionCount(self.counters.row(DECISIONS, label))
        return found

    def totals(self, *, own: bool = False) -> Totals:
        """Return all counters: the sums of all processes that share the table, or what this process has counted."""
        read = self.counters.own if own else self.counters.totals
        return Totals(
            counts={labels[0]: DecisionCount(row) for labels, row in read(DECISIONS).items()},
            violated=by_label(read(VIOLATED)),
            last_denied=by_label(read(LAST_DENIED)),
            latency={labels[0]: Histogram(LATENCY_BUCKETS, row) for labels, row in read(LATENCY).items()},
            errors=by_label(read(ERRORS)),
        )

    def record_denial(self, policy: str, key: Key, decision: Decision) -> None:
        """Record that a policy denied a call (in shadow mode: would have denied it)."""
        names = decision.violated
        policy = self._names.label(policy)
        for name in names:
            self.violated.add(policy, name)
        self.counters.row(LAST_DENIED, policy)[0] = decision.at
        self._add_recent(RecentDenial(decision.at, policy, key, names, decision.retry, decision.allowed))
        if not decision.allowed:
            self.denied_keys.record(policy, key, names, decision.at)
        if names != BLOCKED:  # a block is no limit, and does not end with the decision
            self.near_limit.record(policy, key, decision)

    @locked
    def _add_recent(self, denial: RecentDenial) -> None:
        place = (denial.policy, denial.key, denial.violated, denial.shadow)
        self._recent[place] = denial
        self._recent.move_to_end(place)
        if len(self._recent) > MAX_RECENT_DENIALS:
            self._recent.popitem(last=False)

    @locked
    def recent_denials(self) -> list[RecentDenial]:
        """Return the last denial of each key for one reason, the latest first."""
        return list(reversed(self._recent.values()))
