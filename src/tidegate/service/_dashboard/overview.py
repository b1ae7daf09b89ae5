"""`GET /v1/overview`: the data of the dashboard as JSON. docs/reference/dashboard.md describes its fields.

A timer samples the counters once a second. The rest is computed on request, at most once a second for all clients.
With `?since=TICK` a client gets only the seconds since its last response.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import parse_qs

from tidegate._policy.limit_text import describe_limit
from tidegate.core._bounds import SECOND
from tidegate.service._api.problems import ProblemError
from tidegate.service._dashboard.findings import find_all
from tidegate.service._dashboard.history import HISTORY_SECONDS, MAX_POLICIES, DecisionHistory
from tidegate.service._dashboard.proxy_requests import describe_routes
from tidegate.service._dashboard.recent_denials import describe_recent
from tidegate.service._dashboard.status import StatusSource
from tidegate.service._decisions.audit import describe_entry

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tidegate._policy import Policy
    from tidegate.service._dashboard.status import ServiceStatus
    from tidegate.service._decisions.service_directory import ServiceDirectory, ServiceRecord
    from tidegate.service._decisions.stats import Totals
    from tidegate.service._http.app import App, Panel

log: logging.Logger = logging.getLogger("tidegate.service")

MAX_BLOCKS: Final = 50
PANEL_TIMEOUT: Final = 2.0  # seconds
MILLISECOND: Final = 1000  # microseconds
MAX_DIGITS: Final = 16  # of an integer in a query
MAX_TOP_ROWS: Final = 20
MAX_MARKS_SHOWN: Final = 20
MAX_AUDIT_ENTRIES: Final = 20

T = TypeVar("T")


class Overview:
    """Computes the overview of an app."""

    def __init__(self, app: App) -> None:
        """Start the history."""
        self._app = app
        self._decider = app.decider
        self._clock = app.decider.store.clock
        self.source: StatusSource = StatusSource(app)
        self.history: DecisionHistory = DecisionHistory(self.source, self._clock)
        self.directory: ServiceDirectory | None = None  # of the services that share the store
        self._decider.stats.denied_keys.align(self._clock.ns() // 1000, self._clock.steady())
        self._timer: asyncio.TimerHandle | None = None
        self._cached: tuple[int, dict[str, Any]] | None = None  # the tick, and the snapshot of that second
        self._building: asyncio.Task[dict[str, Any]] | None = None
        self._version = version("tidegate")  # reads a file
        self._limit_texts: dict[str, tuple[Policy, dict[str, str]]] = {}  # by policy, see `_describe_limits`
        self._lost_since: int | None = None  # when the store was first seen to be unavailable, in milliseconds

    def use_source(self, source: StatusSource) -> None:
        """Show the values of all workers, instead of those of this process."""
        self.source = self.history.source = source

    def start(self) -> None:
        """Sample the counters now and at the start of every second; one that fails ends no other one."""
        delay = SECOND - self._clock.steady() % SECOND
        self._timer = asyncio.get_running_loop().call_later(delay / SECOND, self.start)
        for sample in (self.history.sample, *self._app.on_sample):
            try:
                sample()
            except Exception:
                log.exception("a sample for the dashboard failed")

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def to_json(self, query: bytes) -> bytes:
        """Return the body of the response for a query string."""
        since = read_since(query)
        self.history.sample()
        self.source.mark_viewed()
        snapshot = await self._get_snapshot()
        return json.dumps({**snapshot, **self._history_since(since)}, separators=(",", ":")).encode()

    # ---- history -----------------------------------------------------------------------------------------------------

    def _history_since(self, since: int | None) -> dict[str, Any]:
        seconds = self.history.seconds
        count = seconds.count_since(since)
        tracks = {name: [column.last(count) for column in each.columns] for name, each in seconds.policies.items()}
        total = [column.last(count) for column in seconds.total.columns]
        latency = [[value or None for value in column.last(count)] for column in (seconds.median, seconds.p99)]
        states = seconds.state.last(count)
        columns = {"total": total, "tracks": tracks, "latency": latency, "states": states}
        return {"tick": seconds.tick, "seconds": count, **columns}

    async def history_json(self, query: bytes) -> bytes:
        """Return the body of the response of /v1/history: the columns of one policy, or of all together."""
        fields = parse_qs(query.decode("latin-1"), keep_blank_values=True)
        now = self._clock.ns() // 1_000_000
        begin = read_integer(fields, "from", "milliseconds since 1970", now - HISTORY_SECONDS * 1000)
        end = read_integer(fields, "to", "milliseconds since 1970", now)
        policy = fields.get("policy", [""])[-1]
        self.history.sample()
        return json.dumps(self.describe_history(begin, end, policy), separators=(",", ":")).encode()

    def describe_history(self, begin: int, end: int, policy: str = "") -> dict[str, Any]:
        """Describe the history between two times in milliseconds since 1970, in the finest steps that cover it.

        Steps cover it, too, if they cover all that is known: otherwise the charts of a day would be empty for the first
        minutes of a service.
        """
        history = self.history
        now = self._clock.ns() // 1_000_000
        known = history.minutes.steps * history.minutes.step
        tier = next(
            (
                each
                for each in history.tiers
                if now - begin <= (each.step * each.length + each.step) * 1000
                or (each.steps < each.length and each.steps * each.step >= known)
            ),
            history.minutes,
        )
        last = history.end_of(tier)
        step = tier.step * 1000
        skipped = min(tier.steps, max(0, (last - end) // step))
        count = min(tier.steps - skipped, max(0, -(-(last - skipped * step - begin) // step)))
        shown = tier.policies.get(policy) if policy else tier.total
        columns = tier.total.columns if shown is None else shown.columns

        def part(values: list[int]) -> list[int]:
            return values[: len(values) - skipped] if skipped else values

        rows = history.top_between(begin, end, self.source.top_denied(), policy, MAX_TOP_ROWS)
        return {
            "step": tier.step,
            "end": last - skipped * step,
            **{
                name: [0] * count if policy and shown is None else part(column.last(count + skipped))
                for name, column in zip(("admitted", "denied", "waiting"), columns, strict=True)
            },
            "median": [value or None for value in part(tier.median.last(count + skipped))],
            "p99": [value or None for value in part(tier.p99.last(count + skipped))],
            "states": part(tier.state.last(count + skipped)),
            "marks": [mark._asdict() for mark in history.marks if begin <= mark.at <= end],
            "top": [self._describe_denied(row) for row in rows],
        }

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
        recent = describe_recent(self.history)
        recent |= {"policies": status.denied, "keys": [self._describe_denied(row) for row in status.top[:MAX_TOP_ROWS]]}
        begin = now // MILLISECOND - HISTORY_SECONDS * 1000
        top = self.history.top_between(begin, now // MILLISECOND, status.top, max_rows=MAX_TOP_ROWS)
        snapshot = {
            "at": now // MILLISECOND,
            "process": {
                "id": source.process_id,
                "workers": app.settings.workers,
                "since": source.started_at,
                "version": self._version,
            },
            "workers": status.workers,
            "services": [each._asdict() for each in await self._list_services()],
            "waiting": status.waiting,
            "in_flight": status.in_flight,
            "policies": self._describe_policies(totals, status),
            "near": status.near,
            "blocks": await self._describe_blocks(),
            "recent": recent,
            "top": [self._describe_denied(row) for row in top],
            "audit": [describe_entry(entry) for entry in (await self._decider.audit.read())[:MAX_AUDIT_ENTRIES]],
            "marks": [mark._asdict() for mark in list(self.history.marks)[-MAX_MARKS_SHOWN:]],
            "denials": [
                {**denial, "over": self._describe_over(denial["policy"], denial["violated"])}
                for denial in status.denials
            ],
            "problems": dict(totals.errors),
            "store": self._describe_store(status.store),
            "rules": {**app.reloads, "error": app.refused, "since": app.refused_at},
            "panels": await self._read_panels(totals),
        }
        return {**snapshot, "findings": [finding._asdict() for finding in find_all(snapshot)]}

    async def _read_panels(self, totals: Totals) -> dict[str, object]:
        routes = describe_routes(self._decider.policies, totals)
        panels = await read_panels(self._app.panels)
        return {"inbound": routes, **panels} if routes else panels

    def _describe_denied(self, row: dict[str, Any]) -> dict[str, Any]:
        fields = {name: row[name] for name in ("policy", "key", "limits", "denied", "last_at")}
        return {**fields, "over": self._describe_over(row["policy"], row["limits"])}

    def _describe_over(self, policy: str, names: Iterable[str]) -> list[str]:
        """Describe the limits of a policy by their names: "5 per minute"."""
        entry = self._decider.policies.entries.get(policy)
        texts = self._describe_limits(entry.policy) if entry is not None else {}
        return [texts.get(name, name) for name in names]

    def _describe_limits(self, policy: Policy) -> dict[str, str]:
        """Describe the limits of a policy by their names; each policy is described once."""
        known = self._limit_texts.get(policy.name)
        if known is None or known[0] is not policy:
            if len(self._limit_texts) >= 2 * MAX_POLICIES:  # policies of files that are no longer in effect
                self._limit_texts.clear()
            known = self._limit_texts[policy.name] = (
                policy,
                {each.name: describe_limit(each) for each in policy.limits},
            )
        return known[1]

    async def _describe_blocks(self) -> list[dict[str, Any]]:
        """Describe the blocks, with the reason and the actor of the audit log."""
        blocks = (await self._decider.find_blocks())[:MAX_BLOCKS]
        if not blocks:
            return []
        entries = {
            (entry.policy, entry.key): entry
            for entry in reversed(await self._decider.audit.read())
            if entry.action == "block"
        }
        found = []
        for block in blocks:
            entry = entries.get((block.policy, block.key))
            why = {"reason": "", "actor": ""} if entry is None else {"reason": entry.reason, "actor": entry.actor}
            found.append({**block._asdict(), **why})
        return found

    async def _list_services(self) -> list[ServiceRecord]:
        return [] if self.directory is None else await self.directory.list()

    def count_decisions(self) -> tuple[int, int]:
        """Return how many calls the service has admitted and denied."""
        counts = self.source.totals().counts.values()
        return sum(count.admitted for count in counts), sum(count.refused for count in counts)

    def _describe_policies(self, totals: Totals, status: ServiceStatus) -> list[dict[str, Any]]:
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
                "limit_texts": list(self._describe_limits(policy).values()),
                "mode": policy.mode,
                "on_store_error": policy.on_store_error,
                "rollout": rollout,
                "overrides": overrides,
                "searchable": name in self._decider.policies.entries,
                "admitted": 0 if count is None else count.admitted,
                "denied": 0 if count is None else count.refused,
                "shadow": 0 if count is None else count.shadow,
                "waiting": status.waiting_by_policy[name],
            })  # fmt: skip
        return found

    def _describe_store(self, counts: dict[str, int]) -> dict[str, Any]:
        kind = self._app.settings.store.partition(":")[0]
        leased = self._app.settings.lease is not None and not self._decider.store.instant
        lost = bool(counts.get("store_lost"))
        since = None
        if lost:
            since = self._lost_since = self._lost_since or self._clock.ns() // 1_000_000
        else:
            self._lost_since = None
        return {"kind": kind, "lost": lost, "lost_since": since, "leased": leased, "counts": counts}


def read_since(query: bytes) -> int | None:
    """Parse the parameter `since`: the `tick` of an earlier response."""
    fields = parse_qs(query.decode("latin-1"), keep_blank_values=True)
    return read_integer(fields, "since", "the tick of an earlier response", None)


def read_integer(fields: Mapping[str, list[str]], name: str, meaning: str, default: T) -> int | T:
    """Parse a parameter that is a non-negative integer."""
    values = fields.get(name)
    if not values:
        return default
    text = values[0]
    if len(values) > 1 or not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise ProblemError("bad-field", f"expected {meaning}, an integer of at most {MAX_DIGITS} digits", f"/{name}")
    return int(text)


async def read_panels(panels: Mapping[str, Panel]) -> dict[str, object]:
    """Return the data of all panels; those with None have nothing to show."""
    found = await asyncio.gather(*(read_panel(*named) for named in panels.items()))
    return {name: data for name, data in zip(panels, found, strict=True) if data is not None}


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
