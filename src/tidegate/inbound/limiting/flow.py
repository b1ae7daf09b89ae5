"""Logic written once as a generator of things to call, run by threads and by tasks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, TypeVar

R = TypeVar("R")
Steps = Generator[Callable[[], Any], Any, R]


def drive(steps: Steps[R]) -> R:
    """Call what the steps want called, and tell them what came of it."""
    with closing(steps):
        go: Callable[[Any], Callable[[], Any]] = steps.send
        value: Any = None
        while True:
            try:
                step = go(value)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]  # R, by the type of Steps
            try:
                go, value = steps.send, step()
            except Exception as error:  # noqa: BLE001 - the steps decide what it means
                go, value = steps.throw, error


async def drive_async(steps: Steps[R]) -> R:
    """Do the same in a task: await what has to be awaited."""
    with closing(steps):
        go: Callable[[Any], Callable[[], Any]] = steps.send
        value: Any = None
        while True:
            try:
                step = go(value)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]  # as above
            try:
                value = step()
                go, value = steps.send, await value if inspect.isawaitable(value) else value
            except Exception as error:  # noqa: BLE001 - as above
                go, value = steps.throw, error
