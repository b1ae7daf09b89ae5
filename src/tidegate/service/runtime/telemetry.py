"""What the service tells OpenTelemetry (`telemetry: true`): the counts that it keeps anyway, read at each export.

So a decision costs the same with and without it. The service needs the API only; a program that sets up an SDK, such as
`opentelemetry-instrument tidegate start`, says where the figures go.
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
MAX_POLICIES: Final = 1000  # policies that are told of one by one
WAITING_METRIC: Final = ("tidegate.waiting", "{call}", "Calls that wait for a permit.")
IN_FLIGHT_METRIC: Final = ("tidegate.requests.in_flight", "{request}", "Requests under way.")
PROBLEMS_METRIC: Final = ("tidegate.problems", "{answer}", "Answers that were no decision, by kind.")
STORE_METRIC: Final = ("tidegate.store", "1", "What the store counts, by name.")


class Telemetry:
    """Tells of one app while it lives."""

    def __init__(self, app: App, meter: Meter | None = None) -> None:
        """Tell this meter, or the program's."""
        meter = meter or metrics.get_meter("tidegate")
        self._app = ref(app)  # instruments cannot be taken back
        counters: tuple[tuple[tuple[str, str, str], Callable[[App], Iterator[Observation]]], ...] = (
            (DECISIONS, decisions),
            (DENIALS, denials),
            (PROBLEMS_METRIC, problems),
        )
        gauges = ((WAITING_METRIC, waiting), (IN_FLIGHT_METRIC, in_flight), (STORE_METRIC, counted))
        for (name, unit, about), read in counters:
            meter.create_observable_counter(name, [self._reading(read)], unit, about)
        for (name, unit, about), read in gauges:
            meter.create_observable_gauge(name, [self._reading(read)], unit, about)

    def _reading(self, read: Callable[[App], Iterator[Observation]]) -> Callback:
        def told(_options: CallbackOptions) -> Iterable[Observation]:
            app = self._app()
            return () if app is None or app.decider.closed else list(read(app))

        return told

    @staticmethod
    def flush() -> None:
        """Have everything exported that is not yet: the process ends without the SDK's own farewell."""
        flush = getattr(metrics.get_meter_provider(), "force_flush", None)
        if flush is not None:
            flush()


def decisions(app: App) -> Iterator[Observation]:
    """Tell how often each policy said what."""
    for policy, count in list(app.decider.stats.counts.items())[:MAX_POLICIES]:
        for outcome in OUTCOMES:
            yield Observation(getattr(count, outcome), {POLICY: policy, OUTCOME: outcome})


def denials(app: App) -> Iterator[Observation]:
    """Tell how often each limit said no."""
    for (policy, limit), count in list(app.decider.stats.violated.items())[: 10 * MAX_POLICIES]:
        yield Observation(count, {POLICY: policy, LIMIT: limit})


def problems(app: App) -> Iterator[Observation]:
    """Tell how often there was no decision."""
    for kind, count in list(app.decider.stats.errors.items()):
        yield Observation(count, {"tidegate.problem": kind})


def waiting(app: App) -> Iterator[Observation]:
    """Tell how many wait."""
    yield Observation(app.decider.waiting)


def in_flight(app: App) -> Iterator[Observation]:
    """Tell how many requests are under way."""
    yield Observation(app.in_flight)


def counted(app: App) -> Iterator[Observation]:
    """Tell what the store counts."""
    for name, value in app.decider.store.metrics().items():
        yield Observation(value, {"tidegate.name": name})
