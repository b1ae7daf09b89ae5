"""The members of a pool on the dashboard and in `tidegate top`: room, state, refusals and cost."""

import httpx

from tidegate._cli.output import Output
from tidegate._cli.top import draw_members, pool_members
from tidegate.observe._counters import Counters
from tidegate.outbound import AsyncGate, Providers
from tidegate.outbound.httpx import AsyncRateLimitTransport
from tidegate.service._dashboard.panels import PoolsPanel
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

KEY = {"header": "X-Key"}
PRICES = {"date": "2026-11-01", "models": {"m": {"input": 1_000, "output": 5_000}}}
STATUSES = {"key-a": 429, "key-b": 401}


async def test_each_member_has_its_room_state_refusals_and_cost():
    members = [{"name": name, "api_key": f"key-{name}"} for name in "abc"]
    members.append({"name": "d", "api_key": "key-d", "drain": True})
    settings = {"domain": "api.test", "name": "models", "profile": "openai", "limits": ["5/1m"], "key": KEY}
    known = Providers.of({**settings, "price": PRICES, "pool": {"members": members}})

    def handle(request):
        status = STATUSES.get(request.headers["x-key"], 200)
        usage = {"prompt_tokens": 100, "completion_tokens": 30}
        return httpx.Response(status, json={"usage": usage}, headers={"retry-after": "30"})

    store = MemoryStore(clock=ManualClock(1_767_225_600))
    transport = AsyncRateLimitTransport(known, store, httpx.MockTransport(handle), timeout=0)
    async with httpx.AsyncClient(transport=transport) as client:
        for _ in range(2):
            await client.post("https://api.test/v1/chat/completions", json={"model": "m", "max_tokens": 50})
        rows = await PoolsPanel(transport.gate, Counters())()
    found = {row["member"]: (row["state"], row["refused"], row["cost_micros"]) for row in rows}
    assert found == {
        "a": ("paused", 1, 0),
        "b": ("key rejected", 0, 0),
        "c": ("ready", 0, 500_000),
        "d": ("drained", 0, 0),
    }
    assert [row["limits"][0]["used"] for row in rows[1:]] == [1, 2, 0]
    assert rows[0]["frozen_for"] == 30.0
    lines = draw_members(pool_members({"panels": {"pools": rows}}), Output())
    assert lines[0].split() == ["member", "state", "left", "refused", "cost"]
    assert lines[3].split() == ["models/c", "ready", "3", "of", "5", "requests", "0", "0.50", "usd"]


async def test_a_member_with_limits_of_models_shows_those_of_all_its_accounts():
    models = {"m*": ["5/1m"], "*": ["9/1m"]}
    members = [{"name": "a", "models": models}, {"name": "b", "limits": ["7/1m"]}]
    settings = {"domain": "api.test", "name": "models", "profile": "openai", "limits": ["7/1m"]}
    known = Providers.of({**settings, "price": PRICES, "pool": {"members": members}})
    usage = {"prompt_tokens": 100, "completion_tokens": 30}
    answer = httpx.MockTransport(lambda _request: httpx.Response(200, json={"usage": usage}))
    store = MemoryStore(clock=ManualClock(1_767_225_600))
    transport = AsyncRateLimitTransport(known, store, answer, timeout=0)
    async with httpx.AsyncClient(transport=transport) as client:
        await client.post("https://api.test/v1/chat/completions", json={"model": "m", "max_tokens": 50})
        rows = await PoolsPanel(transport.gate, Counters())()
    assert [(row["member"], row["cost_micros"]) for row in rows] == [("a", 250_000), ("b", 0)]
    assert [(limit["used"], limit["quota"]) for row in rows for limit in row["limits"]] == [(1, 5), (0, 7)]


async def test_a_pool_without_prices_shows_no_cost_and_another_currency_is_named():
    members = [{"name": "a"}, {"name": "b", "profile": "openai", "price": {**PRICES, "currency": "eur"}}]
    known = Providers.of({"domain": "api.test", "name": "models", "limits": ["5/1m"], "pool": {"members": members}})
    gate = AsyncGate(known)
    rows = await PoolsPanel(gate, Counters())()
    await gate.close()
    lines = draw_members(rows, Output())
    assert [line.split()[-2:] for line in lines[1:]] == [["0", "-"], ["0.00", "eur"]]


def test_small_amounts_are_not_shown_as_zero():
    limit = {"unit": "usd_micros", "used": 4_999_999, "remaining": 2712, "quota": 5_000_000}
    member = {"pool": "models", "member": "a", "state": "ready", "refused": 0, "cost_micros": 2712, "currency": "usd"}
    lines = draw_members([{**member, "limits": [limit]}], Output())
    assert lines[1].split() == ["models/a", "ready", "0.0027", "of", "5.00", "usd", "0", "0.0027", "usd"]


def test_a_panel_that_failed_shows_no_members():
    assert pool_members({"panels": {"pools": {"error": "the store is unavailable"}}}) == []
    assert pool_members({"panels": {}}) == []
