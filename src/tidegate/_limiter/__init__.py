"""Limiters, reservations, and calls that wait."""
