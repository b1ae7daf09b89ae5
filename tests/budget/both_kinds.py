"""Both kinds of budget with the same methods, so that each test runs with both."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tidegate.budget import AsyncTaskBudget, TaskBudget

if TYPE_CHECKING:
    from collections.abc import Callable

START = 1_750_000_000  # 2025-06-15 15:06:40 UTC, a Sunday


class BlockingBudget:
    """An AsyncTaskBudget on its own event loop, used like a TaskBudget."""

    def __init__(self, runner: asyncio.Runner, create: Callable[[], AsyncTaskBudget]) -> None:
        """Create the budget on the loop."""
        self._runner = runner

        async def start() -> AsyncTaskBudget:
            return create()

        self.budget = runner.run(start())

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.budget, name)
        if not asyncio.iscoroutinefunction(attribute):
            return attribute

        def call(*arguments: Any, **options: Any) -> Any:
            return self._runner.run(attribute(*arguments, **options))

        return call

    @contextmanager
    def batch(self, *arguments: Any, **options: Any) -> Any:
        batch = self.budget.batch(*arguments, **options)
        self._runner.run(batch.__aenter__())
        try:
            yield BlockingBatch(self._runner, batch)
        except BaseException as error:
            self._runner.run(batch.__aexit__(type(error), error, None))
            raise
        self._runner.run(batch.__aexit__(None, None, None))


class BlockingBatch:
    """A batch of a BlockingBudget."""

    def __init__(self, runner: asyncio.Runner, batch: Any) -> None:
        self._runner = runner
        self._batch = batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def record(self, *arguments: Any, **options: Any) -> None:
        self._runner.run(self._batch.record(*arguments, **options))


KINDS = {"threads": TaskBudget, "tasks": AsyncTaskBudget}


def used(budget: Any) -> dict[str, int]:
    """Return how much of each tier is used."""
    return {tier: usage.used for tier, usage in budget.get_current_usage().items()}
