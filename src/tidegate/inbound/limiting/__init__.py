"""How a request is decided, for both middlewares and for limits on single routes."""
