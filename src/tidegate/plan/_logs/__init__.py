"""Logs of requests: parsers of their formats, and one stream of several files in the order of time."""
