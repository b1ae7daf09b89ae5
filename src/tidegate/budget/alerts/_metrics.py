"""The metrics of a budget, independent of a metrics library: for Prometheus clients and for the service.

rate_limit_current_usage{period}          usage of a tier; may exceed its limit
rate_limit_max_allowed{period}            the current quota of a tier
rate_limit_window_reset_seconds{period}   seconds until a tier is completely unused
rate_limit_exhausted_in_seconds{period}   seconds until a tier is used up at the current pace; +Inf: never
rate_limit_exceeded_total{period}         batches denied by a tier, in this process
rate_limit_check_duration_seconds         how long checks took, in this process
rate_limit_record_duration_seconds        how long records took, in this process
rate_limit_database_up                    0 while the database is unavailable; use it for alerts
rate_limit_database_losses_total          number of outages of the database
rate_limit_backlog                        settlements queued for the database
rate_limit_tasks_recorded_total           tasks completed
rate_limit_tasks_returned_total           tasks reserved and returned
rate_limit_webhook_dropped_total          warnings that could not be posted
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tidegate.budget.alerts._forecast import forecast
from tidegate.observe._text_format import MetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tidegate.budget._operations import BudgetOperations
    from tidegate.observe._histogram import Histogram
    from tidegate.observe._text_format import MetricKind


def read_metrics(operations: BudgetOperations) -> Iterator[MetricFamily]:
    """Read all metrics of a budget. Blocks while the database is read."""
    usage, monitor = operations.snapshot(), operations.monitor

    def by_period(name: str, kind: MetricKind, text: str, values: Mapping[str, float]) -> MetricFamily:
        return MetricFamily(name, kind, text, [(name, {"period": tier}, value) for tier, value in values.items()])

    def single(name: str, kind: MetricKind, text: str, value: float) -> MetricFamily:
        return MetricFamily(name, kind, text, [(name, {}, value)])

    tiers = usage.items()
    used, quotas = {tier: each.used for tier, each in tiers}, {tier: each.quota for tier, each in tiers}
    resets = {tier: each.reset_after for tier, each in tiers}
    forecasts = forecast(operations.plan, usage, operations.clock.ns() // 1000) if usage else {}
    ends = {tier: math.inf if each.runs_out_in is None else each.runs_out_in for tier, each in forecasts.items()}
    exceeded = {tier: monitor.exceeded.get(tier, 0) for tier in usage}
    dropped = 0 if operations.webhook is None else operations.webhook.dropped
    yield by_period("rate_limit_current_usage", "gauge", "Current usage for time period", used)
    yield by_period("rate_limit_max_allowed", "gauge", "Maximum allowed for time period", quotas)
    yield by_period("rate_limit_window_reset_seconds", "gauge", "Seconds until the time period is reset", resets)
    text = "Seconds until the time period is used up at the current pace"
    yield by_period("rate_limit_exhausted_in_seconds", "gauge", text, ends)
    yield by_period("rate_limit_exceeded_total", "counter", "Rate limit exceeded events", exceeded)
    yield _histogram("rate_limit_check_duration_seconds", "Time to check rate limits", monitor.checks)
    yield _histogram("rate_limit_record_duration_seconds", "Time to record completed tasks", monitor.records)
    up = int(not operations.lost)
    yield single("rate_limit_database_up", "gauge", "Whether the database of the budget is available", up)
    text = "Number of outages of the database of the budget"
    yield single("rate_limit_database_losses_total", "counter", text, operations.losses)
    yield single("rate_limit_backlog", "gauge", "Settlements queued for the database", operations.backlog)
    yield single("rate_limit_tasks_recorded_total", "counter", "Tasks recorded as completed", monitor.recorded)
    yield single("rate_limit_tasks_returned_total", "counter", "Tasks reserved and returned", monitor.returned)
    yield single("rate_limit_webhook_dropped_total", "counter", "Warnings that could not be posted", dropped)


def _histogram(name: str, text: str, durations: Histogram) -> MetricFamily:
    return MetricFamily(name, "histogram", text, list(durations.samples(name, {})))
