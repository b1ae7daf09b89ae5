"""Panels of other components on the dashboard. A panel is a function that is called once a second while a page is open.

    app.panels["sources"] = sources_panel(service)     # a tidegate.outbound.sources.SourceRunner
    app.panels["pools"] = PoolsPanel(gate, counters)   # the members of providers with a pool
    app.panels["budgets"] = budget_panel(budget, …)    # one or more TaskBudget
    app.panels["swarm"] = swarm_panel(bus, secret)     # the agents on a bus
    app.panels["bus"] = bus_panel(bus, url)            # the state of a bus, with or without a swarm

A panel only reads. If it raises, the page shows the error in its place.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from tidegate._runtime.clock import TaskSignal
from tidegate._runtime.urls import redact
from tidegate.adaptive import SUBJECT, CapacityUpdate
from tidegate.adaptive._capacities import subject_in
from tidegate.adaptive._signing import MalformedError
from tidegate.budget.alerts._forecast import Forecast, forecast
from tidegate.core._bounds import SECOND
from tidegate.errors import StoreUnavailable
from tidegate.observe._counters import CopiedCounts, RowKind
from tidegate.outbound._quota.account_report import describe_account, describe_members, list_members, member_key
from tidegate.service._dashboard.capacity_history import MAX_RESOURCES, CapacityHistory
from tidegate.swarm._presence import Agent, Watcher

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from tidegate._policy import Key
    from tidegate.budget import TaskBudget
    from tidegate.bus import Bus, Event
    from tidegate.observe._counters import Counters
    from tidegate.outbound._quota.gate import AsyncGate
    from tidegate.outbound.sources import SourceRunner

    Panel = Callable[[], Awaitable[object] | object]

MAX_ROWS: Final = 200  # sources, accounts, agents
MAX_REDUCTIONS: Final = 50
MEMBERS: Final = RowKind("members", 2)  # by pool and member: refused, cost_micros
MILLISECOND: Final = 1000  # microseconds
MAX_TEXT_LENGTH: Final = 200  # characters of a string that another agent sent
SAMPLE_INTERVAL: Final = 10 * SECOND  # between two samples of the capacity of a swarm, if no page is open
ANSWER_TIME: Final = SECOND  # for the agents to answer before a sample


# ---- sources ---------------------------------------------------------------------------------------------------------


def sources_panel(service: SourceRunner) -> Panel:
    """Return a panel of providers with the usage of their quotas, and of sources with their next run."""

    async def read() -> dict[str, Any]:
        now = service.now()
        sources = [_describe_source(row, now) for row in service.describe()[:MAX_ROWS]]
        notes = [*service.recovered[-5:], *([] if service.paused is None else [f"paused: {service.paused}"])]
        return {**await _describe_providers(service.gate), "sources": sources, "notes": notes}

    return read


async def _describe_providers(gate: AsyncGate) -> dict[str, Any]:
    for provider in list(gate.providers)[:MAX_ROWS]:
        if not provider.per and provider.pool is None:
            gate.planner.open_account(provider, provider.domain)  # so that it is shown before its first request
    members = {member.provider.name for each in gate.providers if each.pool for member in each.pool.members}
    accounts = [account for account in gate.accounts if account.provider.name not in members][:MAX_ROWS]
    return {"providers": [await describe_account(gate, account) for account in accounts], "counts": gate.metrics()}


class PoolsPanel:
    """A panel of the members of pools, with their refusals and cost in all processes of the service."""

    def __init__(self, gate: AsyncGate, counters: Counters) -> None:
        """Count in this table."""
        self._gate = gate
        self._counters = counters
        self._copied = CopiedCounts(counters, MEMBERS)

    def count(self) -> None:
        """Count what the accounts of members have counted since the last call."""
        members: dict[Key, tuple[str, str]] = {
            member_key(member): (provider.name, member.name) for provider, member in list_members(self._gate)
        }
        for account in self._gate.accounts:
            labels = members.get(account.key[:2])
            if labels is not None:
                self._copied.copy(account, labels, account.refused, account.spent)

    async def __call__(self) -> list[dict[str, Any]]:
        """Return what is left of the limits of each member, and its counts."""
        self.count()
        counts = self._counters.totals(MEMBERS)
        found = await describe_members(self._gate)
        for each in found:
            each["refused"], each["cost_micros"] = counts.get((each["pool"], each["member"]), (0, 0))
        return found


def _describe_source(row: Mapping[str, Any], now: int) -> dict[str, Any]:
    names = ("name", "provider", "schedule", "state", "ok", "failed", "skipped", "requeued", "last_result")
    last = row["last_at"]
    return {
        **{name: row[name] for name in names},
        "due_in": max(0, row["due"] - now) / SECOND,
        "last_ago": None if last is None else max(0, now - last) / SECOND,
    }


# ---- budgets ---------------------------------------------------------------------------------------------------------


def budget_panel(*budgets: TaskBudget) -> Panel:
    """Return a panel of the tiers of budgets: usage, time of reset, and when they run out at the current rate."""

    async def read() -> list[dict[str, Any]]:
        return [await asyncio.to_thread(_describe_budget, budget) for budget in budgets]

    return read


def _describe_budget(budget: TaskBudget) -> dict[str, Any]:
    usage, nothing_counted = budget.snapshot(), budget.operations.nothing_counted
    if budget.lost and not nothing_counted:
        raise StoreUnavailable(f"the store of budget {budget.settings.name!r} is unavailable")
    forecasts = forecast(budget.operations.plan, usage, budget.operations.clock.ns() // 1000)
    unused = Forecast(0.0, None)
    tiers = [{"name": name, **tier._asdict(), **forecasts.get(name, unused)._asdict()} for name, tier in usage.items()]
    note = "nothing was counted yet" if nothing_counted else ""
    return {"name": budget.settings.name, "strategy": budget.settings.strategy, "note": note, "tiers": tiers}


# ---- swarm and bus ---------------------------------------------------------------------------------------------------


def bus_panel(bus: Bus, where: str = "") -> Panel:
    """Return a panel of a bus: its URL, whether it is connected, and its metrics."""
    return lambda: {"where": redact(where), "connected": bus.connected, "counts": bus.metrics()}


class SwarmPanel:
    """A panel of the agents on a bus, the capacity of each resource over 24 hours, and its reductions."""

    def __init__(self, bus: Bus, secret: str | bytes | None = None, namespace: str = "") -> None:
        """Subscribe to the bus, for the agents of a namespace."""
        self._bus = bus
        self._secret = secret
        self._namespace = namespace
        self._watcher = Watcher(bus, secret, namespace)
        self._updates: deque[CapacityUpdate] = deque(maxlen=MAX_REDUCTIONS)
        self._history = CapacityHistory()
        self._subject = subject_in(namespace, SUBJECT)
        self._subscription = bus.subscribe(self._subject, self._on_update)

    def _on_update(self, event: Event) -> None:
        try:
            self._updates.append(CapacityUpdate.from_json(event.payload, self._secret, self._subject))
        except MalformedError:
            return

    def __call__(self) -> dict[str, Any]:
        """Return what the agents reported after the last call, and poll them again."""
        agents = self._watcher.agents(within=5.0)[:MAX_ROWS]
        self._watcher.ask()
        self._add_sample(agents)
        return {
            "namespace": self._namespace,
            "agents": [_describe_agent(agent) for agent in agents],
            "resources": {name: list(points) for name, points in self._history.resources.items()},
            "reductions": [_describe_update(update) for update in list(self._updates)],
        }

    async def run(self) -> None:
        """Sample the capacity of the swarm even if no page is open, until cancelled."""
        clock = self._bus.clock
        while True:
            self._watcher.ask()
            await clock.wait_async(TaskSignal(), clock.steady() + ANSWER_TIME)
            self._add_sample(self._watcher.agents(within=5.0))
            await clock.wait_async(TaskSignal(), clock.steady() + SAMPLE_INTERVAL - ANSWER_TIME)

    def _add_sample(self, agents: list[Agent]) -> None:
        """Add the current capacity of each resource, summed over all agents."""
        sums: dict[str, tuple[int, int]] = {}
        for agent in agents:
            for name, capacity in agent.resources.items():
                total, original = sums.get(name, (0, 0))
                sums[name] = (total + capacity.total, original + capacity.original)
        self._history.add(self._bus.clock.ns() // 1_000_000, sums)

    def close(self) -> None:
        """Unsubscribe from the bus."""
        self._subscription.close()
        self._watcher.close()


swarm_panel = SwarmPanel


def _describe_agent(agent: Agent) -> dict[str, Any]:
    resources = [
        {
            "name": name[:MAX_TEXT_LENGTH],
            "available": resource.available,
            "total": resource.total,
            "original": resource.original,
            "in_flight": resource.in_flight,
            "frozen_for": resource.frozen_for,
        }
        for name, resource in list(agent.resources.items())[:MAX_RESOURCES]
    ]
    return {"id": agent.agent_id[:MAX_TEXT_LENGTH], "seconds_ago": agent.seconds_ago, "resources": resources}


def _describe_update(update: CapacityUpdate) -> dict[str, Any]:
    return {
        "at": update.at // MILLISECOND,
        "resource": update.resource[:MAX_TEXT_LENGTH],
        "agent": update.agent_id[:MAX_TEXT_LENGTH],
        "capacity": update.new_capacity,
        "reason": update.reason[:MAX_TEXT_LENGTH],
        "pause": update.retry_after,
    }
