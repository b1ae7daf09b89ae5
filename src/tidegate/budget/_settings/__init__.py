"""Settings of a budget: arguments, environment variables, YAML files, tiers and schedules."""
