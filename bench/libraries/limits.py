"""limits: fixed-window, its fastest strategy; answers with a bool, the numbers are a second question."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from limits import RateLimitItemPerSecond  # type: ignore[import-not-found]  # peers are only in .venv-bench
from limits.aio.storage import MemoryStorage as AsyncMemoryStorage  # type: ignore[import-not-found]  # as above
from limits.aio.strategies import (  # type: ignore[import-not-found]  # as above
    FixedWindowRateLimiter as AsyncFixedWindowRateLimiter,
)
from limits.storage import MemoryStorage  # type: ignore[import-not-found]  # as above
from limits.strategies import FixedWindowRateLimiter  # type: ignore[import-not-found]  # as above

from bench.libraries import DAY, FIVE

if TYPE_CHECKING:
    from bench.libraries import Ask, AskAsync

NAME = DISTRIBUTION = "limits"
STRATEGY = "fixed-window; bool"
HOT = "user:42"


def per_day(quota: int, days: int = 1) -> Ask:
    """Ask for one permit of `quota` in so many days."""
    return partial(FixedWindowRateLimiter(MemoryStorage()).hit, RateLimitItemPerSecond(quota, days * DAY))


def admitted(answer: object) -> bool:
    """Read an answer."""
    return answer is True


def per_day_told(quota: int) -> Ask:
    """Ask, then ask for the numbers."""
    limiter, item = FixedWindowRateLimiter(MemoryStorage()), RateLimitItemPerSecond(quota, DAY)

    def ask(key: str) -> Any:  # noqa: ANN401 - only built, never read
        return limiter.hit(item, key), limiter.get_window_stats(item, key)

    return ask


def five() -> Ask:
    """Ask one limit after the other: not all or nothing, this library has no such thing."""
    hit = FixedWindowRateLimiter(MemoryStorage()).hit
    items = [RateLimitItemPerSecond(quota, seconds) for quota, seconds in FIVE]

    def ask(key: str) -> bool:
        return all(hit(item, key) for item in items)

    return ask


def per_day_async(quota: int) -> AskAsync:
    """Ask, awaited."""
    return partial(AsyncFixedWindowRateLimiter(AsyncMemoryStorage()).hit, RateLimitItemPerSecond(quota, DAY))
