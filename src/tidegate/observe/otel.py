"""OpenTelemetryObserver: metrics and span events through the OpenTelemetry API; the program chooses the SDK.

    Limiter("100/1m", observer=OpenTelemetryObserver())
    RateLimitMiddleware(app, observer=OpenTelemetryObserver())

Counts `tidegate.decisions` (by policy and outcome) and `tidegate.denials` (by policy and limit); a denial is an event
of the current span. Attributes are names of policies and limits, never keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate.errors import ConfigError
from tidegate.observe._labels import LabelNames, limit_label

try:
    from opentelemetry import metrics, trace
except ImportError as _error:  # pragma: no cover - the development environment has it
    raise ConfigError("OpenTelemetry needs opentelemetry-api: pip install 'tidegate[otel]'") from _error

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter

    from tidegate.observe._record import Record

__all__ = ["OpenTelemetryObserver"]

POLICY: Final = "tidegate._policy"
OUTCOME: Final = "tidegate.outcome"
LIMIT: Final = "tidegate.limit"
DECISIONS: Final = ("tidegate.decisions", "{decision}", "Decisions, by policy and outcome.")
DENIALS: Final = ("tidegate.denials", "{denial}", "Denials, by policy and limit.")


class OpenTelemetryObserver:
    """An observer that counts decisions and denials, and adds denials to the current span as events."""

    def __init__(self, meter: Meter | None = None, *, max_policies: int = 100) -> None:
        """Use this meter, or the global one; `max_policies` policies have their own attribute values."""
        meter = meter or metrics.get_meter("tidegate")
        self._decisions = meter.create_counter(*DECISIONS)
        self._denials = meter.create_counter(*DENIALS)
        self._names = LabelNames(max_policies)

    def __call__(self, record: Record) -> None:
        """Count one decision."""
        labels = self._names.labels_of(record)
        if labels is None:
            return
        decision, (policy, outcome) = record.decision, labels
        self._decisions.add(1, {POLICY: policy, OUTCOME: outcome})
        if decision.within_limits:
            return
        violated = decision.violated
        for name in violated:
            self._denials.add(1, {POLICY: policy, LIMIT: limit_label(record, policy, name)})
        span = trace.get_current_span()
        if span.is_recording():
            retry = decision.retry_after
            after = {} if retry is None else {"tidegate.retry_after": retry}
            span.add_event(
                "tidegate.denied", {POLICY: policy, OUTCOME: outcome, "tidegate.violated": violated, **after}
            )
