"""Connects a worker with its parent process and the other workers, through shared memory.

The parent reads the file of the service and decides which policies are in effect: see `RulesPublisher`. All workers
follow it, so they decide by the same policies, and a worker that replaces another one starts with these, even if the
file was changed and refused meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from tidegate._runtime.clock import TaskSignal
from tidegate.core._bounds import SECOND
from tidegate.errors import ConfigError
from tidegate.service._dashboard.overview import read_panels
from tidegate.service._runtime.shared_memory import SharedCounters
from tidegate.service._runtime.worker_status import HEARTBEAT_INTERVAL, PUBLISH_INTERVAL, WorkerStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tidegate._runtime.clock import Clock
    from tidegate.egress._reload import EgressRules
    from tidegate.service._decisions.policies import ServicePolicies
    from tidegate.service._http import App
    from tidegate.service._http.app import Panel
    from tidegate.service._runtime.shared_memory import WorkerMemory

log: logging.Logger = logging.getLogger("tidegate.service")

MEGABYTE: Final = 2**20
MAX_EGRESS_BYTES: Final = MEGABYTE // 2
MAX_REASON_LENGTH: Final = 10_000  # characters of the reason why a file was refused


@dataclass
class RulesInEffect:
    """The policies in effect, and the outcome of the reloads."""

    policies: ServicePolicies
    reloads: dict[str, int] = field(default_factory=lambda: {"adopted": 0, "refused": 0})
    refused: str | None = None  # why the current file was refused
    egress: EgressRules | None = None  # the settings of the egress gateway


class RulesPublisher:
    """Hands the policies that the parent process has accepted to all workers."""

    def __init__(self, memory: WorkerMemory, policies: ServicePolicies) -> None:
        """Start with these policies."""
        self._memory = memory
        self.rules: RulesInEffect = RulesInEffect(policies)
        self.update_policies(policies)

    @property
    def reloads(self) -> dict[str, int]:
        """The number of reloads, by outcome."""
        return self.rules.reloads

    def update_policies(self, policies: ServicePolicies) -> None:
        """Let all workers decide by these policies. Raises if they are too large."""
        if len(pickle.dumps(policies)) > self._memory.rules.max_bytes - MEGABYTE:
            size = self._memory.rules.max_bytes // MEGABYTE
            raise ConfigError(f"the policies are too large for several workers: at most {size} MB in memory")
        self.rules.policies = policies
        self.publish()

    def update_egress(self, rules: EgressRules) -> None:
        """Let the gateways of all workers use these settings. Raises if they are too large."""
        if len(pickle.dumps(rules)) > MAX_EGRESS_BYTES:
            raise ConfigError("the settings are too large for several workers", file=rules.settings.file)
        self.rules.egress = rules
        self.publish()

    def record_refusal(self, reason: str | None) -> None:
        """Tell all workers why the current file is refused; None if it is not."""
        self.rules.refused = None if reason is None else reason[:MAX_REASON_LENGTH]
        self.publish()

    def publish(self) -> None:
        """Write the current state."""
        self._memory.rules.write(pickle.dumps(self.rules))


class WorkerLink:
    """The connection of one worker: follows the parent process, and publishes the values of this worker."""

    def __init__(self, memory: WorkerMemory, number: int) -> None:
        """Use this memory; `number` is the area of this worker."""
        self._memory = memory
        self._number = number
        self._version = 0
        self._app: App | None = None
        self._use_egress: Callable[[EgressRules], object] | None = None
        self._own_panels: dict[str, Panel] = {}  # in the first worker: those that it publishes
        self.status: WorkerStatus | None = None

    @property
    def first(self) -> bool:
        """Whether this is the first worker, which does what the service does once."""
        return self._number == 0

    def open_counters(self, clock: Clock) -> SharedCounters:
        """Return the table of counters that this worker shares with the others."""
        return SharedCounters([area.counters for area in self._memory.areas], self._number, clock)

    def connect(self, app: App) -> None:
        """Show the values of all workers in this app, and decide by the policies in effect."""
        self._app = app
        self.status = WorkerStatus(self._memory, self._number, app)
        app.overview.use_source(self.status)
        self.check()

    async def restore_history(self) -> bool:
        """Continue the history of another worker; return whether there is one."""
        return self.status is not None and await self.status.restore_history()

    def share_panels(self, names: list[str]) -> None:
        """Show these panels of the first worker in all workers."""
        if self._app is None or self.status is None:
            return
        if self.first:
            self._own_panels = {name: self._app.panels[name] for name in names}
        self._app.panels |= {name: partial(self.status.read_panel, name) for name in names}

    @property
    def egress_rules(self) -> EgressRules:
        """The settings of the egress gateway, which the parent process has read."""
        data = self._memory.rules.read()
        rules: RulesInEffect | None = None if data is None else pickle.loads(data)  # noqa: S301 - as below
        if rules is None or rules.egress is None:
            raise ConfigError("the parent process has not read the settings of the gateway", field="egress")
        return rules.egress

    def follow_egress(self, use: Callable[[EgressRules], object]) -> None:
        """Call `use` with the settings of the egress gateway, now and when the parent process has read others."""
        self._use_egress = use
        use(self.egress_rules)

    def start_heartbeat(self) -> None:
        """Show from now on that the event loop of this worker runs; the parent replaces a worker that stops this."""
        if self._app is not None:
            self._memory.areas[self._number].heartbeat = self._app.decider.store.clock.steady()
        asyncio.get_running_loop().call_later(HEARTBEAT_INTERVAL / SECOND, self.start_heartbeat)

    def request_reload(self) -> None:
        """Do nothing at SIGHUP: the parent process also gets it, and reads the file."""

    def check(self) -> None:
        """Follow the parent process, if the policies in effect or the state of the file have changed."""
        version = self._memory.rules.version
        data = self._memory.rules.read() if version != self._version else None
        if data is None or self._app is None:
            return
        self._version = version
        rules: RulesInEffect = pickle.loads(data)  # noqa: S301 - the parent process has written it
        self._app.reloads = rules.reloads
        self._app.record_refusal(rules.refused)
        if rules.policies != self._app.decider.policies:
            self._app.update_policies(rules.policies)
        if rules.egress is not None and self._use_egress is not None:
            self._use_egress(rules.egress)

    async def run(self) -> None:
        """Follow the parent process and publish the values of this worker, until cancelled."""
        # Separately, because a slow panel must not delay the other values.
        await asyncio.gather(self._repeat(self._publish_values), self._repeat(self._publish_panels))

    async def _repeat(self, publish: Callable[[WorkerStatus], Awaitable[None]]) -> None:
        if self._app is None or self.status is None:
            return
        clock, signal = self._app.decider.store.clock, TaskSignal()
        while True:
            try:
                await publish(self.status)
            except Exception:
                log.exception("this worker could not publish its values; retrying")
            await clock.wait_async(signal, clock.steady() + PUBLISH_INTERVAL)

    async def _publish_values(self, status: WorkerStatus) -> None:
        self.check()
        status.publish()

    async def _publish_panels(self, status: WorkerStatus) -> None:
        """Publish the panels that only this worker has, if a client of any worker reads them and they are due."""
        if self._own_panels and status.panels_due:
            status.set_panels(await read_panels(self._own_panels))
