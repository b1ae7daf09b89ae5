"""One frozen Record per decision, handed to whoever observes: logs, Prometheus, OpenTelemetry are such observers."""

from tidegate.observe.record import Observer, Record

__all__ = ["Observer", "Record"]
