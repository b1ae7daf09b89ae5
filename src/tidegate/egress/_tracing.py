"""OpenTelemetry spans of the gateway (`telemetry: true`): one for each request, as child of the caller's `traceparent`.

The provider gets the context of this span. Without telemetry, the caller's `traceparent` is passed on unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidegate.errors import ConfigError

try:
    from opentelemetry import propagate, trace
    from opentelemetry.trace import SpanKind, StatusCode
except ImportError:  # pragma: no cover - the extra is part of every test environment
    raise ConfigError("needs OpenTelemetry: pip install 'tidegate[otel]'", field="telemetry") from None

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from opentelemetry.trace import Tracer

    from tidegate.egress._exchange import EgressExchange

FIRST_SERVER_ERROR = 500


class Tracing:
    """Starts and ends the spans of requests."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        """Use a tracer. Default: that of the global provider."""
        self._tracer = tracer or trace.get_tracer("tidegate.egress")

    def start(self, exchange: EgressExchange, headers: Mapping[str, str], sent: MutableMapping[str, str]) -> None:
        """Start the span of a request, and put its context into the header fields that are sent."""
        carrier = {name.lower(): value for name, value in headers.items()}
        parent = propagate.extract(carrier)
        attributes = {
            "http.request.method": exchange.method,
            "server.address": exchange.host,
            "url.path": exchange.path,
            "tidegate.caller": exchange.caller,
            "tidegate.provider": exchange.provider,
        }
        name = f"{exchange.method} {exchange.provider}"
        exchange.span = self._tracer.start_span(name, parent, SpanKind.CLIENT, attributes)
        own: dict[str, str] = {}
        propagate.inject(own, trace.set_span_in_context(exchange.span, parent))
        for field, value in own.items():
            sent[field] = value

    @staticmethod
    def end(exchange: EgressExchange) -> None:
        """End the span of a request."""
        span: Any = exchange.span
        if span is None:
            return
        span.set_attribute("http.response.status_code", exchange.status)
        span.set_attribute("tidegate.waited", exchange.waited)
        span.set_attribute("tidegate.attempts", exchange.attempts)
        for part, amount in exchange.parts.items():
            span.set_attribute(f"tidegate.tokens.{part}", amount)
        if exchange.problem or exchange.status >= FIRST_SERVER_ERROR:
            span.set_status(StatusCode.ERROR, exchange.problem or None)
        span.end()
