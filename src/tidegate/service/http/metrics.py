"""`/metrics`: the counts of the service in Prometheus's text format. Labels are names from the file, never keys.

With several workers, all values are those of the whole service: see `runtime.worker_stats`.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Final

from tidegate.core.bounds import SECOND
from tidegate.observe import text_format
from tidegate.observe.text_format import Family, Sample, write_families
from tidegate.service.decisions.stats import LATENCY_BUCKETS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tidegate.service.dashboard.status import ServiceStatus, StatusSource
    from tidegate.service.decisions.stats import Stats

CONTENT_TYPE: Final = text_format.CONTENT_TYPE.encode()
MAX_LABELLED_POLICIES: Final = 1000  # policies with labels of their own
# name: kind, help, labels
METRICS: Final[dict[str, tuple[str, str, tuple[str, ...]]]] = {
    "tidegate_decisions_total": ("counter", "Decisions, by policy and outcome.", ("policy", "outcome")),
    "tidegate_denials_total": ("counter", "Denials, by policy and limit.", ("policy", "limit")),
    "tidegate_last_denied_timestamp_seconds": ("gauge", "Time of the last denial, by policy.", ("policy",)),
    "tidegate_waiting": ("gauge", "Calls that wait for a permit.", ()),
    "tidegate_requests_in_flight": ("gauge", "Active requests.", ()),
    "tidegate_problems_total": ("counter", "Responses without a decision, by kind of problem.", ("kind",)),
    "tidegate_request_seconds": ("histogram", "Duration of requests, by verb.", ("verb",)),
    "tidegate_store": ("gauge", "Metrics of the store, by name.", ("name",)),
    "tidegate_reloads_total": ("counter", "Reloads of the file, by outcome.", ("outcome",)),
}


def render(source: StatusSource, reloads: dict[str, int], more: Iterable[Family] = ()) -> bytes:
    """Write all metrics, and those of components."""
    samples = dict(_families(source.totals(), source.status(), reloads))
    own = ((name, kind, help_text, list(samples[name])) for name, (kind, help_text, _) in METRICS.items())
    return write_families((*own, *more))


def _families(stats: Stats, status: ServiceStatus, reloads: dict[str, int]) -> Iterator[tuple[str, Iterable[Sample]]]:
    name = "tidegate_decisions_total"
    counts = list(stats.counts.copy().items())[:MAX_LABELLED_POLICIES]
    outcomes = ("allowed", "denied", "shadow", "local")
    yield name, [(name, {"policy": p, "outcome": o}, getattr(count, o)) for p, count in counts for o in outcomes]
    name = "tidegate_denials_total"
    yield (
        name,
        [
            (name, {"policy": p, "limit": i}, n)
            for (p, i), n in list(stats.violated.items())[: 10 * MAX_LABELLED_POLICIES]
        ],
    )
    name = "tidegate_last_denied_timestamp_seconds"
    yield (
        name,
        [(name, {"policy": p}, at / SECOND) for p, at in list(stats.last_denied.items())[:MAX_LABELLED_POLICIES]],
    )
    yield "tidegate_waiting", [("tidegate_waiting", {}, status.waiting)]
    yield "tidegate_requests_in_flight", [("tidegate_requests_in_flight", {}, status.in_flight)]
    name = "tidegate_problems_total"
    yield name, [(name, {"kind": kind}, n) for kind, n in stats.errors.items()]
    yield "tidegate_request_seconds", list(_latencies(stats))
    yield "tidegate_store", [("tidegate_store", {"name": n}, value) for n, value in status.store.items()]
    name = "tidegate_reloads_total"
    yield name, [(name, {"outcome": outcome}, n) for outcome, n in reloads.items()]


def _latencies(stats: Stats) -> Iterator[Sample]:
    name = "tidegate_request_seconds"
    for verb, latency in stats.latency.items():
        sums = list(accumulate(latency.counts))
        for edge, count in zip((*(str(edge / SECOND) for edge in LATENCY_BUCKETS), "+Inf"), sums, strict=True):
            yield f"{name}_bucket", {"verb": verb, "le": edge}, count
        yield f"{name}_sum", {"verb": verb}, latency.total / SECOND
        yield f"{name}_count", {"verb": verb}, sums[-1]
