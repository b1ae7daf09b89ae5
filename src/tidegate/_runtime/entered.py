"""Keeps what each caller of a context manager entered it with, so that threads and tasks can share the object."""

from __future__ import annotations

import asyncio
import threading
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")


def current_caller() -> object:
    """Return the running task, or what identifies the running thread."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        task = None
    return threading.get_ident() if task is None else task


class EnteredBlocks(Generic[T]):
    """A value for each entered block of one context manager: `__enter__` adds it and `__exit__` removes it.

    A thread or task removes its own latest value. If it has none, because a block is left by another task than the one
    that entered it, it removes the latest of all. Every step is a single operation of a dict, so no lock is needed.
    """

    __slots__ = ("_entered", "_numbers")

    def __init__(self) -> None:
        """Start without blocks."""
        self._numbers = count()
        self._entered: dict[int, tuple[object, T]] = {}

    def add(self, value: T) -> T:
        """Add the value of a block that the caller enters; returns it."""
        self._entered[next(self._numbers)] = current_caller(), value
        return value

    def remove(self) -> T | None:
        """Remove and return the value of the block that the caller leaves; None if no block was entered."""
        caller, entered = current_caller(), self._entered.copy()
        own = [number for number, (owner, _) in entered.items() if owner == caller]
        for number in reversed(own or list(entered)):
            found = self._entered.pop(number, None)
            if found is not None:
                return found[1]
        return None
