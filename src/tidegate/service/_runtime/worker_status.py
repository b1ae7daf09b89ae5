"""Shows several processes as one service: what each worker tells the others, besides the counters.

Each worker writes one message every `PUBLISH_INTERVAL`: its current values (waiting calls, keys near a limit, recent
denials), the panels that only it has, and its history if a worker that was just started asks for it. The message of a
worker that has ended is ignored.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from tidegate._runtime.clock import TaskSignal
from tidegate.core._bounds import SECOND
from tidegate.errors import StoreUnavailable
from tidegate.service._dashboard.history import DecisionHistory
from tidegate.service._dashboard.status import StatusSource
from tidegate.service._decisions.near_limit import MAX_SAMPLES_PER_SECOND

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tidegate.service._dashboard.status import ProcessReport
    from tidegate.service._http import App
    from tidegate.service._runtime.shared_memory import WorkerArea, WorkerMemory

PUBLISH_INTERVAL: Final = SECOND // 4
HEARTBEAT_INTERVAL: Final = SECOND // 2
UNRESPONSIVE_AFTER: Final = 2 * SECOND  # without a heartbeat, a worker is reported
VIEWED_TTL: Final = 3 * SECOND  # after a request for the overview, all workers record keys near a limit
PANEL_TTL: Final = 2 * SECOND
HISTORY_TIMEOUT: Final = 2 * SECOND  # to wait for the history of another worker
POLL_INTERVAL: Final = SECOND // 20
MAX_PANEL_BYTES: Final = 2 * 2**20
TOO_LARGE: Final = {"error": "too large to be shown by several workers"}


@dataclass(frozen=True)
class WorkerMessage:
    """What one worker tells the others."""

    report: ProcessReport
    panels: Mapping[str, object]  # those that only this worker has
    panels_at: int  # steady time
    history: bytes | None  # for a worker that asked for it


class WorkerStatus(StatusSource):
    """The values of all workers together; `publish` writes those of this worker."""

    def __init__(self, memory: WorkerMemory, number: int, app: App) -> None:
        """Show the values in this memory. `number` is the area of this worker."""
        super().__init__(app)
        self._memory = memory
        self._area = memory.areas[number]
        self._panels: Mapping[str, object] = {}
        self._panels_at = -SECOND  # steady time
        self._history: bytes | None = None
        self.process_id: int = os.getppid()
        self.started_at: int = memory.started_at
        self._area.process_id = os.getpid()

    def other_reports(self) -> list[ProcessReport]:
        """Return the reports of the other workers that run."""
        return [message.report for _, message in self._read_others()]

    def _read_others(self) -> Iterator[tuple[WorkerArea, WorkerMessage]]:
        for area in self._memory.areas:
            message = None if area is self._area else read_message(area)
            if message is not None:
                yield area, message

    def unresponsive_workers(self) -> Iterator[tuple[str, str]]:
        """Find workers without a heartbeat. The parent process replaces them soon (`workers`)."""
        now = self.clock.steady()
        for area in self._memory.areas:
            silent = now - area.heartbeat
            if area is not self._area and area.process_id and area.heartbeat and silent >= UNRESPONSIVE_AFTER:
                detail = f"worker process {area.process_id} has not responded for {silent // SECOND} s"
                yield "worker-unresponsive", detail

    def mark_viewed(self) -> None:
        """Let all workers record keys near a limit for a while, and the first one publish its panels."""
        super().mark_viewed()
        self._area.viewed_at = self.clock.steady()

    @property
    def viewed(self) -> bool:
        """Whether a client of any worker reads the overview."""
        now = self.clock.steady()
        return any(area.viewed_at and now - area.viewed_at < VIEWED_TTL for area in self._memory.areas)

    async def read_panel(self, name: str) -> object:
        """Return the data of a panel of the first worker, at most PANEL_TTL old; wait until it is published."""
        first, signal = self._memory.areas[0], TaskSignal()
        while True:
            if not first.process_id:
                raise StoreUnavailable("the worker that runs this component is being replaced")
            message, now = read_message(first), self.clock.steady()
            if message is not None and name in message.panels and now - message.panels_at < PANEL_TTL:
                return message.panels[name]
            await self.clock.wait_async(signal, now + POLL_INTERVAL)

    # ---- the values of this worker -----------------------------------------------------------------------------------

    def publish(self) -> None:
        """Write the message of this worker; record keys near a limit while a client of any worker reads them."""
        if self.viewed:
            self.app.decider.stats.near_limit.samples_left = MAX_SAMPLES_PER_SECOND // (SECOND // PUBLISH_INTERVAL)
        if not self._history_wanted:
            self._history = None
        elif self._history is None:
            self._history = self.app.overview.history.dump()
        message = WorkerMessage(self.report(), self._panels, self._panels_at, self._history)
        if not self._area.message.write(pickle.dumps(message)):
            self._area.message.write(pickle.dumps(replace(message, history=None)))

    @property
    def panels_due(self) -> bool:
        """Whether a client reads the overview, and the panels were read a second ago or earlier."""
        return self.viewed and self.clock.steady() - self._panels_at >= SECOND

    def set_panels(self, panels: Mapping[str, object]) -> None:
        """Publish panels of this worker, now and with every later message."""
        too_large = len(pickle.dumps(panels)) > MAX_PANEL_BYTES
        self._panels, self._panels_at = dict.fromkeys(panels, TOO_LARGE) if too_large else panels, self.clock.steady()
        self.publish()

    # ---- the history of a worker that is replaced --------------------------------------------------------------------

    @property
    def _history_wanted(self) -> bool:
        now = self.clock.steady()
        wanted = (area.history_wanted_at for area in self._memory.areas if area is not self._area)
        return any(at and now - at < HISTORY_TIMEOUT for at in wanted)

    async def restore_history(self) -> bool:
        """Continue the history of another worker that is ready; return whether there is one that has responded."""
        ready = [area for area in self._memory.areas if area is not self._area and area.process_id and area.heartbeat]
        deadline, signal = self.clock.steady() + HISTORY_TIMEOUT, TaskSignal()
        self._area.history_wanted_at = self.clock.steady()
        try:
            while ready and self.clock.steady() < deadline:
                copies = [message.history for _, message in self._read_others() if message.history is not None]
                if copies:
                    self.app.overview.history.restore(DecisionHistory.read_dump(copies[0]))
                    return True
                await self.clock.wait_async(signal, self.clock.steady() + POLL_INTERVAL)
        finally:
            self._area.history_wanted_at = 0
        return False


def read_message(area: WorkerArea) -> WorkerMessage | None:
    """Return the message of a worker that runs."""
    data = area.message.read() if area.process_id else None
    message: WorkerMessage | None = None if data is None else pickle.loads(data)  # noqa: S301 - a worker has written it
    return message if message is not None and message.report.process_id == area.process_id else None
