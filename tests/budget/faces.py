"""Both kinds of budget behind one set of names, so that a test shows something of both."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tidegate.budget import AsyncTaskBudget, TaskBudget

if TYPE_CHECKING:
    from collections.abc import Callable

START = 1_750_000_000  # 2025-06-15 15:06:40 UTC, a Sunday


class Awaited:
    """An AsyncTaskBudget on an event loop of its own, used like a TaskBudget."""

    def __init__(self, runner: asyncio.Runner, make: Callable[[], AsyncTaskBudget]) -> None:
        """Make the budget on the loop."""
        self._runner = runner

        async def start() -> AsyncTaskBudget:
            return make()

        self.budget = runner.run(start())

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.budget, name)
        if not asyncio.iscoroutinefunction(found):
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            return self._runner.run(found(*arguments, **options))

        return call

    @contextmanager
    def batch(self, *arguments: Any, **options: Any) -> Any:
        batch = self.budget.batch(*arguments, **options)
        self._runner.run(batch.__aenter__())
        try:
            yield AwaitedBatch(self._runner, batch)
        except BaseException as error:
            self._runner.run(batch.__aexit__(type(error), error, None))
            raise
        self._runner.run(batch.__aexit__(None, None, None))


class AwaitedBatch:
    def __init__(self, runner: asyncio.Runner, batch: Any) -> None:
        self._runner = runner
        self._batch = batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def record(self, *arguments: Any, **options: Any) -> None:
        self._runner.run(self._batch.record(*arguments, **options))


KINDS = {"threads": TaskBudget, "tasks": AsyncTaskBudget}


def used(budget: Any) -> dict[str, int]:
    """How much of each tier is used."""
    return {tier: usage.used for tier, usage in budget.get_current_usage().items()}
