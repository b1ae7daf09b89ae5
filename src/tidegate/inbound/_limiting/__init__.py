"""Decides about requests, for both middlewares and for limits on single routes."""
