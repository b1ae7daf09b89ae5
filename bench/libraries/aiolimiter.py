"""aiolimiter: asyncio only, without keys and without an answer: it waits. With keys, a dictionary of limiters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiolimiter import AsyncLimiter  # type: ignore[import-not-found]  # peers are only in .venv-bench

from bench.libraries import DAY

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from bench.libraries import AskAsync

NAME = DISTRIBUTION = "aiolimiter"
STRATEGY = "leaky bucket; waits, returns nothing"
HOT = 1  # the amount: it has no keys, so a hot key is a limiter asked directly


def admitted(answer: object) -> bool:
    """Read an answer: when it comes, the call may proceed."""
    return answer is None


def per_day_async(quota: int) -> AskAsync:
    """Ask one limiter, awaited."""
    return AsyncLimiter(quota, DAY).acquire  # type: ignore[no-any-return]  # an untyped peer


def per_day_keyed_async(quota: int) -> AskAsync:
    """Ask the limiter of a key, awaited."""
    limiters: dict[str, AsyncLimiter] = {}

    def ask(key: str) -> Awaitable[None]:
        limiter = limiters.get(key)
        if limiter is None:
            limiter = limiters[key] = AsyncLimiter(quota, DAY)
        return limiter.acquire()  # type: ignore[no-any-return]  # an untyped peer

    return ask
