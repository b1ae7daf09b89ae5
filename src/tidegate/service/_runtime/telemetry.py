"""OpenTelemetry metrics of the service (`telemetry: true`): its existing counters, read at each export.

Telemetry adds no cost to a decision. The service needs the OpenTelemetry API only. A program that sets up an SDK, such
as `opentelemetry-instrument tidegate start`, chooses where the metrics are sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from weakref import ref

from opentelemetry import metrics
from opentelemetry.metrics import Observation

from tidegate.observe.otel import LIMIT, OUTCOME, POLICY
from tidegate.service._http.metrics import METRICS, MetricValues

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from opentelemetry.metrics import CallbackOptions, Meter

    from tidegate.service._http import App
    from tidegate.service._http.metrics import ServiceMetric

    Callback = Callable[[CallbackOptions], Iterable[Observation]]

ATTRIBUTES: Final = {  # by label
    "policy": POLICY, "outcome": OUTCOME, "limit": LIMIT, "kind": "tidegate.problem", "name": "tidegate.name",
}  # fmt: skip


class Telemetry:
    """Exports the counters of one app until it is closed."""

    def __init__(self, app: App, meter: Meter | None = None) -> None:
        """Register with this meter. Default: the meter of the global provider."""
        meter = meter or metrics.get_meter("tidegate")
        self._app = ref(app)  # a weak reference: instruments cannot be unregistered
        for metric in METRICS.values():
            if metric.otel_name:
                counter = metric.kind == "counter"
                create = meter.create_observable_counter if counter else meter.create_observable_gauge
                create(metric.otel_name, [self._callback(metric)], metric.otel_unit, metric.help)

    def _callback(self, metric: ServiceMetric) -> Callback:
        def callback(_options: CallbackOptions) -> Iterable[Observation]:
            app = self._app()
            if app is None or app.decider.closed:
                return ()
            decider = app.decider
            totals = decider.stats.totals(own=True)
            values = MetricValues(totals, decider.waiting, app.in_flight, decider.store.metrics(), app.reloads)
            names = [ATTRIBUTES[label] for label in metric.labels]
            return [
                Observation(value, dict(zip(names, labels, strict=True)))  # type: ignore[arg-type]  # no histogram is exported
                for labels, value in metric.read(values)
            ]

        return callback

    @staticmethod
    def flush() -> None:
        """Export what is pending: the process ends without the exit handler of the SDK."""
        flush = getattr(metrics.get_meter_provider(), "force_flush", None)
        if flush is not None:
            flush()
