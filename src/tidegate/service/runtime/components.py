"""What runs beside the decisions in the same process, and how it is shown: sources, a task budget, a swarm.

Each part is there if the settings name it. `open` refuses what is wrong with any of them before anything runs; `stop`
lets requests of sources end, `close` lets go of everything.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from tidegate.service.http.problems import ProblemError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.budget import BudgetSettings, TaskBudget
    from tidegate.bus import Bus
    from tidegate.outbound.providers.registry import Permissions
    from tidegate.outbound.sources import SourceRunner as Sources
    from tidegate.service.config.settings import Settings
    from tidegate.service.http import App

log = logging.getLogger("tidegate.service")

SWARM_SECRET_VARIABLE = "TIDEGATE_SWARM_SECRET"  # noqa: S105 - the name of a variable


class Components:
    """The parts of one process. An async context manager: open inside, closed at its end."""

    def __init__(self, settings: Settings, app: App) -> None:
        """Prepare what the settings name; it is shown by the app's panels."""
        self.settings = settings
        self.app = app
        self.sources: Sources | None = None
        self.budget: TaskBudget | None = None
        self.fetching: asyncio.Task[None] | None = None
        self.traffic: asyncio.Task[None] | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Open all of them, or none."""
        try:
            if self.settings.runs_sources:
                await self._open_sources()
            if self.settings.budget:
                self._open_budget()
            if self.settings.swarm:
                self._open_swarm(self.settings.swarm)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Let sources end what is under way, and close everything."""
        await self.stop()
        await self._stack.aclose()

    def start(self) -> None:
        """Begin to fetch, and, in a demonstration, to make traffic."""
        if self.sources is not None:
            self.fetching = asyncio.create_task(self.sources.run(self.settings.stop_within))
        if self.settings.demo:
            from tidegate.service.runtime.demo import DemoTraffic  # noqa: PLC0415 - hardly any service makes some

            self.traffic = asyncio.create_task(DemoTraffic(self).run())
            self.traffic.add_done_callback(ended)

    async def stop(self) -> None:
        """Fetch nothing more; wait for what is under way, as long as the settings allow."""
        if self.traffic is not None:
            self.traffic.cancel()
            await asyncio.gather(self.traffic, return_exceptions=True)
        if self.sources is not None and self.fetching is not None:
            self.sources.stop()
            await asyncio.gather(self.fetching, return_exceptions=True)

    async def _open_sources(self) -> None:
        from tidegate.outbound.providers.registry import Providers  # noqa: PLC0415 - most services run no sources
        from tidegate.outbound.sources import SourceRunner  # noqa: PLC0415 - needs httpx
        from tidegate.outbound.sources.configured import find_sources  # noqa: PLC0415 - as above
        from tidegate.outbound.sources.control import ControlServer  # noqa: PLC0415 - as above
        from tidegate.service.dashboard.panels import sources_panel  # noqa: PLC0415 - as above

        settings = self.settings
        permissions = cast("Permissions", settings.permissions)
        providers = Providers.load(settings.providers, settings.provider_dirs, permissions=permissions)
        found = find_sources(settings.sources, settings.source_dirs, settings.data_folder)
        # What is counted for a provider has to outlive the process: memory is for decisions only.
        store = None if settings.store.startswith("memory:") else settings.store
        options: dict[str, Any] = {"store": store, "workers": settings.fetchers, "bus": settings.bus}
        self.sources = SourceRunner(providers, found, data=settings.data_folder, **options)
        await self._stack.enter_async_context(self.sources)
        await self._stack.enter_async_context(ControlServer(self.sources))
        if self.sources.gate.bus is not None:
            self._watch("bus", self.sources.gate.bus, str(settings.bus))
        self.app.panels["sources"] = sources_panel(self.sources)

    def _open_budget(self) -> None:
        from tidegate.budget import TaskBudget  # noqa: PLC0415 - most services show no budget
        from tidegate.service.dashboard.panels import budget_panel  # noqa: PLC0415 - as above

        where = self.settings.budget
        self.budget = TaskBudget(budget_settings(where if isinstance(where, Path) else None))
        self._stack.callback(self.budget.close)
        self.app.panels["budgets"] = budget_panel(self.budget)

    def _open_swarm(self, url: str) -> None:
        from tidegate.bus import open_bus  # noqa: PLC0415 - most services show no swarm
        from tidegate.service.dashboard.panels import swarm_panel  # noqa: PLC0415 - as above

        bus = open_bus(url)
        self._stack.callback(bus.close)
        panel = self.app.panels["swarm"] = swarm_panel(bus, os.environ.get(SWARM_SECRET_VARIABLE) or None)
        self._stack.callback(panel.close)
        self._watch("swarm", bus, url)

    def _watch(self, name: str, bus: Bus, url: str) -> None:
        """Show a bus, and be ready only while it is there."""
        from tidegate.service.dashboard.panels import bus_panel  # noqa: PLC0415 - loads what the parts need

        self.app.checks[name] = connected(bus)
        self.app.panels.setdefault("bus", bus_panel(bus, url))


def ended(traffic: asyncio.Task[None]) -> None:
    """Say why demonstration traffic has ended, if it was not told to."""
    if not traffic.cancelled() and traffic.exception() is not None:
        log.error("the demonstration traffic has ended", exc_info=traffic.exception())


def connected(bus: Bus) -> Callable[[], None]:
    """Make a check that a bus is there."""

    def check() -> None:
        if not bus.connected:
            raise ProblemError("bus-unavailable", "the bus cannot be reached: see the log of the service and its own")

    return check


def budget_settings(config: Path | None = None, storage: str | None = None) -> BudgetSettings:
    """Find a budget to look at, of a file or of the environment: also one that is switched off, and telling nobody."""
    from tidegate.budget import BudgetSettings  # noqa: PLC0415 - most services show no budget
    from tidegate.budget.settings.environment import read_environment  # noqa: PLC0415 - as above
    from tidegate.budget.settings.file import read_config  # noqa: PLC0415 - as above

    if config is None:
        values = dict(read_environment({**os.environ, "RATE_LIMIT_ENABLED": "true"}).__dict__)
    else:
        values = {**read_config(config), "enabled": True}
    return BudgetSettings(**values | {"webhook_url": None} | ({} if storage is None else {"storage": storage}))
