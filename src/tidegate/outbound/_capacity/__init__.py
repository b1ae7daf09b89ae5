"""Learns the capacity of a provider from its responses, and shares it between processes."""
