"""tidegate: token_bucket, its default; answers with a full Decision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.libraries import DAY, FIVE
from tidegate import AsyncLimiter, Decision, Limit, Limiter

if TYPE_CHECKING:
    from bench.libraries import Ask, AskAsync

NAME = DISTRIBUTION = "tidegate"
STRATEGY = "token_bucket (default); full Decision"
HOT = "user:42"


def per_day(quota: int, days: int = 1) -> Ask:
    """Ask for one permit of `quota` in so many days."""
    return Limiter(Limit(quota, days * DAY)).try_acquire


def admitted(answer: Decision) -> bool:
    """Read an answer."""
    return answer.allowed


def per_day_told(quota: int) -> Ask:
    """Ask, and read the numbers."""
    try_acquire = Limiter(Limit(quota, "1d")).try_acquire

    def ask(key: str) -> Any:  # noqa: ANN401 - only built, never read
        decision = try_acquire(key)
        return decision.allowed, decision.remaining, decision.retry_after, decision.reset_after

    return ask


def five() -> Ask:
    """Ask five limits, all or nothing."""
    return Limiter([Limit(quota, seconds) for quota, seconds in FIVE]).try_acquire


def per_day_async(quota: int) -> AskAsync:
    """Ask, awaited."""
    return AsyncLimiter(Limit(quota, "1d")).try_acquire
