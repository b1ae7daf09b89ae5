"""tidegate: one rate limiter for both sides of an API, the requests you receive and the requests you send.

A name is imported from its module when it is first used, so that `import tidegate` is fast. `__all__` lists the public
names; so does the `__all__` of every other public package and module.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidegate._limiter.joint import reserve, reserve_async, reserve_first, reserve_first_async
    from tidegate._limiter.limited import AsyncLimited, Limited
    from tidegate._limiter.limiter import AsyncLimiter, Limiter, Usage
    from tidegate._limiter.reservation import AsyncReservation, Reservation, Reserving
    from tidegate._policy import Cost, Key, Mode, OnStoreError, Policy, Rules, join_key
    from tidegate._runtime.clock import Clock, Signal
    from tidegate.core import Decision, Limit, LimitDecision
    from tidegate.errors import Closed, ConfigError, Denied, RateLimitError, ResourceUnknown, StoreUnavailable
    from tidegate.observe import Observer, Record
    from tidegate.stores import Store, open_store
    from tidegate.stores._lease import Lease

__all__ = [
    "AsyncLimited",
    "AsyncLimiter",
    "AsyncReservation",
    "Clock",
    "Closed",
    "ConfigError",
    "Cost",
    "Decision",
    "Denied",
    "Key",
    "Lease",
    "Limit",
    "LimitDecision",
    "Limited",
    "Limiter",
    "Mode",
    "Observer",
    "OnStoreError",
    "Policy",
    "RateLimitError",
    "Record",
    "Reservation",
    "Reserving",
    "ResourceUnknown",
    "Rules",
    "Signal",
    "Store",
    "StoreUnavailable",
    "Usage",
    "join_key",
    "open_store",
    "reserve",
    "reserve_async",
    "reserve_first",
    "reserve_first_async",
]

if not TYPE_CHECKING:  # a type checker would accept any name
    NAMES_BY_MODULE = {
        "tidegate._runtime.clock": "Clock Signal",
        "tidegate.core": "Decision Limit LimitDecision",
        "tidegate.errors": "Closed ConfigError Denied RateLimitError ResourceUnknown StoreUnavailable",
        "tidegate._limiter.joint": "reserve reserve_async reserve_first reserve_first_async",
        "tidegate._limiter.limited": "AsyncLimited Limited",
        "tidegate._limiter.limiter": "AsyncLimiter Limiter Usage",
        "tidegate.observe": "Observer Record",
        "tidegate._policy": "Cost Key Mode OnStoreError Policy Rules join_key",
        "tidegate._limiter.reservation": "AsyncReservation Reservation Reserving",
        "tidegate.stores": "Store open_store",
        "tidegate.stores._lease": "Lease",
    }

    def __getattr__(name: str) -> object:
        """Import a public name from its module."""
        for module, names in NAMES_BY_MODULE.items():
            if name in names.split():
                value = globals()[name] = getattr(import_module(module), name)
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        """List the public names."""
        return sorted({*globals(), *__all__})
