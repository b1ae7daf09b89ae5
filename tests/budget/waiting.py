"""Waiting for what happens in the background of a budget: in real time, until it is so."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

LONGEST = 30.0


def until(condition: Callable[[], object], what: str) -> None:
    """Look again and again until something is so."""
    deadline = time.monotonic() + LONGEST
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {LONGEST} s"
        time.sleep(0.005)
