"""TaskBudget for threads and AsyncTaskBudget for asyncio: both run the same operations."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from tidegate._limiter.joint import async_performer, performer
from tidegate._limiter.limiter import AsyncLimiter, Limiter
from tidegate._runtime.flow import run, run_async
from tidegate.budget._batch import AsyncBatch, Batch
from tidegate.budget._operations import BudgetOperations, BudgetStep
from tidegate.budget._reload import reload_limits
from tidegate.budget._settings.environment import VARIABLES, read_environment
from tidegate.budget._settings.file import read_config
from tidegate.budget._settings.model import BudgetSettings
from tidegate.budget._storage.settlements import locate_storage_errors
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping
    from typing import Unpack

    from tidegate._limiter.waiting import Step
    from tidegate._runtime.clock import Clock
    from tidegate.budget._operations import BudgetFlow
    from tidegate.budget._result import BudgetHealth, RateLimitResult, Usage
    from tidegate.budget._settings.model import BudgetOptions

T = TypeVar("T")


class _ConfiguredBudget:
    """Base class of both budgets: construction, settings, and the state of the database. No method waits."""

    _limiter_type: ClassVar[type[Limiter | AsyncLimiter]]
    _read_settings: Callable[[], BudgetSettings] | None = None  # reads them again, from where they came

    def __init__(
        self,
        settings: BudgetSettings | str | Path | None = None,
        *,
        clock: Clock | None = None,
        load: Callable[[], float] | None = None,
        **options: Unpack[BudgetOptions],
    ) -> None:
        """Open a budget with settings, or with their fields as keywords, such as `per_minute=20, per_day=500`.

        A path or URL as the first argument is the store: `TaskBudget("rate_limits.db", per_day=500)`. Without further
        settings, `TaskBudget("rate_limits.db")` reads them from the environment, as `from_env` does.
        `load` returns the system load, from 0 to 1: rules of the schedule with `load_above` need it. `clock` replaces
        the clock, for tests.
        """
        if isinstance(settings, (str, Path)):
            if "store" in options:
                raise ConfigError("cannot be combined with a path as the first argument", field="store")
            if options:
                options["store"] = settings
                settings = BudgetSettings(**options)
            else:
                self._read_settings = partial(read_environment, store=settings)
                settings = self._read_settings()
        elif settings is None:
            settings = BudgetSettings(**options)
        elif not isinstance(settings, BudgetSettings):
            message = f"expected BudgetSettings, or the path or URL of the store, not {settings!r}"
            raise ConfigError(message, field="settings")
        elif options:
            message = f"cannot be combined with {', '.join(sorted(options))}: set these fields in the settings"
            raise ConfigError(message, field="settings")
        self.operations: BudgetOperations = BudgetOperations(settings, self._limiter_type, clock, load)

    @classmethod
    def from_env(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        clock: Clock | None = None,
        load: Callable[[], float] | None = None,
    ) -> Self:
        """Read the settings from environment variables (RATE_LIMIT_PER_MINUTE …); disabled unless RATE_LIMIT_ENABLED.

        One ConfigError lists every wrong variable. RATE_LIMIT_CONFIG may name a YAML file with further settings.
        """
        with locate_storage_errors(field=VARIABLES["store"]):
            return cls._open(partial(read_environment, environ), clock, load)

    @classmethod
    def from_config(
        cls,
        source: str | Path | Mapping[str, object],
        *,
        clock: Clock | None = None,
        load: Callable[[], float] | None = None,
    ) -> Self:
        """Read the settings from a YAML file or a mapping of the same shape; see `tidegate.budget._settings.file`."""
        with locate_storage_errors(file=str(source) if isinstance(source, (str, Path)) else None):
            return cls._open(lambda: BudgetSettings(**read_config(source)), clock, load)

    @classmethod
    def _open(
        cls, read_settings: Callable[[], BudgetSettings], clock: Clock | None, load: Callable[[], float] | None
    ) -> Self:
        budget = cls(read_settings(), clock=clock, load=load)
        budget._read_settings = read_settings
        return budget

    @classmethod
    def to_read(cls, settings: BudgetSettings, *, clock: Clock | None = None) -> Self:
        """Open a budget that is only shown: it creates no file, and reports a missing one as unavailable."""
        budget = cls.__new__(cls)
        budget.operations = BudgetOperations(settings, cls._limiter_type, clock, None, only_reads=True)
        return budget

    def reload(self) -> bool:
        """Read the file or the environment again, and use new limits; returns whether they have changed.

        Usage is kept. If the file is invalid, or adds or removes tiers, an error is logged and the previous limits stay
        in effect. Other settings need a restart. Raises ConfigError if the budget was built from keywords.
        """
        if self._read_settings is None:
            raise ConfigError("the budget was not built from a file or the environment: there is nothing to reload")
        return reload_limits(self.operations, self._read_settings)

    @property
    def settings(self) -> BudgetSettings:
        """The settings of the budget."""
        return self.operations.settings

    @property
    def lost(self) -> bool:
        """Whether the database is unavailable."""
        return self.operations.lost

    @property
    def backlog(self) -> int:
        """How many settlements are queued for the database."""
        return self.operations.backlog

    def snapshot(self) -> dict[str, Usage]:
        """Read the usage of each tier without changing anything. Blocks while the database is read."""
        return self.operations.snapshot()

    def catch_up(self) -> bool:
        """Send queued settlements to the database now; returns whether none are left. A thread does this anyway."""
        return self.operations.catch_up()


class TaskBudget(_ConfiguredBudget):
    """Limits batches of tasks per minute, hour, day, week and month; every limit must allow a batch.

    `check_all_limits` reserves the permits of a batch that it allows, so two batches never use the same permits.
    `record_completed_tasks` settles a batch: completed tasks stay counted, the others are returned. `batch` does both
    around a block. Threads can share a budget object; processes share a budget through its store. A context manager
    that closes the budget.
    """

    _limiter_type = Limiter

    def check_all_limits(
        self,
        task_count: int = 1,
        *,
        task_type: str | None = None,
        cost: Mapping[str, int] | None = None,
        priority: int = 0,
    ) -> RateLimitResult:
        """Reserve a batch on all tiers, or on none, and return the usage of each tier.

        `cost` is an estimate by unit. A batch that is not recorded or cancelled within `batch_ttl` is returned.
        """
        return self._run(self.operations.check_flow(task_count, task_type, cost, priority))

    def record_completed_tasks(
        self,
        task_count: int | None = None,
        *,
        task_type: str | None = None,
        task_ids: Iterable[str] | None = None,
        cost: Mapping[str, int] | None = None,
        result: RateLimitResult | None = None,
    ) -> None:
        """Record tasks of a batch as completed; the rest of the batch is returned.

        `result` is the result of the batch's check; by default a batch of as many tasks is settled, or the oldest one.
        Tasks that were not reserved are counted too. `task_count` defaults to 1, or to the number of `task_ids`.
        """
        self._run(self.operations.record_flow(task_count, task_type, task_ids, cost, result))

    def cancel(self, result: RateLimitResult | None = None) -> None:
        """Return a batch that was not processed: that of `result`, or the oldest one."""
        self._run(self.operations.cancel_flow(result))

    def batch(
        self,
        task_count: int = 1,
        *,
        task_type: str | None = None,
        cost: Mapping[str, int] | None = None,
        priority: int = 0,
        timeout: float | None = 0.0,
    ) -> Batch:
        """Reserve a batch around a block: recorded at the end of the block, returned after an exception.

        Raises Denied if a tier denies the batch, after waiting up to `timeout` seconds (None: without a limit).
        """
        return Batch(self.operations, self._run, (task_count, task_type, cost, priority, timeout))

    def get_current_usage(self) -> dict[str, Usage]:
        """Return the usage of each tier, including reservations."""
        return self._run(self.operations.usage_flow())

    def reset_expired_windows(self) -> int:
        """Refund expired batches and remove old completions; returns how many of both.

        Results are correct without it: windows that ended do not count in any case.
        """
        return self._run(self.operations.reset_expired_flow())

    def health(self) -> BudgetHealth:
        """Describe the state of the budget, for a health endpoint: status, database, tiers."""
        return self._run(self.operations.health_flow())

    def close(self) -> None:
        """Return open batches, send queued settlements to the database, and close it."""
        self._run(self.operations.close_flow())

    def __enter__(self) -> Self:
        """Return the budget, which is closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the budget."""
        self.close()

    def _run(self, flow: BudgetFlow[T]) -> T:
        return run(flow, self._perform)

    def _perform(self, step: BudgetStep | Step) -> Any:  # noqa: ANN401 - the result of the call
        if not isinstance(step, BudgetStep):
            return performer(self.operations.limiter.clock)(step)
        return getattr(step.target, step.method)(*step.arguments, **step.options)


class AsyncTaskBudget(_ConfiguredBudget):
    """A TaskBudget for asyncio: the same methods as coroutines."""

    _limiter_type = AsyncLimiter

    async def check_all_limits(
        self,
        task_count: int = 1,
        *,
        task_type: str | None = None,
        cost: Mapping[str, int] | None = None,
        priority: int = 0,
    ) -> RateLimitResult:
        """Reserve a batch on all tiers, or on none; see `TaskBudget.check_all_limits`."""
        return await self._run(self.operations.check_flow(task_count, task_type, cost, priority))

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
        await self._run(self.operations.record_flow(task_count, task_type, task_ids, cost, result))

    async def cancel(self, result: RateLimitResult | None = None) -> None:
        """Return a batch that was not processed: that of `result`, or the oldest one."""
        await self._run(self.operations.cancel_flow(result))

    def batch(
        self,
        task_count: int = 1,
        *,
        task_type: str | None = None,
        cost: Mapping[str, int] | None = None,
        priority: int = 0,
        timeout: float | None = 0.0,  # the same keywords as TaskBudget
    ) -> AsyncBatch:
        """Reserve a batch around a block (`async with`); see `TaskBudget.batch`."""
        return AsyncBatch(self.operations, self._run, (task_count, task_type, cost, priority, timeout))

    async def get_current_usage(self) -> dict[str, Usage]:
        """Return the usage of each tier, including reservations."""
        return await self._run(self.operations.usage_flow())

    async def reset_expired_windows(self) -> int:
        """Return expired batches and remove old completions; see `TaskBudget.reset_expired_windows`."""
        return await self._run(self.operations.reset_expired_flow())

    async def health(self) -> BudgetHealth:
        """Describe the state of the budget, for a health endpoint: status, database, tiers."""
        return await self._run(self.operations.health_flow())

    async def close(self) -> None:
        """Return open batches, send queued settlements to the database, and close it."""
        await self._run(self.operations.close_flow())

    async def __aenter__(self) -> Self:
        """Return the budget, which is closed at the end of the block."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the budget."""
        await self.close()

    def _run(self, flow: BudgetFlow[T]) -> Coroutine[Any, Any, T]:
        return run_async(flow, self._perform)

    async def _perform(self, step: BudgetStep | Step) -> Any:  # noqa: ANN401 - the result of the call
        if not isinstance(step, BudgetStep):
            return await async_performer(self.operations.limiter.clock)(step)
        if step.kind == "limiter":
            return await getattr(step.target, step.method)(*step.arguments, **step.options)
        if step.kind == "blocking":
            return await asyncio.to_thread(getattr(step.target, step.method), *step.arguments, **step.options)
        settling = getattr(step.target, f"{step.method}_async")(*step.arguments, **step.options)
        return await asyncio.shield(asyncio.ensure_future(settling))  # completed even if the task is cancelled
