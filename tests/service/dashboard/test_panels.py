"""The panels of sources, budgets, swarm and bus, in virtual time."""

import asyncio
import json

import httpx
import pytest

from tidegate.budget import BudgetSettings, TaskBudget
from tidegate.bus import open_bus
from tidegate.errors import StoreUnavailable
from tidegate.outbound import Providers
from tidegate.outbound.sources import SourceRunner, read_source
from tidegate.service._dashboard import panels
from tidegate.service._dashboard.capacity_history import MAX_RESOURCES
from tidegate.service._dashboard.panels import budget_panel, bus_panel, sources_panel, swarm_panel
from tidegate.swarm import SwarmLimiter
from tidegate.testing import ManualClock

START = 1_728_000_000


@pytest.fixture
def clock():
    return ManualClock(start=START)


async def test_sources_and_the_quotas_of_their_providers(tmp_path, clock):
    providers = Providers.of({"domain": "api.example.com", "name": "example", "limit": 60, "period": "1m"})
    prices = read_source({"name": "prices", "url": "https://api.example.com/prices?key=secret", "interval": "5m"})
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=[1, 2]))
    async with SourceRunner(providers, [prices], data=tmp_path, transport=transport, clock=clock) as service:
        panel = sources_panel(service)
        before = await panel()
        assert [(each["state"], each["last_ago"]) for each in before["sources"]] == [("idle", None)]
        assert before["providers"][0]["limits"][0]["used"] == 0  # shown before its first request
        running = asyncio.create_task(service.run())
        while not service.describe()[0]["ok"]:
            await asyncio.sleep(0)
        service.stop()
        await running
        data = await panel()
        assert "secret" not in json.dumps(data)
    (provider,) = data["providers"]
    assert (provider["name"], provider["capacity"], provider["frozen_for"]) == ("example", 60, 0.0)
    assert [(each["text"], each["quota"], each["used"]) for each in provider["limits"]] == [("60 per minute", 60, 1)]
    (source,) = data["sources"]
    assert (source["name"], source["provider"], source["ok"], source["failed"]) == ("prices", "example", 1, 0)
    assert source["last_result"].startswith("status 200")
    assert source["due_in"] > 0


async def test_a_budget_whose_file_does_not_exist_yet_has_counted_nothing(tmp_path, clock):
    settings = BudgetSettings(per_minute=20, per_day=500, store=tmp_path / "budget.db")
    with TaskBudget.to_read(settings, clock=clock) as budget:
        (data,) = await budget_panel(budget)()
    assert data["note"] == "nothing was counted yet"
    assert [(tier["name"], tier["used"], tier["quota"]) for tier in data["tiers"]] == [
        ("minute", 0, 20),
        ("day", 0, 500),
    ]


async def test_a_budget_whose_file_was_removed_is_unavailable(tmp_path, clock):
    settings = BudgetSettings(per_minute=20, store=tmp_path / "budget.db")
    with TaskBudget(settings, clock=clock) as budget:
        budget.record_completed_tasks(1)
    with TaskBudget.to_read(settings, clock=clock) as budget:
        assert (await budget_panel(budget)())[0]["note"] == ""
        for path in tmp_path.glob("budget.db*"):
            path.unlink()
        with pytest.raises(StoreUnavailable, match="the store of budget 'tasks' is unavailable"):
            await budget_panel(budget)()


async def test_budgets_with_forecasts(tmp_path, clock):
    settings = BudgetSettings(per_minute=20, per_hour=100, store=tmp_path / "budget.db")
    with TaskBudget(settings, clock=clock) as budget:
        budget.record_completed_tasks(20)
        clock.advance(6)
        (data,) = await budget_panel(budget)()
    tiers = {tier["name"]: tier for tier in data["tiers"]}
    assert (tiers["minute"]["used"], tiers["minute"]["remaining"], tiers["minute"]["runs_out_in"]) == (20, 0, 0.0)
    assert tiers["minute"]["reset_after"] == 54.0
    assert (tiers["hour"]["used"], tiers["hour"]["quota"]) == (20, 100)
    assert tiers["hour"]["pace"] > 0


async def test_agents_and_reductions_with_their_reasons(clock):
    with open_bus("local://panels", clock=clock) as bus:
        panel = swarm_panel(bus)
        one = SwarmLimiter(bus=bus, agent_id="agent-1", clock=clock)
        two = SwarmLimiter(bus=bus, agent_id="agent-2", clock=clock)
        with one, two:
            for agent in (one, two):
                agent.set_capacity("api", 100, window=60)
            assert panel()["agents"] == []  # the first call polls the agents
            clock.advance(1)
            assert [agent["id"] for agent in panel()["agents"]] == ["agent-1", "agent-2"]
            one.announce_reduced("api", "received 429 response", retry_after=3)
            panel()
            clock.advance(1)
            data = panel()
            assert [agent["resources"][0]["total"] for agent in data["agents"]] == [50, 50]
            assert [(total, original) for _, total, original in data["resources"]["api"]] == [
                (200, 200),
                (200, 200),
                (100, 200),
            ]
            (reduction,) = data["reductions"]
            assert (reduction["resource"], reduction["agent"], reduction["capacity"]) == ("api", "agent-1", 50)
            assert (reduction["reason"], reduction["pause"]) == ("received 429 response", 3.0)
            assert reduction["at"] == (START + 1) * 1000
            bus.publish("ratelimit.capacity", b"not an update")
            assert len(panel()["reductions"]) == 1
        panel.close()


async def test_the_swarm_panel_shows_the_agents_of_its_namespace(clock):
    with open_bus("local://namespaces", clock=clock) as bus:
        all_panels = {name: swarm_panel(bus, namespace=name) for name in ("", "team-a")}
        agents = [SwarmLimiter(bus, agent_id=f"agent-{name}", namespace=name, clock=clock) for name in all_panels]
        for agent in agents:
            agent.set_capacity("api", 100, window=60)
        agents[1].announce_reduced("api", "received 429 response")
        for name, panel in all_panels.items():
            panel()
            clock.advance(1)
            data = panel()
            assert (data["namespace"], [each["id"] for each in data["agents"]]) == (name, [f"agent-{name}"])
            assert [each["agent"] for each in data["reductions"]] == (["agent-team-a"] if name else [])
            panel.close()
        for agent in agents:
            agent.close()


async def test_the_capacity_of_a_swarm_is_sampled_while_no_page_is_open(clock):
    with open_bus("local://sampled", clock=clock) as bus, SwarmLimiter(bus, agent_id="agent", clock=clock) as agent:
        panel = swarm_panel(bus)
        agent.set_capacity("api", 100, window=60)
        task = asyncio.create_task(panel.run())
        for second in range(60):
            if second == 30:
                agent.announce_reduced("api", "received 429 response")
            await asyncio.sleep(0)
            clock.advance(1)
            await asyncio.sleep(0)
        task.cancel()
        points = panel()["resources"]["api"]
        panel.close()
    values = [total for _, total, _ in points]
    assert values[0] == 100
    assert 50 in values
    assert points[-1].at - points[0].at >= 40_000


async def test_the_swarm_panel_is_bounded(clock):
    with open_bus("local://bounded", clock=clock) as bus:
        panel = swarm_panel(bus, "a secret")
        with SwarmLimiter(bus=bus, agent_id="agent", clock=clock, secret="a secret") as agent:  # noqa: S106 - a test secret
            for number in range(MAX_RESOURCES + 3):
                agent.set_capacity(f"r{number}", 10, window=60)
            panel()
            clock.advance(0.5)
            for _ in range(panels.MAX_REDUCTIONS + 5):
                agent.announce_reduced("r0", "again")
            data = panel()
        assert len(data["resources"]) == MAX_RESOURCES
        assert len(data["reductions"]) == panels.MAX_REDUCTIONS
        panel.close()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://user:pass@host:4222", "nats://…@host:4222"),
        ("redis://:p@ss@host/0?password=x", "redis://…@host/0?…"),
        ("local://name", "local://name"),
        ("", ""),
    ],
)
def test_the_bus_panel_hides_secrets(url, shown):
    with open_bus("local://shown") as bus:
        data = bus_panel(bus, url)()
    assert (data["where"], data["connected"]) == (shown, True)
