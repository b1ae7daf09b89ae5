"""Observers: called with one frozen Record per decision. Logs, Prometheus and OpenTelemetry are observers."""

from tidegate.observe._record import Observer, Record

__all__ = ["Observer", "Record"]
