"""Metrics of a budget for Prometheus, read at every scrape; `tidegate.budget.alerts._metrics` lists them.

registry.register(BudgetCollector(budget))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.budget.alerts._metrics import read_metrics
from tidegate.errors import ConfigError

try:
    from prometheus_client.core import Metric
except ImportError:  # pragma: no cover - the development environment has it
    message = "metrics of a budget need prometheus-client: pip install 'tidegate[prometheus]'"
    raise ConfigError(message) from None

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidegate.budget._budget import AsyncTaskBudget, TaskBudget

__all__ = ["BudgetCollector"]


class BudgetCollector:
    """Collects the metrics of one budget for a Prometheus registry."""

    def __init__(self, budget: TaskBudget | AsyncTaskBudget) -> None:
        """Collect the metrics of this budget."""
        self._operations = budget.operations

    def collect(self) -> Iterator[Metric]:
        """Return the current metrics."""
        for name, kind, text, samples in read_metrics(self._operations):
            metric = Metric(name.removesuffix("_total") if kind == "counter" else name, text, kind)
            for sample in samples:
                metric.add_sample(sample[0], dict(sample[1]), sample[2])
            yield metric
