"""Counts by caller and provider, for `/metrics`, the dashboard and `tidegate top --egress`; no decision uses them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate.core._bounds import SECOND
from tidegate.observe._counters import Counters, RowField, RowKind
from tidegate.observe._histogram import Histogram, row_width
from tidegate.observe._text_format import MetricFamily

if TYPE_CHECKING:
    from tidegate.observe._counters import Row
    from tidegate.observe._text_format import MetricKind

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
COUNTERS: Final[tuple[tuple[str, MetricKind, str, str], ...]] = (
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
WAITED: Final[tuple[str, MetricKind, str]] = (
    "tidegate_egress_waited_seconds_total",
    "counter",
    "Time that requests waited for their permits.",
)
FIRST_BYTE: Final[tuple[str, MetricKind, str]] = (
    "tidegate_egress_first_byte_seconds",
    "histogram",
    "Time to the first byte of a response.",
)


COUNTED: Final = (*(name for _, kind, _, name in COUNTERS if kind == "counter"), "waited")
CURRENT: Final = ("active", "waiting")
TRAFFIC: Final = RowKind("egress", len(COUNTED) + row_width(FIRST_BYTE_BUCKETS))  # by caller and provider
IN_PROGRESS: Final = RowKind("egress in progress", len(CURRENT), gauge=True)  # as above


class TrafficCounts:
    """The counts of one caller at one provider; `waited` is in microseconds."""

    __slots__ = ("current", "first_byte", "row")
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
    active: RowField = RowField(CURRENT.index("active"), "current")
    waiting: RowField = RowField(CURRENT.index("waiting"), "current")

    def __init__(self, row: Row, current: Row) -> None:
        """Count in these rows: what only grows, and what is in progress."""
        self.row: Row = row
        self.current: Row = current
        self.first_byte: Histogram = Histogram(FIRST_BYTE_BUCKETS, row, len(COUNTED))


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

    def families(self) -> list[MetricFamily]:
        """Return all counts as metrics."""
        labelled = [(dict(zip(LABELS, pair, strict=True)), counts) for pair, counts in self.totals().items()]
        found = [
            MetricFamily(name, kind, text, [(name, labels, getattr(counts, attribute)) for labels, counts in labelled])
            for name, kind, text, attribute in COUNTERS
        ]
        waited = [(WAITED[0], labels, counts.waited / SECOND) for labels, counts in labelled]
        first = [each for labels, counts in labelled for each in counts.first_byte.samples(FIRST_BYTE[0], labels)]
        found += [MetricFamily(*WAITED, waited), MetricFamily(*FIRST_BYTE, first)]
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Return the counts for the dashboard, those with most requests first."""
        rows = []
        for (caller, provider), counts in self.totals().items():
            row: dict[str, Any] = {"caller": caller, "provider": provider}
            row |= {attribute: getattr(counts, attribute) for *_, attribute in COUNTERS}
            row["waited"] = counts.waited / SECOND
            row["first_byte"] = (counts.first_byte.quantile(0.5) or 0) / SECOND
            rows.append(row)
        return sorted(rows, key=lambda row: -int(row["requests"]))
