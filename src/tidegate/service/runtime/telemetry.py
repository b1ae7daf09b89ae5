"""OpenTelemetry metrics of the service (`telemetry: true`): its existing counters, read at each export.

Telemetry adds no cost to a decision. The service needs the OpenTelemetry API only. A program that sets up an SDK, such
as `opentelemetry-instrument tidegate start`, chooses where the metrics are sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from weakref import ref

from opentelemetry import metrics
from opentelemetry.metrics import Observation

from tidegate.observe.otel import DECISIONS, DENIALS, LIMIT, OUTCOME, POLICY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from opentelemetry.metrics import CallbackOptions, Meter

    from tidegate.service.http import App

    Callback = Callable[[CallbackOptions], Iterable[Observation]]

OUTCOMES: Final = ("allowed", "denied", "shadow", "local")
MAX_POLICIES: Final = 1000  # policies with their own label
WAITING_METRIC: Final = ("tidegate.waiting", "{call}", "Calls that wait for a permit.")
IN_FLIGHT_METRIC: Final = ("tidegate.requests.in_flight", "{request}", "Active requests.")
PROBLEMS_METRIC: Final = ("tidegate.problems", "{answer}", "Responses with an error instead of a decision, by kind.")
STORE_METRIC: Final = ("tidegate.store", "1", "Counters of the store, by name.")


class Telemetry:
    """Exports the counters of one app until it is closed."""

    def __init__(self, app: App, meter: Meter | None = None) -> None:
        """Register with this meter. Default: the meter of the global provider."""
        meter = meter or metrics.get_meter("tidegate")
        self._app = ref(app)  # a weak reference: instruments cannot be unregistered
        counters: tuple[tuple[tuple[str, str, str], Callable[[App], Iterator[Observation]]], ...] = (
            (DECISIONS, observe_decisions),
            (DENIALS, observe_denials),
            (PROBLEMS_METRIC, observe_problems),
        )
        gauges = (
            (WAITING_METRIC, observe_waiting),
            (IN_FLIGHT_METRIC, observe_in_flight),
            (STORE_METRIC, observe_store),
        )
        for (name, unit, description), observe in counters:
            meter.create_observable_counter(name, [self._callback(observe)], unit, description)
        for (name, unit, description), observe in gauges:
            meter.create_observable_gauge(name, [self._callback(observe)], unit, description)

    def _callback(self, observe: Callable[[App], Iterator[Observation]]) -> Callback:
        def callback(_options: CallbackOptions) -> Iterable[Observation]:
            app = self._app()
            return () if app is None or app.decider.closed else list(observe(app))

        return callback

    @staticmethod
    def flush() -> None:
        """Export what is pending: the process ends without the exit handler of the SDK."""
        flush = getattr(metrics.get_meter_provider(), "force_flush", None)
        if flush is not None:
            flush()


def observe_decisions(app: App) -> Iterator[Observation]:
    """Yield the number of decisions, by policy and outcome."""
    for policy, count in list(app.decider.stats.counts.copy().items())[:MAX_POLICIES]:
        for outcome in OUTCOMES:
            yield Observation(getattr(count, outcome), {POLICY: policy, OUTCOME: outcome})


def observe_denials(app: App) -> Iterator[Observation]:
    """Yield the number of denials, by policy and limit."""
    for (policy, limit), count in list(app.decider.stats.violated.items())[: 10 * MAX_POLICIES]:
        yield Observation(count, {POLICY: policy, LIMIT: limit})


def observe_problems(app: App) -> Iterator[Observation]:
    """Yield the number of error responses, by kind."""
    for kind, count in list(app.decider.stats.errors.items()):
        yield Observation(count, {"tidegate.problem": kind})


def observe_waiting(app: App) -> Iterator[Observation]:
    """Yield the number of waiting calls."""
    yield Observation(app.decider.waiting)


def observe_in_flight(app: App) -> Iterator[Observation]:
    """Yield the number of active requests."""
    yield Observation(app.in_flight)


def observe_store(app: App) -> Iterator[Observation]:
    """Yield the counters of the store."""
    for name, value in app.decider.store.metrics().items():
        yield Observation(value, {"tidegate.name": name})
