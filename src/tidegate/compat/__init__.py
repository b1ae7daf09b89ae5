"""Reads the configuration of other rate limiters. `tidegate.compat.limits` reads their limits."""
