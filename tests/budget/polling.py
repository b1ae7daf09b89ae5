"""Polls for a condition in real time: for what a budget does in the background."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT = 30.0


def wait_until(condition: Callable[[], object], description: str) -> None:
    """Poll until the condition is true."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, f"{description}: not within {TIMEOUT} s"
        time.sleep(0.005)
