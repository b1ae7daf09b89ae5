"""`GET /v1/overview`: the data of the dashboard as JSON. docs/dashboard.md describes its fields.

A timer samples the counters once a second. The rest is computed on request, at most once a second for all clients.
With `?since=TICK` a client gets only the seconds since its last response.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs

from tidegate.core.bounds import SECOND
from tidegate.service.dashboard.history import MAX_POLICIES, DecisionHistory, last_values
from tidegate.service.dashboard.near_limit import MAX_SAMPLES_PER_SECOND
from tidegate.service.dashboard.status import ProcessStatus
from tidegate.service.http.problems import ProblemError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidegate.service.dashboard.status import ServiceStatus, StatusSource
    from tidegate.service.decisions.service_directory import ServiceDirectory, ServiceRecord
    from tidegate.service.decisions.stats import Stats
    from tidegate.service.http.app import App, Panel

log: logging.Logger = logging.getLogger("tidegate.service")

MAX_BLOCKS: Final = 50
PANEL_TIMEOUT: Final = 2.0  # seconds
MILLISECOND: Final = 1000  # microseconds
MAX_SINCE_DIGITS: Final = 16


class Overview:
    """Computes the overview of an app."""

    def __init__(self, app: App) -> None:
        """Start the history."""
        self._app = app
        self._decider = app.decider
        self._clock = app.decider.store.clock
        self.source: StatusSource = ProcessStatus(app)
        self.history: DecisionHistory = DecisionHistory(self.source, self._clock)
        self.directory: ServiceDirectory | None = None  # of the services that share the store
        self._timer: asyncio.TimerHandle | None = None
        self._cached: tuple[int, dict[str, Any]] | None = None  # the tick, and the snapshot of that second
        self._building: asyncio.Task[dict[str, Any]] | None = None

    def use_source(self, source: StatusSource) -> None:
        """Show the values of all workers, instead of those of this process."""
        self.source = self.history.source = source

    def start(self) -> None:
        """Sample the counters now and at the start of every second."""
        self.history.sample()
        delay = SECOND - self._clock.steady() % SECOND
        self._timer = asyncio.get_running_loop().call_later(delay / SECOND, self.start)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def to_json(self, query: bytes) -> bytes:
        """Return the body of the response for a query string."""
        since = read_since(query)
        self.history.sample()
        self._decider.stats.near_limit.samples_left = MAX_SAMPLES_PER_SECOND
        self.source.mark_viewed()
        snapshot = await self._get_snapshot()
        return json.dumps({**snapshot, **self._history_since(since)}, separators=(",", ":")).encode()

    # ---- history -----------------------------------------------------------------------------------------------------

    def _history_since(self, since: int | None) -> dict[str, Any]:
        history = self.history
        count = history.count_since(since)
        tracks = {
            name: [last_values(values, count) for values in (policy.admitted, policy.denied, policy.waiting)]
            for name, policy in history.policies.items()
        }
        latency = [last_values(history.median, count), last_values(history.p99, count)]
        return {"tick": history.tick, "seconds": count, "tracks": tracks, "latency": latency}

    # ---- current state -----------------------------------------------------------------------------------------------

    async def _get_snapshot(self) -> dict[str, Any]:
        """Return the current state, computed at most once a second; concurrent requests share one computation."""
        tick = self.history.tick
        if self._cached is not None and self._cached[0] == tick:
            return self._cached[1]
        if self._building is None:
            self._building = asyncio.create_task(self._build_snapshot())
        try:
            snapshot = await asyncio.shield(self._building)
        finally:
            if self._building is not None and self._building.done():
                self._building = None
        self._cached = (tick, snapshot)
        return snapshot

    async def _build_snapshot(self) -> dict[str, Any]:
        app, source, now = self._app, self.source, self._clock.ns() // 1000
        totals, status = source.totals(), source.status()
        return {
            "at": now // MILLISECOND,
            "process": {
                "id": source.process_id,
                "workers": app.settings.workers,
                "since": source.started_at,
                "version": version("tidegate"),
            },
            "workers": status.workers,
            "services": [each._asdict() for each in await self._list_services()],
            "waiting": status.waiting,
            "in_flight": status.in_flight,
            "policies": self._describe_policies(totals, status),
            "near": status.near,
            "blocks": [block._asdict() for block in (await self._decider.find_blocks())[:MAX_BLOCKS]],
            "denials": status.denials,
            "problems": dict(totals.errors),
            "store": self._describe_store(status.store),
            "rules": {**app.reloads, "error": app.refused},
            "panels": await read_panels(app.panels),
        }

    async def _list_services(self) -> list[ServiceRecord]:
        return [] if self.directory is None else await self.directory.list()

    def count_decisions(self) -> tuple[int, int]:
        """Return how many calls the service has admitted and denied."""
        counts = self.source.totals().counts.values()
        return sum(count.allowed + count.shadow for count in counts), sum(count.denied for count in counts)

    def _describe_policies(self, totals: Stats, status: ServiceStatus) -> list[dict[str, Any]]:
        """Describe the configured policies, then the policies of descriptors that have been used."""
        described = {
            name: (entry.policy, entry.rollout, len(entry.overrides))
            for name, entry in self._decider.policies.entries.items()
        }
        for variant in self._decider.policies.variants():
            if variant.policy.name in totals.counts:
                described.setdefault(variant.policy.name, (variant.policy, 100.0, 0))
        found = []
        for name, (policy, rollout, overrides) in list(described.items())[:MAX_POLICIES]:
            count = totals.counts.get(name)
            found.append({
                "name": name,
                "limits": [str(limit) for limit in policy.limits],
                "mode": policy.mode,
                "rollout": rollout,
                "overrides": overrides,
                "searchable": name in self._decider.policies.entries,
                "admitted": 0 if count is None else count.allowed + count.shadow,
                "denied": 0 if count is None else count.denied,
                "shadow": 0 if count is None else count.shadow,
                "waiting": status.waiting_by_policy[name],
            })  # fmt: skip
        return found

    def _describe_store(self, counts: dict[str, int]) -> dict[str, Any]:
        kind = self._app.settings.store.partition(":")[0]
        leased = self._app.settings.lease is not None and not self._decider.store.instant
        return {"kind": kind, "lost": bool(counts.get("store_lost")), "leased": leased, "counts": counts}


def read_since(query: bytes) -> int | None:
    """Parse the parameter `since`: the `tick` of an earlier response."""
    values = parse_qs(query.decode("latin-1"), keep_blank_values=True).get("since")
    if not values:
        return None
    text = values[0]
    if len(values) > 1 or not (text.isascii() and text.isdigit() and len(text) <= MAX_SINCE_DIGITS):
        raise ProblemError(
            "bad-field",
            f"expected the tick of an earlier response, an integer of at most {MAX_SINCE_DIGITS} digits",
            "/since",
        )
    return int(text)


async def read_panels(panels: Mapping[str, Panel]) -> dict[str, object]:
    """Return the data of all panels."""
    return dict(zip(panels, await asyncio.gather(*(read_panel(*named) for named in panels.items())), strict=True))


async def read_panel(name: str, panel: Panel) -> object:
    """Return the data of a panel; if it fails or hangs, its error, so that the other panels are still shown."""
    try:
        async with asyncio.timeout(PANEL_TIMEOUT):
            data = panel()
            return await data if inspect.isawaitable(data) else data
    except TimeoutError:
        return {"error": f"no response within {PANEL_TIMEOUT:g} s"}
    except Exception as error:  # a panel may raise anything, and the rest of the page is still shown
        log.debug("dashboard panel %s failed", name, exc_info=True)
        return {"error": str(error) or type(error).__name__}
