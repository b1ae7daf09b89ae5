"""`GET /v1/overview`: everything that the page shows, as JSON. docs/dashboard.md describes its fields.

A timer samples the counters once a second. The rest is put together when somebody asks, at most once a second however
many ask: who has the seconds before `tick` gets only those after it with `?since=TICK`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs

from tidegate.core.algorithms import NEVER
from tidegate.core.bounds import SECOND
from tidegate.service.dashboard.history import MAX_POLICIES, DecisionHistory, newest
from tidegate.service.dashboard.near_limit import MAX_NOTES_PER_SECOND
from tidegate.service.http.problems import ProblemError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tidegate.service.decisions.stats import RecentDenial
    from tidegate.service.http.app import App

log = logging.getLogger("tidegate.service")

MAX_DENIALS: Final = 50  # shown
MAX_NEAR_LIMIT: Final = 12
MAX_BLOCKS: Final = 50
PANEL_TIMEOUT: Final = 2.0  # seconds for a panel
MILLISECOND: Final = 1000
MAX_SINCE_DIGITS: Final = 16


class Overview:
    """What an app tells its dashboard."""

    def __init__(self, app: App) -> None:
        """Begin a history."""
        self._app = app
        self._decider = app.decider
        self._clock = app.decider.store.clock
        self.history = DecisionHistory(app.decider)
        self._since = self._clock.ns() // 1_000_000
        self._timer: asyncio.TimerHandle | None = None
        self._fresh: tuple[int, dict[str, Any]] | None = None  # the second that it was put together in
        self._looking: asyncio.Task[dict[str, Any]] | None = None

    def start(self) -> None:
        """Sample every second from now on."""
        self.history.sample()
        ahead = SECOND - self._clock.steady() % SECOND
        self._timer = asyncio.get_running_loop().call_later(ahead / SECOND, self.start)

    def close(self) -> None:
        """Sample no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def write(self, query: bytes) -> bytes:
        """Answer a request."""
        since = read_since(query)
        self.history.sample()
        self._decider.stats.near.left = MAX_NOTES_PER_SECOND
        told = await self._told()
        return json.dumps({**told, **self._seconds(since)}, separators=(",", ":")).encode()

    # ---- the seconds -------------------------------------------------------------------------------------------------

    def _seconds(self, since: int | None) -> dict[str, Any]:
        history = self.history
        count = history.after(since)
        tracks = {
            name: [newest(values, count) for values in (track.admitted, track.denied, track.waiting)]
            for name, track in history.tracks.items()
        }
        latency = [newest(history.median, count), newest(history.rare, count)]
        return {"tick": history.tick, "seconds": count, "tracks": tracks, "latency": latency}

    # ---- how things stand --------------------------------------------------------------------------------------------

    async def _told(self) -> dict[str, Any]:
        """Put together what is the same for all who ask within a second; who asks meanwhile waits for it."""
        tick = self.history.tick
        if self._fresh is not None and self._fresh[0] == tick:
            return self._fresh[1]
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        try:
            told = await asyncio.shield(self._looking)
        finally:
            if self._looking is not None and self._looking.done():
                self._looking = None
        self._fresh = (tick, told)
        return told

    async def _look(self) -> dict[str, Any]:
        app, decider, now = self._app, self._decider, self._clock.ns() // 1000
        return {
            "at": now // MILLISECOND,
            "process": {
                "id": os.getpid(),
                "workers": app.settings.workers,
                "since": self._since,
                "version": version("tidegate"),
            },
            "waiting": decider.waiting,
            "in_flight": app.in_flight,
            "policies": self._policies(),
            "near": [near._asdict() for near in decider.stats.near.nearest(now, MAX_NEAR_LIMIT)],
            "blocks": [block._asdict() for block in decider.blocked()[:MAX_BLOCKS]],
            "denials": [describe(denial) for denial in list(decider.stats.recent)[: -MAX_DENIALS - 1 : -1]],
            "problems": dict(decider.stats.errors),
            "store": self._store(),
            "rules": {"refused": app.refused, **app.reloads},
            "panels": {name: await show(name, panel) for name, panel in app.panels.items()},
        }

    def _policies(self) -> list[dict[str, Any]]:
        """Describe policies of the file first, then those of descriptors that anybody has asked for."""
        stats, waiting = self._decider.stats, self._decider.waiting_by_policy()
        described = {
            name: (entry.policy, entry.rollout, len(entry.overrides))
            for name, entry in self._decider.policies.entries.items()
        }
        for variant in self._decider.policies.variants():
            if variant.policy.name in stats.counts:
                described.setdefault(variant.policy.name, (variant.policy, 100.0, 0))
        found = []
        for name, (policy, rollout, overrides) in list(described.items())[:MAX_POLICIES]:
            count = stats.counts.get(name)
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
                "waiting": waiting.get(name, 0),
            })  # fmt: skip
        return found

    def _store(self) -> dict[str, Any]:
        counts = self._decider.store.metrics()
        kind = self._app.settings.store.partition(":")[0]
        leased = self._app.settings.lease is not None and not self._decider.store.instant
        return {"kind": kind, "lost": bool(counts.get("store_lost")), "leased": leased, "counts": counts}


def read_since(query: bytes) -> int | None:
    """Read which seconds somebody has."""
    values = parse_qs(query.decode("latin-1"), keep_blank_values=True).get("since")
    if not values:
        return None
    text = values[0]
    if len(values) > 1 or not (text.isascii() and text.isdigit() and len(text) <= MAX_SINCE_DIGITS):
        raise ProblemError("bad-field", "expected the tick of an earlier answer", "/since")
    return int(text)


def describe(denial: RecentDenial) -> dict[str, Any]:
    """Word a denial."""
    return {
        "at": denial.at // MILLISECOND,
        "policy": denial.policy,
        "key": denial.key,
        "violated": denial.violated,
        "retry_after": None if denial.retry == NEVER else denial.retry / SECOND,
        "shadow": denial.shadow,
    }


async def show(name: str, panel: Callable[[], Awaitable[object] | object]) -> object:
    """Ask a panel; one that fails or hangs says so in its place, and the others are shown."""
    try:
        async with asyncio.timeout(PANEL_TIMEOUT):
            said = panel()
            return await said if inspect.isawaitable(said) else said
    except TimeoutError:
        return {"error": f"no answer within {PANEL_TIMEOUT:g} s"}
    except Exception as error:  # whatever a face raises, the rest of the page is shown
        log.debug("the panel %s failed", name, exc_info=True)
        return {"error": str(error) or type(error).__name__}
