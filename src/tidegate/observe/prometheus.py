"""PrometheusObserver: Prometheus metrics with a bounded number of labels.

    observer = PrometheusObserver()                     # in the default registry
    Limiter("100/1m", observer=observer)
    RateLimitMiddleware(app, observer=observer)

Labels are names of policies and limits, never keys, addresses or paths. If a program
creates policies dynamically, those beyond `max_policies` are counted together as `other`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, Protocol

from tidegate.errors import ConfigError
from tidegate.observe._labels import LabelNames, limit_label

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.multiprocess import MultiProcessCollector
except ImportError as _error:  # pragma: no cover - the development environment has it
    raise ConfigError("Prometheus metrics need prometheus-client: pip install 'tidegate[prometheus]'") from _error

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tidegate.observe._record import Record

__all__ = ["HasMetrics", "PrometheusObserver", "StoreCollector", "worker_registry"]

FOLDER_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"  # of prometheus_client

DESCRIPTIONS: Final = {
    "tidegate_store": "Counters of the store",
    "tidegate_outbound": "Counters of outbound requests",
    "tidegate_swarm": "Counters of a swarm agent",
    "tidegate_clients": "Recently seen clients of a category",
}
REMAINING_BUCKETS: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


class PrometheusObserver:
    """An observer that counts decisions and denials, and records the remaining share of clients."""

    def __init__(self, registry: CollectorRegistry = REGISTRY, *, max_policies: int = 100) -> None:
        """Register the metrics; `max_policies` policies have their own label."""
        self._children: dict[object, Any] = {}
        self._names = LabelNames(max_policies)
        self._decisions = Counter(
            "tidegate_decisions", "Decisions, by policy and outcome.", ["policy", "outcome"], registry=registry
        )
        self._denials = Counter(
            "tidegate_denials",
            "Denials, by policy and limit.",
            ["policy", "limit"],
            registry=registry,
        )
        self._remaining = Histogram(
            "tidegate_remaining_ratio",
            "Remaining share of the tightest limit after a decision, from 0 to 1.",
            ["policy"],
            buckets=REMAINING_BUCKETS,
            registry=registry,
        )
        self._last = Gauge(
            "tidegate_last_denied_timestamp_seconds",
            "Time of the last denial of a policy.",
            ["policy"],
            registry=registry,
            multiprocess_mode="max",
        )

    def __call__(self, record: Record) -> None:
        """Count one decision."""
        labels = self._names.labels_of(record)
        if labels is None:
            return
        decision, (policy, outcome) = record.decision, labels
        self._child(self._decisions, policy, outcome).inc()
        views = decision.views
        left = min(
            max(0, view.remaining) / limit.burst for limit, view in zip(decision.policy_limits, views, strict=True)
        )
        self._child(self._remaining, policy).observe(left)
        if not decision.within_limits:
            self._child(self._last, policy).set(decision.at / 1_000_000)
            for limit, view in zip(decision.policy_limits, views, strict=True):
                if view.retry:
                    self._child(self._denials, policy, limit_label(record, policy, limit.name)).inc()

    def _child(self, metric: Any, *labels: str) -> Any:  # noqa: ANN401 - a metric of any kind
        place = (metric, *labels)
        found = self._children.get(place)
        if found is None:
            found = self._children[place] = metric.labels(*labels)
        return found


def worker_registry(registry: CollectorRegistry = REGISTRY) -> CollectorRegistry:
    """Return a registry with the metrics of all worker processes of a server; with one process, the given registry.

    Several workers add up their metrics in the folder `PROMETHEUS_MULTIPROC_DIR`, which must be set, and be empty, when
    they start. Pass the result to `make_asgi_app` or `make_wsgi_app` of prometheus_client. Counters of stores
    (`StoreCollector`) are not added up.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return registry
    if not os.path.isdir(folder):  # noqa: PTH112 - a name from the environment
        message = f"{folder!r} is not a folder: create it, and empty it, before the server starts"
        raise ConfigError(message, field=FOLDER_VARIABLE)
    found = CollectorRegistry()
    MultiProcessCollector(found, folder)  # type: ignore[no-untyped-call]  # it has no annotations
    return found


class HasMetrics(Protocol):
    """An object with counters: a store, a gate, a swarm limiter."""

    def metrics(self) -> Mapping[str, int]:
        """Return the counters by name."""


class StoreCollector:
    """Exports the counters of a store (`Store.metrics`) on each scrape.

    It can also export those of a gate (`metric="tidegate_outbound"`) or of a swarm limiter (`metric="tidegate_swarm"`),
    and the number of clients of a middleware's `request_limiter` (`metric="tidegate_clients"`).
    """

    def __init__(
        self, store: HasMetrics, registry: CollectorRegistry = REGISTRY, *, metric: str = "tidegate_store"
    ) -> None:
        """Register the collector."""
        self._store = store
        self._metric = metric
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield one sample per counter."""
        family = GaugeMetricFamily(
            self._metric, f"{DESCRIPTIONS.get(self._metric, 'Counters')}, by name.", labels=["name"]
        )
        for name, value in self._store.metrics().items():
            family.add_metric([name], value)
        yield family
