"""Metrics of a budget for Prometheus, read at every scrape.

registry.register(BudgetCollector(budget))

rate_limit_current_usage{period}          how much of a tier is used
rate_limit_max_allowed{period}            the current quota of a tier
rate_limit_window_reset_seconds{period}   seconds until a tier is completely unused
rate_limit_exceeded_total{period}         batches denied by a tier
rate_limit_check_duration_seconds         how long checks took
rate_limit_database_up                    0 while the database is unavailable; use it for alerts
rate_limit_database_losses_total          how often the database became unavailable
rate_limit_backlog                        settlements queued for the database
rate_limit_tasks_recorded_total           tasks completed
rate_limit_tasks_returned_total           tasks reserved and returned
rate_limit_webhook_dropped_total          events that could not be posted
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from tidegate.budget.alerts.monitor import DURATION_BUCKETS
from tidegate.core.bounds import SECOND
from tidegate.errors import ConfigError

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
except ImportError:  # pragma: no cover - the development environment has it
    message = "metrics of a budget need prometheus-client: pip install 'tidegate[prometheus]'"
    raise ConfigError(message) from None

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidegate.budget.budget import AsyncTaskBudget, TaskBudget

__all__ = ["BudgetCollector"]


class BudgetCollector:
    """Collects the metrics of one budget for a Prometheus registry."""

    def __init__(self, budget: TaskBudget | AsyncTaskBudget) -> None:
        """Collect the metrics of this budget."""
        self._operations = budget.operations

    def collect(self) -> Iterator[Metric]:
        """Return the current metrics."""
        operations = self._operations
        usage = operations.snapshot()
        monitor = operations.monitor
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        used = gauge("rate_limit_current_usage", "Current usage for time period", labels=["period"])
        quota = gauge("rate_limit_max_allowed", "Maximum allowed for time period", labels=["period"])
        reset = gauge("rate_limit_window_reset_seconds", "Seconds until the time period is reset", labels=["period"])
        exceeded = counter("rate_limit_exceeded", "Rate limit exceeded events", labels=["period"])
        for tier, each in usage.items():
            used.add_metric([tier], each.used)
            quota.add_metric([tier], each.quota)
            reset.add_metric([tier], each.reset_after)
            exceeded.add_metric([tier], monitor.exceeded.get(tier, 0))
        yield from (used, quota, reset, exceeded, self._durations())
        dropped = 0 if operations.webhook is None else operations.webhook.dropped
        yield gauge(
            "rate_limit_database_up", "Whether the database of the budget is available", int(not operations.lost)
        )
        yield counter(
            "rate_limit_database_losses", "How often the database of the budget became unavailable", operations.losses
        )
        yield gauge("rate_limit_backlog", "Settlements queued for the database", operations.backlog)
        yield counter("rate_limit_tasks_recorded", "Tasks recorded as completed", monitor.recorded)
        yield counter("rate_limit_tasks_returned", "Tasks reserved and returned", monitor.returned)
        yield counter("rate_limit_webhook_dropped", "Events that could not be posted", dropped)

    def _durations(self) -> Metric:
        monitor = self._operations.monitor
        counts = list(accumulate(monitor.durations))
        bounds = [*(f"{bound / SECOND:g}" for bound in DURATION_BUCKETS), "+Inf"]
        return HistogramMetricFamily(
            "rate_limit_check_duration_seconds",
            "Time to check rate limits",
            buckets=list(zip(bounds, counts, strict=True)),
            sum_value=monitor.duration_sum / SECOND,
        )
