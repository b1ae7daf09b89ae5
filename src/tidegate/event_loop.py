"""Runs a coroutine in an event loop: uvloop's, if it is installed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


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
