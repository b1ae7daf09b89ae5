"""Compares tidegate with other rate limiters in one run: `make bench`."""
