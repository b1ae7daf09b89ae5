"""What a budget reports: counters, log lines, forecasts and warnings."""

from tidegate.budget.alerts.webhook import sign

__all__ = ["sign"]
