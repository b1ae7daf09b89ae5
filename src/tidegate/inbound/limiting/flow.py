"""Drives generators of steps, so that logic for sync and async callers is written once.

A step is a callable; its result, or its exception, is sent back into the generator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, TypeVar

R = TypeVar("R")
Steps = Generator[Callable[[], Any], Any, R]


def drive(steps: Steps[R]) -> R:
    """Run the steps and return the generator's result."""
    with closing(steps):
        resume: Callable[[Any], Callable[[], Any]] = steps.send
        value: Any = None
        while True:
            try:
                step = resume(value)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]  # R, by the type of Steps
            try:
                resume, value = steps.send, step()
            except Exception as error:  # noqa: BLE001 - the generator handles it
                resume, value = steps.throw, error


async def drive_async(steps: Steps[R]) -> R:
    """Run the steps in a task; await the results that are awaitable."""
    with closing(steps):
        resume: Callable[[Any], Callable[[], Any]] = steps.send
        value: Any = None
        while True:
            try:
                step = resume(value)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]  # as above
            try:
                value = step()
                resume, value = steps.send, await value if inspect.isawaitable(value) else value
            except Exception as error:  # noqa: BLE001 - as above
                resume, value = steps.throw, error
