"""A budget for Prometheus: the document's metrics, read when they are scraped.

registry.register(BudgetCollector(budget))

rate_limit_current_usage{period}          how much of a tier is used
rate_limit_max_allowed{period}            how much it allows at the moment
rate_limit_window_reset_seconds{period}   until it is as if nothing had been used
rate_limit_exceeded_total{period}         batches that it refused
rate_limit_check_duration_seconds         how long checks took
rate_limit_database_up                    0 while the database is lost: the one to be alerted on
rate_limit_database_losses_total          how often it was lost
rate_limit_backlog                        settlements that wait for it
rate_limit_tasks_recorded_total           tasks completed
rate_limit_tasks_returned_total           tasks reserved and given back
rate_limit_webhook_dropped_total          warnings that could not be posted
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from tidegate.budget.watch import BUCKETS
from tidegate.core.bounds import SECOND
from tidegate.errors import ConfigError

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
except ImportError:  # pragma: no cover - the development environment has it
    message = "metrics of a budget need prometheus-client: pip install 'tidegate[prometheus]'"
    raise ConfigError(message) from None

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidegate.budget.engine import Budget


class BudgetCollector:
    """Tells a Prometheus registry of one budget; every scrape looks anew."""

    def __init__(self, budget: Budget) -> None:
        """Tell of this budget."""
        self._budget = budget

    def collect(self) -> Iterator[Metric]:
        """Give the metrics of this moment."""
        budget = self._budget
        usage = budget.snapshot()
        watch = budget.watch
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        used = gauge("rate_limit_current_usage", "Current usage for time period", labels=["period"])
        most = gauge("rate_limit_max_allowed", "Maximum allowed for time period", labels=["period"])
        reset = gauge("rate_limit_window_reset_seconds", "Seconds until the time period is reset", labels=["period"])
        exceeded = counter("rate_limit_exceeded", "Rate limit exceeded events", labels=["period"])
        for tier, each in usage.items():
            used.add_metric([tier], each.used)
            most.add_metric([tier], each.quota)
            reset.add_metric([tier], each.reset_after)
            exceeded.add_metric([tier], watch.exceeded.get(tier, 0))
        yield from (used, most, reset, exceeded, self._durations())
        yield gauge("rate_limit_database_up", "Whether the database of the limits answers", int(not budget.lost))
        losses = budget.store.metrics().get("losses", 0) if budget.settings.enabled else 0
        dropped = 0 if budget.webhook is None else budget.webhook.dropped
        yield counter("rate_limit_database_losses", "How often the database of the limits was lost", losses)
        yield gauge("rate_limit_backlog", "Settlements that wait for the database", budget.backlog)
        yield counter("rate_limit_tasks_recorded", "Tasks recorded as completed", watch.recorded)
        yield counter("rate_limit_tasks_returned", "Tasks reserved and given back", watch.returned)
        yield counter("rate_limit_webhook_dropped", "Warnings that could not be posted", dropped)

    def _durations(self) -> Metric:
        counts = list(accumulate(self._budget.watch.durations))
        bounds = [*(f"{most / SECOND:g}" for most in BUCKETS), "+Inf"]
        return HistogramMetricFamily(
            "rate_limit_check_duration_seconds",
            "Time to check rate limits",
            buckets=list(zip(bounds, counts, strict=True)),
            sum_value=self._budget.watch.duration_sum / SECOND,
        )
