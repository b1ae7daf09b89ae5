"""Counts by caller and provider, for `/metrics`, the dashboard and `tidegate top --egress`; no decision uses them."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from tidegate.core._bounds import SECOND
from tidegate.observe._counters import Counters, RowField, RowKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidegate.observe._counters import Row
    from tidegate.observe._text_format import Family, Sample

MAX_PAIRS: Final = 10_000  # of callers and providers that are counted separately
OTHERS: Final = ("other", "other")
# Microseconds from a request to the first byte of its response.
FIRST_BYTE_BUCKETS: Final = (
    1000,
    5000,
    10_000,
    50_000,
    100_000,
    500_000,
    SECOND,
    5 * SECOND,
    30 * SECOND,
    120 * SECOND,
)
LABELS: Final = ("caller", "provider")
# name: kind, help, attribute
COUNTERS: Final = (
    ("tidegate_egress_requests_total", "counter", "Requests that were sent to a provider.", "requests"),
    ("tidegate_egress_denied_total", "counter", "Requests that got no permit in time.", "denied"),
    ("tidegate_egress_refused_total", "counter", "Responses of a provider with status 429 or 503.", "refused"),
    ("tidegate_egress_failed_total", "counter", "Requests that a provider did not answer completely.", "failed"),
    ("tidegate_egress_gone_total", "counter", "Requests whose client disconnected.", "gone"),
    ("tidegate_egress_tunnels_total", "counter", "Tunnels (CONNECT) and upgraded connections.", "tunnels"),
    ("tidegate_egress_input_tokens_total", "counter", "Tokens of input, as providers report them.", "input_tokens"),
    ("tidegate_egress_output_tokens_total", "counter", "Tokens of output, as providers report them.", "output_tokens"),
    ("tidegate_egress_cost_micros_total", "counter", "Cost of requests, in millionths of the currency.", "cost_micros"),
    ("tidegate_egress_active", "gauge", "Requests in progress.", "active"),
    ("tidegate_egress_waiting", "gauge", "Requests that wait for a permit.", "waiting"),
)
WAITED: Final = ("tidegate_egress_waited_seconds_total", "counter", "Time that requests waited for their permits.")
FIRST_BYTE: Final = ("tidegate_egress_first_byte_seconds", "histogram", "Time to the first byte of a response.")


COUNTED: Final = (*(name for _, kind, _, name in COUNTERS if kind == "counter"), "waited", "first_byte_sum")
CURRENT: Final = ("active", "waiting")
TRAFFIC: Final = RowKind("egress", len(COUNTED) + len(FIRST_BYTE_BUCKETS) + 1)  # by caller and provider
IN_PROGRESS: Final = RowKind("egress in progress", len(CURRENT), gauge=True)  # as above


class TrafficCounts:
    """The counts of one caller at one provider; `waited` and `first_byte_sum` are microseconds."""

    __slots__ = ("current", "row")
    requests: RowField = RowField(COUNTED.index("requests"))
    denied: RowField = RowField(COUNTED.index("denied"))
    refused: RowField = RowField(COUNTED.index("refused"))
    failed: RowField = RowField(COUNTED.index("failed"))
    gone: RowField = RowField(COUNTED.index("gone"))
    tunnels: RowField = RowField(COUNTED.index("tunnels"))
    input_tokens: RowField = RowField(COUNTED.index("input_tokens"))
    output_tokens: RowField = RowField(COUNTED.index("output_tokens"))
    cost_micros: RowField = RowField(COUNTED.index("cost_micros"))
    waited: RowField = RowField(COUNTED.index("waited"))
    first_byte_sum: RowField = RowField(COUNTED.index("first_byte_sum"))
    active: RowField = RowField(CURRENT.index("active"), "current")
    waiting: RowField = RowField(CURRENT.index("waiting"), "current")

    def __init__(self, row: Row, current: Row) -> None:
        """Count in these rows: what only grows, and what is in progress."""
        self.row: Row = row
        self.current: Row = current

    @property
    def first_byte(self) -> list[int]:
        """The histogram of the times to the first byte of a response."""
        return list(self.row[len(COUNTED) :])

    def record_first_byte(self, elapsed: int) -> None:
        """Count the time to the first byte of a response, in microseconds."""
        self.row[len(COUNTED) + bisect_left(FIRST_BYTE_BUCKETS, elapsed)] += 1
        self.first_byte_sum += elapsed


class EgressStats:
    """The counts of a gateway."""

    def __init__(self, counters: Counters | None = None) -> None:
        """Count in this table. Default: a table of this process."""
        self._counters = Counters() if counters is None else counters
        self._pairs: dict[tuple[str, str], TrafficCounts] = {}

    def counts(self, caller: str, provider: str) -> TrafficCounts:
        """Return the counts of a caller at a provider in this process."""
        pair = caller, provider
        found = self._pairs.get(pair)
        if found is None:
            pair = pair if len(self._pairs) < MAX_PAIRS else OTHERS
            rows = (self._counters.row(kind, *pair) for kind in (TRAFFIC, IN_PROGRESS))
            found = self._pairs[pair] = TrafficCounts(*rows)
        return found

    def totals(self) -> dict[tuple[str, ...], TrafficCounts]:
        """Return the counts of all processes that share the table, by caller and provider."""
        current = self._counters.totals(IN_PROGRESS)
        none = [0] * len(CURRENT)
        return {
            pair: TrafficCounts(row, current.get(pair, none)) for pair, row in self._counters.totals(TRAFFIC).items()
        }

    def families(self) -> list[Family]:
        """Return all counts as metrics."""
        labelled = [(dict(zip(LABELS, pair, strict=True)), counts) for pair, counts in self.totals().items()]
        found: list[Family] = [
            (name, kind, text, [(name, labels, getattr(counts, attribute)) for labels, counts in labelled])
            for name, kind, text, attribute in COUNTERS
        ]
        found.append((*WAITED, [(WAITED[0], labels, counts.waited / SECOND) for labels, counts in labelled]))
        found.append((*FIRST_BYTE, [each for labels, counts in labelled for each in _histogram(labels, counts)]))
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Return the counts for the dashboard, those with most requests first."""
        rows = []
        for (caller, provider), counts in self.totals().items():
            row: dict[str, Any] = {"caller": caller, "provider": provider}
            row |= {attribute: getattr(counts, attribute) for *_, attribute in COUNTERS}
            row["waited"] = counts.waited / SECOND
            row["first_byte"] = median(counts) / SECOND
            rows.append(row)
        return sorted(rows, key=lambda row: -int(row["requests"]))


def median(counts: TrafficCounts) -> int:
    """Return the upper bound of the bucket that contains the median time to the first byte; 0 if there is none."""
    histogram = counts.first_byte
    total = sum(histogram)
    for edge, reached in zip((*FIRST_BYTE_BUCKETS, FIRST_BYTE_BUCKETS[-1]), accumulate(histogram), strict=True):
        if total and 2 * reached >= total:
            return edge
    return 0


def _histogram(labels: dict[str, str], counts: TrafficCounts) -> Iterator[Sample]:
    name, sums = FIRST_BYTE[0], list(accumulate(counts.first_byte))
    for edge, count in zip((*(str(edge / SECOND) for edge in FIRST_BYTE_BUCKETS), "+Inf"), sums, strict=True):
        yield f"{name}_bucket", {**labels, "le": edge}, count
    yield f"{name}_sum", labels, counts.first_byte_sum / SECOND
    yield f"{name}_count", labels, sums[-1]
