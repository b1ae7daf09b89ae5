"""What a budget reports: counters, log lines, forecasts and warnings."""

from tidegate.spending._webhook import sign

__all__ = ["sign"]
