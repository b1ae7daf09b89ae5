"""Measure the memory per key, without the key itself, with tracemalloc in a new process."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Awaitable
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Final

from bench.libraries import OURS
from bench.timing import LOOP
from bench.workers import Case

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.libraries import Ask, Library

QUOTA: Final = 100  # a day


def bytes_per_key(number: int, seconds: float, library: Library) -> Callable[[], dict[str, float]] | None:
    """Ask for each of so many keys, and see what stays; after so many seconds, with the keys there are by then."""
    return partial(weigh, number, inf if library.NAME == OURS else seconds, library)


def weigh(number: int, seconds: float, library: Library) -> dict[str, float]:
    """Fill a new limiter with so many keys."""
    keys = [f"user:{each}" for each in range(number)]
    gc.collect()
    tracemalloc.start()
    ask = library.per_day_keyed_async(QUOTA) if hasattr(library, "per_day_keyed_async") else library.per_day(QUOTA)
    filled = LOOP.run_until_complete(fill(ask, keys, time.monotonic() + seconds))
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {"bytes": size / filled, "keys": filled}


async def fill(ask: Ask, keys: list[str], until: float) -> int:
    """Ask twice for each key: after the first call, keys may still share what the second gives each its own."""
    for filled, key in enumerate(keys, start=1):
        for _ in range(2):
            answer = ask(key)
            if isinstance(answer, Awaitable):
                await answer
        if filled % 1000 == 0 and time.monotonic() > until:
            return filled
    return len(keys)


CASES = (
    Case("memory-100k", "bytes per key, 100,000 keys", partial(bytes_per_key, 100_000, 20)),
    Case("memory-1m", "bytes per key, 1,000,000 keys", partial(bytes_per_key, 1_000_000, 50)),
)
