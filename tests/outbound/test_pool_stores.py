"""Pools of fifty members on every store: one round trip for each pick, over leases too, and adapters that send them."""

from collections import Counter

import aiohttp
import httpx
import pytest
import requests

from tests.outbound.server import QuotaServer
from tests.servers.valkey import ValkeyServer
from tidegate.outbound import Gate, Providers
from tidegate.outbound.aiohttp import RateLimitMiddleware
from tidegate.outbound.httpx import RateLimitTransport
from tidegate.outbound.requests import RateLimitAdapter
from tidegate.stores import open_store
from tidegate.stores._lease import Lease, LeasedStore

MEMBERS = 50
STORES = ("memory", "sqlite", "redis", "postgres")


@pytest.fixture(scope="module")
def urls(tmp_path_factory, postgres_url):
    with ValkeyServer() as valkey:
        yield {
            "memory": "memory://",
            "sqlite": f"sqlite:///{tmp_path_factory.mktemp('pools')}/a.db",
            "redis": f"{valkey.url}?connect_timeout=5&timeout=5",
            "postgres": f"{postgres_url}?connect_timeout=10&timeout=10",
        }


def providers(domain, limit="2/1h", **fields):
    members = [{"name": f"m{number}"} for number in range(MEMBERS)]
    prices = {"date": "2026-11-01", "models": {"m": {"input": 1, "output": 5}}}
    settings = {
        "domain": domain,
        "name": "pool",
        "limits": [limit, "1000/1d unit=tokens name=tpd"],
        "profile": "openai",
    }
    return Providers.of({**settings, "price": prices, "pool": {"members": members}, **fields})


@pytest.mark.parametrize("kind", STORES)
def test_fifty_members_on_every_store(urls, kind):
    gate = Gate(providers(f"{kind}.test", spend=["0.00006/day unit=usd"]), urls[kind])
    cost = {"tokens": 10, "usd_micros": 1}
    try:
        taken = [gate.try_acquire("pool", cost) for _ in range(61)]
        assert Counter(charge.member for charge in taken) == {**{f"m{i}": 2 for i in range(30)}, "": 1}
        assert tuple(taken[-1].decision.violated) == ("usd-day",)
        taken[0].cancel()
        assert gate.acquire("pool", cost, timeout=5).member == "m0"
    finally:
        gate.close()


def test_a_pick_is_one_round_trip_on_redis(urls):
    """A member that is picked for the first time, or not lately, is also asked whether others were refused."""
    store = open_store(urls["redis"])
    gate = Gate(providers("trips.test", "4/1h"), store)
    for _ in range(2 * MEMBERS):  # members have been picked before
        gate.try_acquire("pool", {"tokens": 1, "usd_micros": 1})
    for account in gate.accounts:
        account.account_capacity.is_check_due()  # ... just now
    before = store.metrics()["scripts"]
    picked = [gate.try_acquire("pool", {"tokens": 1, "usd_micros": 1}).member for _ in range(MEMBERS)]
    assert len(set(picked)) > 5
    assert store.metrics()["scripts"] - before <= MEMBERS + 2  # a check may have become due
    gate.close()
    store.close()


def test_a_pool_over_a_lease_never_exceeds_its_members_and_needs_few_round_trips(urls):
    inner = open_store(urls["redis"])
    stores = [LeasedStore(inner, Lease(), owns=False) for _ in range(2)]
    limits = {"limits": ["40/1h fixed_window"], "pool": {"members": [{"name": f"m{i}"} for i in range(5)]}}
    gates = [Gate(Providers.of({"domain": "leased.test", "name": "pool", **limits}), store) for store in stores]
    before = inner.metrics()["scripts"]
    taken = Counter()
    for number in range(260):
        taken[gates[number % 2].try_acquire("pool").member] += 1
    trips = inner.metrics()["scripts"] - before
    for gate, store in zip(gates, stores, strict=True):
        gate.close()
        store.close()
    inner.close()
    denied = taken.pop("", 0)
    assert max(taken.values()) <= 40
    assert sum(taken.values()) >= 170, taken
    assert denied <= 90
    assert trips < 200, trips


# ---- adapters --------------------------------------------------------------------------------------------------------


@pytest.fixture
def server():
    with QuotaServer() as found:
        yield found


def local_pool(server):
    """Two members: the second one has another URL."""
    members = [
        {"name": "a", "api_key": "key-a"},
        {"name": "b", "api_key": "key-b", "url": f"{server.url}/b"},
    ]
    settings = {"domain": "localhost", "limits": ["1/1h"], "key": {"header": "X-Key"}, "pool": {"members": members}}
    return Providers.of(settings)


def received(server):
    return [(each.path, each.headers["x-key"], each.headers["host"].partition(":")[0]) for each in server.requests]


EXPECTED = [("/v1?q=1", "key-a", "localhost"), ("/b/v1?q=1", "key-b", "127.0.0.1")]


def test_requests_sends_to_the_member_with_its_key(server):
    adapter = RateLimitAdapter(local_pool(server), timeout=0)
    with requests.Session() as session:
        session.mount("http://", adapter)
        members = []
        for _ in range(2):
            url = f"http://localhost:{server.port}/v1?q=1"
            response = session.get(url, headers={"X-Key": "mine"})
            members.append(response.tidegate.member)
    assert members == ["a", "b"]
    assert received(server) == EXPECTED


async def test_aiohttp_sends_to_the_member_with_its_key(server):
    middleware = RateLimitMiddleware(local_pool(server), timeout=0)
    async with middleware, aiohttp.ClientSession(middlewares=[middleware]) as session:
        members = []
        for _ in range(2):
            url = f"http://localhost:{server.port}/v1?q=1"
            async with session.get(url, headers={"X-Key": "mine"}) as response:
                members.append(middleware.outcome_of(response).member)
    assert members == ["a", "b"]
    assert received(server) == EXPECTED


def test_httpx_sends_to_the_member_with_its_key(server):
    transport = RateLimitTransport(local_pool(server), timeout=0)
    with httpx.Client(transport=transport) as client:
        url = f"http://localhost:{server.port}/v1?q=1"
        members = [client.get(url, headers={"X-Key": "mine"}).extensions["tidegate"].member for _ in range(2)]
    assert members == ["a", "b"]
    assert received(server) == EXPECTED
