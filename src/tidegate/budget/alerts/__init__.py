"""What a budget reports: counters, log lines, forecasts and warnings."""
