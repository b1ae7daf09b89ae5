"""Runs a coroutine in an event loop: uvloop's, if it is installed."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


GC_THRESHOLD: Final = 20_000  # allocations between two garbage collections of young objects


def freeze_heap() -> None:
    """Exempt all present objects, such as modules, from garbage collection, and collect less often from now on.

    A server that allocates for every request otherwise spends a tenth of its time on objects that live forever. Call
    it once in a process that only serves, when everything is loaded.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in a new event loop: uvloop's, if it is installed."""
    try:
        import uvloop  # noqa: PLC0415 - not available on every system
    except ImportError:
        factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    else:
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)
