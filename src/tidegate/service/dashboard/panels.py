"""What other faces show on the dashboard. Each function gives a panel: called once a second while somebody watches.

    app.panels["sources"] = sources_panel(service)     # a tidegate.outbound.sources.Service
    app.panels["budgets"] = budget_panel(budget, …)    # one or more of TaskBudget
    app.panels["swarm"] = swarm_panel(bus, secret)     # where the agents are
    app.panels["bus"] = bus_panel(bus, url)            # whether it is connected; needs no swarm

A panel looks and changes nothing; what it cannot find out is raised, and said in its place on the page.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from tidegate.adaptive import SUBJECT, CapacityUpdate
from tidegate.adaptive.signing import MalformedError
from tidegate.budget.alerts.forecast import Forecast, forecast
from tidegate.core.bounds import SECOND
from tidegate.errors import StoreUnavailable
from tidegate.swarm.presence import Agent, Watcher
from tidegate.urls import redact

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tidegate.budget import TaskBudget
    from tidegate.bus import Bus, Event
    from tidegate.core import Limit
    from tidegate.outbound.quota.account import Account
    from tidegate.outbound.sources import SourceRunner

    Panel = Callable[[], Awaitable[object] | object]

MAX_ROWS: Final = 200  # sources, accounts, agents
MAX_RESOURCES: Final = 12
MAX_POINTS: Final = 300  # of a resource's capacity
MAX_REDUCTIONS: Final = 50
MILLISECOND: Final = 1000
MAX_TEXT_LENGTH: Final = 200  # characters of what others say


# ---- sources ---------------------------------------------------------------------------------------------------------


def sources_panel(service: SourceRunner) -> Panel:
    """Show providers, how much of their quotas is used, and sources with their next run."""

    async def look() -> dict[str, Any]:
        gate = service.gate
        now = service.now()
        for provider in list(gate.providers)[:MAX_ROWS]:
            if not provider.per:
                gate.open_account(provider, provider.domain)  # so that it is shown before its first request
        accounts = list(gate._accounts.values())[:MAX_ROWS]  # noqa: SLF001 - a look, which the gate has no verb for
        return {
            "providers": [await _account(account) for account in accounts],
            "sources": [_source(row, now) for row in service.describe()[:MAX_ROWS]],
            "notes": service.recovered[-5:],
            "counts": gate.metrics(),
        }

    return look


async def _account(account: Account) -> dict[str, Any]:
    usage = await account.limiter.usage(account.key)
    limits = zip(account.provider.limits, usage.items(), strict=True)
    return {
        "name": account.provider.name,
        "account": account.resource if account.resource != account.provider.domain else "",
        "capacity": account.capacity,
        "frozen_for": account.store.frozen_for(account.provider.policy.name) / SECOND,
        "limits": [{"name": name, "text": period_of(limit), **each._asdict()} for limit, (name, each) in limits],
    }


def period_of(limit: Limit) -> str:
    """Write a limit in few words, without the names it was given."""
    return str(limit).partition(" ")[0] + ("" if limit.unit == "requests" else f" {limit.unit}")


def _source(row: dict[str, Any], now: int) -> dict[str, Any]:
    kept = ("name", "provider", "schedule", "state", "ok", "failed", "skipped", "requeued", "last_result")
    last = row["last_at"]
    return {
        **{name: row[name] for name in kept},
        "due_in": max(0, row["due"] - now) / SECOND,
        "last_ago": None if last is None else max(0, now - last) / SECOND,
    }


# ---- budgets ---------------------------------------------------------------------------------------------------------


def budget_panel(*budgets: TaskBudget) -> Panel:
    """Show the tiers of budgets, when they reset, and when they run out at this pace."""

    async def look() -> list[dict[str, Any]]:
        return [await asyncio.to_thread(_budget, budget) for budget in budgets]

    return look


def _budget(budget: TaskBudget) -> dict[str, Any]:
    usage = budget.snapshot()
    if budget.lost:
        raise StoreUnavailable("the storage of the budget cannot be read")
    ahead = forecast(budget.operations.plan, usage, budget.operations.clock.ns() // 1000)
    nothing = Forecast(0.0, None)
    tiers = [{"name": name, **each._asdict(), **ahead.get(name, nothing)._asdict()} for name, each in usage.items()]
    return {"name": budget.settings.name, "strategy": budget.settings.strategy, "tiers": tiers}


# ---- swarm and bus ---------------------------------------------------------------------------------------------------


def bus_panel(bus: Bus, where: str = "") -> Panel:
    """Show whether a bus is connected, and what it counts."""
    return lambda: {"where": redact(where), "connected": bus.connected, "counts": bus.metrics()}


class SwarmPanel:
    """Agents, and the capacity of each resource over time with its reductions."""

    def __init__(self, bus: Bus, secret: str | bytes | None = None) -> None:
        """Listen on the bus; agents are asked while somebody watches."""
        self._bus = bus
        self._secret = secret
        self._watcher = Watcher(bus, secret)
        self._updates: deque[CapacityUpdate] = deque(maxlen=MAX_REDUCTIONS)
        self._moments: dict[str, deque[tuple[int, int, int]]] = {}
        self._subscription = bus.subscribe(SUBJECT, self._hear)

    def _hear(self, event: Event) -> None:
        try:
            self._updates.append(CapacityUpdate.from_json(event.payload, self._secret))
        except MalformedError:
            return

    def __call__(self) -> dict[str, Any]:
        """Tell what they answered to the last question, and ask again."""
        agents = self._watcher.agents(within=5.0)[:MAX_ROWS]
        self._watcher.ask()
        self._remember(agents)
        return {
            "agents": [_agent(agent) for agent in agents],
            "resources": {name: list(moments) for name, moments in self._moments.items()},
            "reductions": [_update(update) for update in list(self._updates)],
        }

    def _remember(self, agents: list[Agent]) -> None:
        """Note the capacity of each resource, all agents together, at this moment."""
        now = self._bus.clock.ns() // 1_000_000
        sums: dict[str, tuple[int, int]] = {}
        for agent in agents:
            for name, capacity in agent.resources.items():
                total, original = sums.get(name, (0, 0))
                sums[name] = (total + capacity.total, original + capacity.original)
        for name, (total, original) in sums.items():
            moments = self._moments.get(name)
            if moments is None:
                if len(self._moments) >= MAX_RESOURCES:
                    continue
                moments = self._moments[name] = deque(maxlen=MAX_POINTS)
            moments.append((now, total, original))

    def close(self) -> None:
        """Listen no more."""
        self._subscription.close()
        self._watcher.close()


swarm_panel = SwarmPanel


def _agent(agent: Agent) -> dict[str, Any]:
    resources = [
        {
            "name": name[:MAX_TEXT_LENGTH],
            "available": each.available,
            "total": each.total,
            "original": each.original,
            "in_flight": each.in_flight,
            "frozen_for": each.frozen_for,
        }
        for name, each in list(agent.resources.items())[:MAX_RESOURCES]
    ]
    return {"id": agent.agent_id[:MAX_TEXT_LENGTH], "seconds_ago": agent.seconds_ago, "resources": resources}


def _update(update: CapacityUpdate) -> dict[str, Any]:
    return {
        "at": update.at // MILLISECOND,
        "resource": update.resource[:MAX_TEXT_LENGTH],
        "agent": update.agent_id[:MAX_TEXT_LENGTH],
        "capacity": update.new_capacity,
        "reason": update.reason[:MAX_TEXT_LENGTH],
        "pause": update.retry_after,
    }
