"""The optional components of a service process: sources, a task budget, a swarm, and their dashboard panels.

The settings say which components there are. Entering the context opens all of them, and raises if one is misconfigured,
before anything runs. `stop` waits for active requests of sources. Leaving the context closes everything.

If there are several workers, the first one runs the sources, watches the swarm and publishes their panels. All workers
show these panels, report the budget, grant permits of the providers and run the egress gateway on the same address.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from tidegate._policy.setting_values import read_variable
from tidegate.core._bounds import SECOND
from tidegate.errors import ConfigError
from tidegate.service._dashboard.run_panel import add_run_panel

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from tidegate._runtime.clock import Clock
    from tidegate.budget import BudgetSettings, TaskBudget
    from tidegate.bus import Bus
    from tidegate.egress._gateway import EgressGateway
    from tidegate.egress._reload import EgressFile, EgressRules
    from tidegate.observe._text_format import MetricFamily
    from tidegate.outbound._providers.registry import Permissions, Providers
    from tidegate.outbound._quota.gate import AsyncGate
    from tidegate.outbound.sources import SourceRunner
    from tidegate.outbound.sources._configured import ConfiguredSources
    from tidegate.service._config.settings import Settings
    from tidegate.service._http import App
    from tidegate.service._http.app import ReadinessCheck
    from tidegate.service._runtime.budget_reports import BudgetFile
    from tidegate.service._runtime.worker_link import WorkerLink
    from tidegate.spending import Spending

log: logging.Logger = logging.getLogger("tidegate.service")

SWARM_SECRET_VARIABLE = "TIDEGATE_SWARM_SECRET"  # noqa: S105 - the name of a variable


class Components:
    """The components of one process. An async context manager."""

    def __init__(
        self,
        settings: Settings,
        app: App,
        link: WorkerLink | None = None,
        egress_listener: socket.socket | None = None,
    ) -> None:
        """Prepare the components in the settings, for the panels of this app; one of several workers has a `link`."""
        self.settings = settings
        self.app = app
        self._link = link
        self._egress_listener = egress_listener
        self._first = link is None or link.first
        self.sources: SourceRunner | None = None
        self._source_files: ConfiguredSources | None = None
        self.budget: TaskBudget | None = None
        self.egress: EgressGateway | None = None
        self._egress_file: EgressFile | None = None
        self._budget_file: BudgetFile | None = None
        self._budget_task: asyncio.Task[None] | None = None
        self.fetch_task: asyncio.Task[None] | None = None
        self.demo_task: asyncio.Task[None] | None = None
        self._watch_task: asyncio.Task[None] | None = None
        self._gate: AsyncGate | None = None
        self._files_task: asyncio.Task[None] | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Open all components. If one fails, close the others."""
        add_run_panel(self.app.panels, self.app.families, self.app.decider.store)
        try:
            if self.settings.runs_sources and self._first:
                await self._open_sources()
            elif self.settings.has_providers:
                self._open_providers()
            # Only the first worker knows where the provider of the demo listens.
            if self._egress_listener is not None and (self._first or not self.settings.demo):
                await self._open_egress(self._egress_listener)
            if self.settings.budget:
                self._open_budget()
            if self.settings.swarm and self._first:
                self._open_swarm(self.settings.swarm)
            if self._link is not None:
                self._link.share_panels(self._first_worker_panels())
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    def _first_worker_panels(self) -> list[str]:
        """Return the names of the panels whose data only the first worker has."""
        settings = self.settings
        has_bus = settings.swarm or (settings.runs_sources and settings.bus)
        named = {"sources": settings.runs_sources, "swarm": settings.swarm, "bus": has_bus}
        return [name for name, configured in named.items() if configured]

    async def __aexit__(self, *_: object) -> None:
        """Wait for active requests of sources, then close everything."""
        await self.stop()
        await self._stack.aclose()

    def start(self) -> None:
        """Start to fetch sources and, with `--demo`, to generate traffic."""
        if self._gate is not None and (self._gate.providers.reloads or self._source_files):
            self._files_task = asyncio.create_task(watch_files(self._gate, self.sources, self._source_files))
        if self.sources is not None:
            self.fetch_task = asyncio.create_task(self.sources.run(self.settings.stop_within))
        if self._egress_file is not None:
            self._watch_task = asyncio.create_task(self._egress_file.run(self.settings.reload_every))
        if self._budget_file is not None:
            self._budget_task = asyncio.create_task(self._budget_file.run(self.settings.reload_every))
        if self.settings.demo and self._first:
            from tidegate.service._runtime.demo import DemoTraffic  # noqa: PLC0415 - only for --demo

            self.demo_task = asyncio.create_task(DemoTraffic(self).run())
            self.demo_task.add_done_callback(log_demo_failure)

    def request_reload(self) -> None:
        """Read the files of the budget and of the egress gateway now (SIGHUP).

        With several workers, the parent process reads the egress file.
        """
        for file in (self._egress_file, self._budget_file):
            if file is not None:
                file.request_reload()

    async def stop(self) -> None:
        """Start no more fetches; wait for active ones, for at most `stop_within`."""
        for task in (self._watch_task, self._files_task, self._budget_task):
            if task is not None:
                task.cancel()
        if self.demo_task is not None:
            self.demo_task.cancel()
            await asyncio.gather(self.demo_task, return_exceptions=True)
        if self.sources is not None and self.fetch_task is not None:
            self.sources.stop()
            await asyncio.gather(self.fetch_task, return_exceptions=True)

    def _open_providers(self) -> None:
        """Grant permits of the providers in a worker that fetches no sources; the store is shared with the first."""
        from tidegate.outbound._quota.gate import AsyncGate  # noqa: PLC0415 - most services have no providers

        spending = self._open_spending()
        gate = AsyncGate(
            load_providers(self.settings), self.settings.store, bus=self.settings.bus, spending=spending, reload=None
        )
        self._stack.push_async_callback(gate.close)
        self._add_providers(gate)
        if gate.bus is not None:
            self.app.checks.append(bus_check(gate.bus))

    async def _open_sources(self) -> None:
        from tidegate.outbound.sources import SourceRunner  # noqa: PLC0415 - needs httpx
        from tidegate.outbound.sources._configured import ConfiguredSources  # noqa: PLC0415 - as above
        from tidegate.outbound.sources._control import ControlServer  # noqa: PLC0415 - as above
        from tidegate.service._dashboard.panels import sources_panel  # noqa: PLC0415 - as above

        settings = self.settings
        self._source_files = ConfiguredSources(settings.sources, settings.source_dirs, settings.data_folder)
        found = self._source_files.load()
        # Usage of a provider must outlive the process: a store in memory is for decisions only.
        store = None if settings.store.startswith("memory:") else settings.store
        options: dict[str, Any] = {"store": store, "workers": settings.fetchers, "bus": settings.bus}
        options["interval"] = settings.source_interval
        options["spending"] = self._open_spending()
        options["reload"] = None  # `watch_files` does it
        self.sources = SourceRunner(load_providers(self.settings), found, data=settings.data_folder, **options)
        await self._stack.enter_async_context(self.sources)
        await self._stack.enter_async_context(ControlServer(self.sources, settings.local_url))
        self._add_providers(self.sources.gate)
        if self.sources.gate.bus is not None:
            self._add_bus(self.sources.gate.bus, str(settings.bus))
        self.app.panels["sources"] = sources_panel(self.sources)
        self.app.reports["sources"] = self.sources.health

    def _open_spending(self) -> Spending | None:
        """Record what calls cost, and warn, as the settings say."""
        settings = self.settings.spending
        if settings is None:
            return None
        spending = settings.open()
        self._stack.callback(spending.close)
        spending.warnings.move_to(self.app.decider.stats.counters)
        return spending

    def _add_providers(self, gate: AsyncGate) -> None:
        """Grant permits of providers, show the members of their pools, and report their money."""
        from tidegate.outbound._quota.money_metrics import read_money_metrics  # noqa: PLC0415 - most services have none
        from tidegate.service._dashboard.panels import PoolsPanel  # noqa: PLC0415 - loads the dependencies of the components

        self._gate = gate
        self.app.decider.open_providers(gate)
        self.app.families.append(partial(read_money_metrics, gate))
        if any(provider.pool is not None for provider in gate.providers):
            panel = self.app.panels["pools"] = PoolsPanel(gate, self.app.decider.stats.counters)
            self._stack.callback(panel.count)  # before the gate is closed
            self.app.on_sample.append(panel.count)

    async def _open_egress(self, listener: socket.socket) -> None:
        """Run the egress gateway in this process; its calls use the gate of the sources."""
        from tidegate.egress._gateway import EgressGateway  # noqa: PLC0415 - needs aiohttp
        from tidegate.egress._server import EgressServer  # noqa: PLC0415 - as above
        from tidegate.egress._stats import EgressStats  # noqa: PLC0415 - as above

        gate, link = self.app.decider.provider_permits.gate, self._link
        if link is None:
            self._egress_file = watch_egress(self.settings, gate.clock, self._use_egress, gate.providers)
            rules = self._egress_file.rules
        else:
            rules = link.egress_rules
        decider = self.app.decider
        gateway = self.egress = EgressGateway(
            gate, rules.settings, stats=EgressStats(decider.stats.counters), run_store=decider.store
        )
        await self._stack.enter_async_context(gateway)
        await self._stack.enter_async_context(EgressServer(gateway, listener))
        if link is not None:
            link.follow_egress(gateway.use)
        self.app.panels["egress"] = gateway.describe
        self.app.families.append(self._egress_metrics)

    def _use_egress(self, rules: EgressRules) -> None:
        if self.egress is not None:
            self.egress.use(rules)

    async def _egress_metrics(self) -> list[MetricFamily]:
        return [] if self.egress is None else self.egress.families()

    def _open_budget(self) -> None:
        from tidegate.budget import TaskBudget  # noqa: PLC0415 - most services show no budget
        from tidegate.budget._settings.environment import CONFIG_VARIABLE  # noqa: PLC0415 - as above
        from tidegate.service._dashboard.panels import budget_panel  # noqa: PLC0415 - as above
        from tidegate.service._decisions.audit import AuditLog  # noqa: PLC0415 - as above
        from tidegate.service._runtime.budget_reports import BudgetFile, BudgetReports  # noqa: PLC0415 - as above

        setting = self.settings.budget
        config = setting if isinstance(setting, Path) else None
        settings = shown_budget(read_budget_settings(config))
        # The service only reads; the traffic of the demo uses the budget.
        self.budget = TaskBudget(settings) if self.settings.demo else TaskBudget.to_read(settings)
        self._stack.callback(self.budget.close)
        if file := config or os.environ.get(CONFIG_VARIABLE, "").strip():
            clock = self.app.decider.store.clock
            self._budget_file = BudgetFile(
                self.budget, Path(file), lambda: shown_budget(read_budget_settings(config)), clock
            )
        self.app.panels["budgets"] = budget_panel(self.budget)
        self.app.decider.audit.others.append(AuditLog(self.budget.operations.store))
        reports = BudgetReports(self.budget)
        self.app.reports["budget"] = reports.health
        self.app.families.append(reports.metrics)

    def _open_swarm(self, url: str) -> None:
        from tidegate.bus import open_bus  # noqa: PLC0415 - most services show no swarm
        from tidegate.service._dashboard.panels import swarm_panel  # noqa: PLC0415 - as above

        bus = open_bus(url)
        self._stack.callback(bus.close)
        secret = read_variable(SWARM_SECRET_VARIABLE, os.environ)
        panel = self.app.panels["swarm"] = swarm_panel(bus, secret, self.settings.swarm_namespace)
        self._stack.callback(panel.close)
        task = asyncio.create_task(panel.run())
        self._stack.callback(task.cancel)
        self._add_bus(bus, url)

    def _add_bus(self, bus: Bus, url: str) -> None:
        """Show a bus on the dashboard, and report ready only while it is connected."""
        from tidegate.service._dashboard.panels import bus_panel  # noqa: PLC0415 - loads the dependencies of the components

        self.app.checks.append(bus_check(bus))
        self.app.panels.setdefault("bus", bus_panel(bus, url))


def load_providers(settings: Settings, permissions: str | None = None) -> Providers:
    """Read the provider files; `permissions` replaces the setting."""
    from tidegate.outbound._providers.registry import Providers  # noqa: PLC0415 - most services run no sources

    return Providers.load(
        settings.providers,
        settings.provider_dirs,
        permissions=cast("Permissions", permissions or settings.permissions),
        profiles=settings.profiles,
    )


async def watch_files(
    gate: AsyncGate, runner: SourceRunner | None = None, sources: ConfiguredSources | None = None
) -> None:
    """Check the files of providers and sources regularly, in a thread, whether the service has calls or not."""
    from tidegate._runtime.clock import TaskSignal  # noqa: PLC0415 - most services have no providers
    from tidegate.outbound._quota.gate import RELOAD_INTERVAL  # noqa: PLC0415 - as above

    while True:
        await gate.clock.wait_async(TaskSignal(), gate.clock.steady() + round(RELOAD_INTERVAL * SECOND))
        try:
            if await asyncio.to_thread(gate.providers.reload):
                gate.planner.on_change()
            if runner is not None and sources is not None:
                sources.apply(await asyncio.to_thread(sources.reload), runner)
        except Exception:  # the next check may succeed
            log.exception("the files of providers and sources were not checked")


def watch_egress(
    settings: Settings, clock: Clock, on_change: Callable[[EgressRules], object], providers: Providers | None = None
) -> EgressFile:
    """Read the egress file, to watch it; `on_change` gets the settings now, and new ones later."""
    from tidegate.egress._reload import EgressFile, EgressRules  # noqa: PLC0415 - most services have no gateway
    from tidegate.egress._settings import check_names, load_egress  # noqa: PLC0415 - as above

    if not settings.has_providers:
        raise ConfigError("needs at least one provider: set providers or provider_dirs", field="egress")
    egress = load_egress(settings.egress_config, settings.egress)
    secrets = egress.run_secrets or settings.reservation_secret
    egress = replace(egress, telemetry=egress.telemetry or settings.telemetry, run_secrets=secrets)
    known = load_providers(settings, "ignore") if providers is None else providers
    check_names(egress, known)
    rules = EgressRules(egress)
    on_change(rules)
    return EgressFile(rules, known, clock, on_change, settings.egress)


def log_demo_failure(task: asyncio.Task[None]) -> None:
    """Log why the demo traffic ended, unless it was cancelled."""
    if not task.cancelled() and task.exception() is not None:
        log.error("the demo traffic failed", exc_info=task.exception())


def bus_check(bus: Bus) -> ReadinessCheck:
    """Return a readiness check that fails while the bus is not connected."""
    from tidegate.service._api.problems import ProblemError  # noqa: PLC0415 - the command budget needs no msgspec

    problem = ProblemError("bus-unavailable", "the bus cannot be reached: see the logs of the service and of the bus")
    return lambda: None if bus.connected else problem


def read_budget_settings(config: Path | None = None, store: str | None = None) -> BudgetSettings:
    """Read the settings of a budget from a file, or from the environment."""
    from tidegate.budget import BudgetSettings  # noqa: PLC0415 - most services show no budget
    from tidegate.budget._settings.environment import read_environment  # noqa: PLC0415 - as above
    from tidegate.budget._settings.file import read_config  # noqa: PLC0415 - as above

    values = dict(read_environment().__dict__) if config is None else read_config(config)
    return BudgetSettings(**values | ({} if store is None else {"store": store}))


def shown_budget(settings: BudgetSettings) -> BudgetSettings:
    """Return the settings of a budget for display: always enabled, without its webhook."""
    if not settings.plan.tiers:
        message = (
            "no budget is configured: set RATE_LIMIT_PER_MINUTE, _HOUR, _DAY, _WEEK or _MONTH, or name a YAML "
            "file with --config ('tidegate init budget' writes one)"
        )
        raise ConfigError(message)
    return replace(settings, enabled=True, webhook=None)
