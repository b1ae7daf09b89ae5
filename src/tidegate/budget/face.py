"""TaskBudget for threads, AsyncTaskBudget for tasks: two thin loops over the steps of `engine`."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING, Any, Self

from tidegate.budget.accounts import Step, Steps
from tidegate.budget.batch import AsyncBatch, Batch
from tidegate.budget.config import read_config
from tidegate.budget.engine import Budget
from tidegate.budget.environment import read_environment
from tidegate.budget.settings import BudgetSettings
from tidegate.errors import StoreUnavailable
from tidegate.limiter import AsyncLimiter, Limiter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from tidegate.budget.result import RateLimitResult, Usage
    from tidegate.clock import Clock


class _Face(Budget):
    """Where the two come from."""

    @classmethod
    def from_env(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        clock: Clock | None = None,
        load: Callable[[], float] | None = None,
    ) -> Self:
        """Take the settings from environment variables (RATE_LIMIT_PER_MINUTE …); off unless RATE_LIMIT_ENABLED.

        Every variable that is wrong is named in one ConfigError. RATE_LIMIT_CONFIG may name a YAML file for the rest.
        """
        return cls(read_environment(environ), clock=clock, load=load)

    @classmethod
    def from_config(
        cls,
        source: str | Path | Mapping[str, Any],
        *,
        clock: Clock | None = None,
        load: Callable[[], float] | None = None,
    ) -> Self:
        """Take the settings from a YAML file, or a mapping of the same shape; see `tidegate.budget.config`."""
        return cls(BudgetSettings(**read_config(source)), clock=clock, load=load)


class TaskBudget(_Face):
    """Budgets for batches of tasks, by minute, hour, day, week and month, all of which must pass.

    `check_all_limits` reserves what it allows, so two batches never pass on the same permits. `record_completed_tasks`
    settles: what was completed stays counted, what was not is given back. `batch` does both around a block. Safe to
    share between threads and, by a common storage, between processes; a context manager that closes itself.
    """

    def _open_limiter(self) -> Limiter:
        clock = None if self.clock is self.store.clock else self.clock
        return Limiter(self._terms.policy, store=self.store, clock=clock)

    def check_all_limits(
        self,
        task_count: int = 1,
        *,
        task_type: str | None = None,
        cost: Mapping[str, int] | None = None,
        priority: int = 0,
    ) -> RateLimitResult:
        """Reserve a batch on all tiers, or on none, and say how they stand.

        `cost` is an estimate by unit. Not recorded or cancelled within `batch_ttl`, the batch is given back.
        """
        return self._drive(self._checking(task_count, task_type, cost, priority))  # type: ignore[no-any-return]  # what the steps return

    def record_completed_tasks(
        self,
        task_count: int | None = None,
        *,
        task_type: str | None = None,
        task_ids: Iterable[str] | None = None,
        cost: Mapping[str, int] | None = None,
        result: RateLimitResult | None = None,
    ) -> None:
        """Record tasks of a batch as completed; the rest of the batch is given back.

        `result` says which batch, as its check answered; by default one of as many tasks, or the oldest. Tasks that
        nobody reserved are counted all the same. `task_count` is 1, or as many as there are `task_ids`.
        """
        self._drive(self._recording(task_count, task_type, task_ids, cost, result))

    def cancel(self, result: RateLimitResult | None = None) -> None:
        """Give a batch back that was not processed: that of `result`, or the oldest."""
        self._drive(self._cancelling(result))

    def batch(
        self,
        task_count: int = 1,
        *,
        task_type: str | None = None,
        cost: Mapping[str, int] | None = None,
        priority: int = 0,
        timeout: float | None = 0.0,
    ) -> Batch:
        """Reserve around a block: recorded at its end, given back after an exception.

        Raises Denied if a tier says no, having waited up to `timeout` seconds (None: as long as it takes).
        """
        return Batch(self, self._drive, (task_count, task_type, cost, priority, timeout))

    def get_current_usage(self) -> dict[str, Usage]:
        """Tell how much of each tier is used, what is reserved included."""
        return self._drive(self._using())  # type: ignore[no-any-return]  # what the steps return

    def reset_expired_windows(self) -> int:
        """Tidy up: give overdue batches back, remove completions that are too old; count both.

        Not needed for correct answers: a window that ended counts for nothing in any case.
        """
        return self._drive(self._resetting())  # type: ignore[no-any-return]  # what the steps return

    def health(self) -> dict[str, Any]:
        """Say how the budget is, for a health endpoint: status, database, tiers."""
        return self._drive(self._examining())  # type: ignore[no-any-return]  # what the steps return

    def close(self) -> None:
        """Give back what is open, tell the database what it missed, and let it go."""
        self._drive(self._closing())

    def __enter__(self) -> Self:
        """Close at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _drive(self, steps: Steps) -> Any:  # noqa: ANN401 - what the steps return
        """Ask for a generator of steps."""
        with closing(steps):
            step = advance(steps)
            while isinstance(step, Step):
                try:
                    answer = self._perform(step)
                except BaseException as error:  # noqa: BLE001 - raised again by the steps, or answered
                    step = advance(steps, error=error)
                else:
                    step = advance(steps, answer)
        return step[0]

    def _perform(self, step: Step) -> Any:  # noqa: ANN401 - what the step answers
        if step.on == "books":
            try:
                return getattr(self.books, step.call)(*step.arguments)
            except StoreUnavailable:
                return self._backlog.keep(step.call, step.arguments)
        call = step.call if step.on == "run" else getattr(getattr(self, step.on), step.call)
        return call(*step.arguments, **step.options)


class AsyncTaskBudget(_Face):
    """Budgets for batches of tasks, for tasks of an event loop: the names of TaskBudget, awaited."""

    def _open_limiter(self) -> AsyncLimiter:
        clock = None if self.clock is self.store.clock else self.clock
        return AsyncLimiter(self._terms.policy, store=self.store, clock=clock)

    async def check_all_limits(
        self,
        task_count: int = 1,
        *,
        task_type: str | None = None,
        cost: Mapping[str, int] | None = None,
        priority: int = 0,
    ) -> RateLimitResult:
        """Reserve a batch on all tiers, or on none; see `TaskBudget.check_all_limits`."""
        return await self._drive(self._checking(task_count, task_type, cost, priority))  # type: ignore[no-any-return]  # what the steps return

    async def record_completed_tasks(
        self,
        task_count: int | None = None,
        *,
        task_type: str | None = None,
        task_ids: Iterable[str] | None = None,
        cost: Mapping[str, int] | None = None,
        result: RateLimitResult | None = None,
    ) -> None:
        """Record tasks of a batch as completed; see `TaskBudget.record_completed_tasks`."""
        await self._drive(self._recording(task_count, task_type, task_ids, cost, result))

    async def cancel(self, result: RateLimitResult | None = None) -> None:
        """Give a batch back that was not processed."""
        await self._drive(self._cancelling(result))

    def batch(
        self,
        task_count: int = 1,
        *,
        task_type: str | None = None,
        cost: Mapping[str, int] | None = None,
        priority: int = 0,
        timeout: float | None = 0.0,  # the deadline is part of the contract
    ) -> AsyncBatch:
        """Reserve around a block (`async with`); see `TaskBudget.batch`."""
        return AsyncBatch(self, self._drive, (task_count, task_type, cost, priority, timeout))

    async def get_current_usage(self) -> dict[str, Usage]:
        """Tell how much of each tier is used, what is reserved included."""
        return await self._drive(self._using())  # type: ignore[no-any-return]  # what the steps return

    async def reset_expired_windows(self) -> int:
        """Tidy up; see `TaskBudget.reset_expired_windows`."""
        return await self._drive(self._resetting())  # type: ignore[no-any-return]  # what the steps return

    async def health(self) -> dict[str, Any]:
        """Say how the budget is, for a health endpoint: status, database, tiers."""
        return await self._drive(self._examining())  # type: ignore[no-any-return]  # what the steps return

    async def close(self) -> None:
        """Give back what is open, tell the database what it missed, and let it go."""
        await self._drive(self._closing())

    async def __aenter__(self) -> Self:
        """Close at the end of the block."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.close()

    async def _drive(self, steps: Steps) -> Any:  # noqa: ANN401 - what the steps return
        """Ask for a generator of steps. What is being settled is settled, even if the task is cancelled."""
        with closing(steps):
            step = advance(steps)
            while isinstance(step, Step):
                try:
                    answer = await self._perform(step)
                except BaseException as error:  # noqa: BLE001 - raised again by the steps, or answered
                    step = advance(steps, error=error)
                else:
                    step = advance(steps, answer)
        return step[0]

    async def _perform(self, step: Step) -> Any:  # noqa: ANN401 - what the step answers
        if step.on == "run":
            return await asyncio.to_thread(step.call, *step.arguments, **step.options)
        if step.on == "limiter":
            return await getattr(self.limiter, step.call)(*step.arguments, **step.options)
        return await asyncio.shield(asyncio.ensure_future(self._tell(step)))

    async def _tell(self, step: Step) -> None:
        """Settle; what cannot be told now is kept. Goes on when the task that asked is cancelled."""
        try:
            await getattr(getattr(self, step.on), f"{step.call}_async")(*step.arguments)
        except StoreUnavailable:
            if step.on != "books":
                raise
            self._backlog.keep(step.call, step.arguments)


def advance(steps: Steps, answer: object = None, error: BaseException | None = None) -> Step | tuple[Any]:
    """Go to the next step, or give what the steps return, in a tuple of one."""
    try:
        return steps.send(answer) if error is None else steps.throw(error)
    except StopIteration as done:
        return (done.value,)
