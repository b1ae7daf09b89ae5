"""tidegate: one rate limiter for both sides of an API, the requests you receive and the requests you send."""

from tidegate.core import Decision, Limit
from tidegate.errors import Closed, ConfigError, Denied, RateLimitError, ResourceUnknown, StoreUnavailable
from tidegate.limiter import AsyncLimiter, Limiter
from tidegate.policy import Policy

__all__ = [
    "AsyncLimiter",
    "Closed",
    "ConfigError",
    "Decision",
    "Denied",
    "Limit",
    "Limiter",
    "Policy",
    "RateLimitError",
    "ResourceUnknown",
    "StoreUnavailable",
]
