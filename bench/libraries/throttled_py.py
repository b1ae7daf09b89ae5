"""throttled-py: gcra, a continuous refill like ours; answers with the numbers. Its token_bucket is slower."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from throttled import MemoryStore, Throttled, asyncio, per_duration  # type: ignore[import-not-found]  # peers are only in .venv-bench

from bench.libraries import DAY, FIVE

if TYPE_CHECKING:
    from bench.libraries import Ask, AskAsync

NAME = DISTRIBUTION = "throttled-py"
STRATEGY = "gcra; result with numbers"
HOT = "user:42"
ROOM = {"MAX_SIZE": 4_000_000}  # by default it forgets all but 1,024 keys


def limiter(quota: int, seconds: int = DAY) -> Any:  # noqa: ANN401 - an untyped peer
    """Limit by gcra."""
    rate = per_duration(timedelta(seconds=seconds), quota, burst=quota)
    return Throttled(using="gcra", quota=rate, store=MemoryStore(options=ROOM))


def per_day(quota: int, days: int = 1) -> Ask:
    """Ask for one permit of `quota` in so many days."""
    return limiter(quota, days * DAY).limit  # type: ignore[no-any-return]  # an untyped peer


def admitted(answer: Any) -> bool:  # noqa: ANN401 - an untyped peer
    """Read an answer."""
    return not answer.limited


def per_day_told(quota: int) -> Ask:
    """Ask, and read the numbers."""
    limit = limiter(quota).limit

    def ask(key: str) -> Any:  # noqa: ANN401 - only built, never read
        result = limit(key)
        state = result.state
        return result.limited, state.remaining, state.retry_after, state.reset_after

    return ask


def five() -> Ask:
    """Ask one limiter after the other: not all or nothing, this library has no such thing."""
    limits = [limiter(quota, seconds).limit for quota, seconds in FIVE]

    def ask(key: str) -> Any:  # noqa: ANN401 - an untyped peer
        return [limit(key) for limit in limits][-1]

    return ask


def per_day_async(quota: int) -> AskAsync:
    """Ask, awaited."""
    rate = per_duration(timedelta(days=1), quota, burst=quota)
    throttled = asyncio.Throttled(using="gcra", quota=rate, store=asyncio.MemoryStore(options=ROOM))
    return partial(throttled.limit)
