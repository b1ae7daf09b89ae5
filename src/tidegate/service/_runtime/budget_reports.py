"""What the service reports about its task budget: its health and its metrics, with the limits of its current file."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from tidegate._runtime.file_watcher import FileWatcher
from tidegate.budget._reload import reload_limits
from tidegate.budget.alerts._metrics import read_metrics

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tidegate._runtime.clock import Clock
    from tidegate.budget import BudgetSettings, TaskBudget
    from tidegate.observe._text_format import MetricFamily

MAX_HEALTH_WAIT: Final = 0.2  # seconds; a probe of the service must not fail because the budget's database is slow


class BudgetReports:
    """Reads a budget in threads, so that a slow database does not delay other requests."""

    def __init__(self, budget: TaskBudget) -> None:
        """Report about this budget."""
        self._budget = budget
        self._reading: asyncio.Task[dict[str, Any]] | None = None
        self._last: dict[str, Any] = {"status": "unknown"}

    async def health(self) -> dict[str, Any]:
        """Return the status of the budget and its database; the last known one if the database takes long."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(asyncio.to_thread(self._read_health))
        done, _ = await asyncio.wait({self._reading}, timeout=MAX_HEALTH_WAIT)
        if done:
            self._last = self._reading.result()
        return self._last

    def _read_health(self) -> dict[str, Any]:
        health = self._budget.health()
        return {name: health[name] for name in ("status", "database", "exhausted") if name in health}

    async def metrics(self) -> list[MetricFamily]:
        """Return the metrics of the budget."""
        return await asyncio.to_thread(lambda: list(read_metrics(self._budget.operations)))


class BudgetFile:
    """Reloads the limits of the budget when its file changes, or at SIGHUP."""

    def __init__(self, budget: TaskBudget, file: Path, read: Callable[[], BudgetSettings], clock: Clock) -> None:
        """Watch this file of a budget; `read` reads its settings."""
        self._budget = budget
        self._read = read
        self._clock = clock
        self._watcher = FileWatcher((file,))

    def request_reload(self) -> None:
        """Read the file now, whether it has changed or not."""
        self._watcher.request_reload()

    async def run(self, seconds: float) -> None:
        """Check the file every few seconds, until cancelled."""
        await self._watcher.run(self._check, seconds, self._clock)

    async def _check(self) -> None:
        if self._watcher.changed():
            await asyncio.to_thread(reload_limits, self._budget.operations, self._read)
