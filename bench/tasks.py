"""The same calls from an asyncio task."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING

from bench.hot_key import check
from bench.libraries import HUGE
from bench.many_keys import QUOTA, shuffled
from bench.timing import LOOP, same, slices_async
from bench.workers import Case

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.libraries import AskAsync, Library


def allowed(library: Library) -> Callable[[], float] | None:
    """Every call may proceed."""
    if not hasattr(library, "per_day_async"):
        return None
    ask = library.per_day_async(HUGE)
    check(library.admitted(answer(ask, library.HOT)), expected=True)
    return slices_async(ask, same(library.HOT))


def denied(library: Library) -> Callable[[], float] | None:
    """No call may proceed, the quota was spent before; aiolimiter would wait."""
    if not hasattr(library, "per_day_async") or library.NAME == "aiolimiter":
        return None
    ask = library.per_day_async(10)
    for _ in range(10):
        check(library.admitted(answer(ask, library.HOT)), expected=True)
    check(library.admitted(answer(ask, library.HOT)), expected=False)
    return slices_async(ask, same(library.HOT))


def known(library: Library) -> Callable[[], float] | None:
    """Ask 100,000 keys that have a state."""
    keyed = getattr(library, "per_day_keyed_async", None) or getattr(library, "per_day_async", None)
    if keyed is None:
        return None
    ask, keys = keyed(QUOTA), shuffled()

    async def fill() -> None:
        for key in keys:
            await ask(key)

    LOOP.run_until_complete(fill())
    return slices_async(ask, cycle(keys))


def answer(ask: AskAsync, key: object) -> object:
    """Ask once."""

    async def once() -> object:
        return await ask(key)

    return LOOP.run_until_complete(once())


CASES = (
    Case("async-allowed", "async, hot key, allowed", allowed),
    Case("async-denied", "async, hot key, denied", denied),
    Case("async-known", "async, 100,000 keys", known),
)
