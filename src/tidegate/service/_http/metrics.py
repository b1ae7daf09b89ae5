"""The metrics of the service, each declared once in METRICS: `/metrics`, OpenTelemetry and the docs follow from it.

Labels are names from the file, never keys. With several workers, the values at `/metrics` are those of the whole
service (see `tidegate.observe._counters`); OpenTelemetry exports those of each process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core._bounds import SECOND
from tidegate.observe import _text_format as text_format
from tidegate.observe._histogram import Histogram
from tidegate.observe._text_format import MetricFamily, write_families
from tidegate.service._decisions.stats import OUTCOMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from tidegate.observe._text_format import MetricKind, Sample
    from tidegate.service._dashboard.status import StatusSource
    from tidegate.service._decisions.stats import Totals

    Row = tuple[tuple[str, ...], int | float | Histogram]  # the values of the labels, and the value

CONTENT_TYPE: Final = text_format.CONTENT_TYPE.encode()
MAX_LABELLED_POLICIES: Final = 1000  # policies with labels of their own


class MetricValues(NamedTuple):
    """Where the values of metrics are counted."""

    totals: Totals
    waiting: int
    in_flight: int
    store: Mapping[str, int]
    reloads: Mapping[str, int]


class ServiceMetric(NamedTuple):
    """A metric. `read` returns its values; with a name and a unit for OpenTelemetry, it is exported there, too."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...]
    read: Callable[[MetricValues], Iterable[Row]]
    otel_name: str = ""
    otel_unit: str = ""

    def family(self, values: MetricValues) -> MetricFamily:
        """Return the metric with its values for Prometheus."""
        return MetricFamily(self.name, self.kind, self.help, list(self._samples(values)))

    def _samples(self, values: MetricValues) -> Iterator[Sample]:
        for labels, value in self.read(values):
            named = dict(zip(self.labels, labels, strict=True))
            if isinstance(value, Histogram):
                yield from value.samples(self.name, named)
            else:
                yield self.name, named, value


def read_decisions(values: MetricValues) -> Iterator[Row]:
    """Yield the number of decisions, by policy and outcome."""
    for policy, count in list(values.totals.counts.items())[:MAX_LABELLED_POLICIES]:
        for outcome, number in zip(OUTCOMES, count.row, strict=True):
            yield (policy, outcome), number


def by_name(counts: Mapping[str, int]) -> Iterator[Row]:
    """Yield counts by name."""
    for name, count in list(counts.items()):
        yield (name,), count


METRICS: Final[dict[str, ServiceMetric]] = {
    metric.name: metric
    for metric in (
        ServiceMetric(
            "tidegate_decisions_total", "counter",
            "Decisions, by policy and outcome: allowed, denied, shadow (would be denied), local (store unavailable).",
            ("policy", "outcome"), read_decisions, "tidegate.decisions", "{decision}",
        ),
        ServiceMetric(
            "tidegate_denials_total", "counter", "Denials, by policy and limit.", ("policy", "limit"),
            lambda values: list(values.totals.violated.items())[: 10 * MAX_LABELLED_POLICIES],
            "tidegate.denials", "{denial}",
        ),
        ServiceMetric(
            "tidegate_last_denied_timestamp_seconds", "gauge", "Time of the last denial, by policy.", ("policy",),
            lambda values: [
                ((policy,), at / SECOND)
                for policy, at in list(values.totals.last_denied.items())[:MAX_LABELLED_POLICIES]
            ],
        ),
        ServiceMetric(
            "tidegate_waiting", "gauge", "Calls that wait for a permit.", (),
            lambda values: [((), values.waiting)], "tidegate.waiting", "{call}",
        ),
        ServiceMetric(
            "tidegate_requests_in_flight", "gauge", "Active requests.", (),
            lambda values: [((), values.in_flight)], "tidegate.requests.in_flight", "{request}",
        ),
        ServiceMetric(
            "tidegate_problems_total", "counter", "Responses without a decision, by kind of problem.", ("kind",),
            lambda values: by_name(values.totals.errors), "tidegate.problems", "{answer}",
        ),
        ServiceMetric(
            "tidegate_request_seconds", "histogram",
            "Duration of requests, by verb; those that may wait have their own: acquire wait, reserve wait.", ("verb",),
            lambda values: [((verb,), latency) for verb, latency in values.totals.latency.items()],
        ),
        ServiceMetric(
            "tidegate_store", "gauge", "Metrics of the store, by name.", ("name",),
            lambda values: by_name(values.store), "tidegate.store", "1",
        ),
        ServiceMetric(
            "tidegate_reloads_total", "counter", "Reloads of the file, by outcome: adopted, refused.", ("outcome",),
            lambda values: by_name(values.reloads),
        ),
    )
}  # fmt: skip


def render(source: StatusSource, reloads: dict[str, int], more: Iterable[MetricFamily] = ()) -> bytes:
    """Write all metrics, and those of components."""
    status = source.status()
    values = MetricValues(source.totals(), status.waiting, status.in_flight, status.store, reloads)
    return write_families((*(metric.family(values) for metric in METRICS.values()), *more))
