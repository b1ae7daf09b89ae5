"""Runs the service: processes, servers, and the components beside the decisions."""
