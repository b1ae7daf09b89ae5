"""Runs the service: processes, servers, and the other components of a process."""
