"""One limiter for the limits of an application without a middleware, as `Limits` of each framework."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, Unpack

from tidegate._runtime.fork import fork_safe
from tidegate.errors import ConfigError
from tidegate.inbound._limiting.request_limiter import RequestLimiter

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tidegate._runtime.clock import Clock
    from tidegate.headers import Style
    from tidegate.inbound._client.address import TrustedProxies
    from tidegate.inbound._limiting.options import LimitsOptions
    from tidegate.stores import Store

# Options of a middleware that need what only a middleware sees: all requests, their paths and responses.
MIDDLEWARE_OPTIONS: Final = frozenset(
    (
        "admin",
        "admin_token",
        "application_limits",
        "count",
        "default_limits",
        "on_message",
        "plan",
        "reload",
        "root_path",
    )
)


class BaseLimits:
    """What the limits of an application share without a middleware: store, trusted proxies, headers, clock, keys.

    The limits of one request are decided together, in one step of the store.
    """

    def __init__(
        self,
        *,
        store: str | Store = "memory://",
        trusted_proxies: TrustedProxies | Iterable[str] = (),
        headers: Style | Mapping[str, str] = "x",
        clock: Clock | None = None,
        **options: Unpack[LimitsOptions],
    ) -> None:
        """Open the store. The options are those of the middlewares that do not need a middleware."""
        given: dict[str, Any] = {**options}
        needs_middleware = sorted(MIDDLEWARE_OPTIONS.intersection(given))
        if needs_middleware:
            raise ConfigError("needs a RateLimitMiddleware around the application", field=needs_middleware[0])
        rules = {"defaults": False, "unmatched": None}
        self.request_limiter: RequestLimiter = RequestLimiter(rules, store, trusted_proxies, headers, clock, **given)

    def close(self) -> None:
        """Close the store, if it was opened from a URL."""
        self.request_limiter.flush()
        self.request_limiter.opened_store.close()


class SharedLimits:
    """The object that bare limits, `@limit(…)` without a `Limits` and without a middleware, share in this process."""

    def __init__(self) -> None:
        """Start without one; the first request that needs it creates it, in memory."""
        self._lock: threading.Lock = fork_safe(threading.Lock())
        self._limits: BaseLimits | None = None

    def get(self) -> BaseLimits:
        """Return the object that bare limits use."""
        found = self._limits
        if found is None:
            with self._lock:
                found = self._limits = self._limits or BaseLimits()
        return found

    def replace(self, limits: BaseLimits | None) -> BaseLimits | None:
        """Use another object from now on (None: a new one, in memory), and return the one before."""
        with self._lock:
            before, self._limits = self._limits, limits
        return before


SHARED_LIMITS: Final = SharedLimits()
