"""Permits of providers over RESP: taken by name, domain or URL, settled by their id, shared with HTTP."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import redis

from tests.service.harness import DECISION
from tests.service.resp.harness import connected, serving_resp
from tidegate.outbound import AsyncGate, Providers
from tidegate.stores import MemoryStore

FMP = {"domain": "fmp.example", "name": "fmp", "limit": 3, "period": "1m"}
AI = {"domain": "ai.example", "limits": ["500/1m", "2000/1m unit=tokens"], "concurrency": 1}


@asynccontextmanager
async def service(*providers):
    """A RESP port that has loaded providers; its gate and the service share a manual clock."""
    async with connected(policies={"api": "9/1m"}) as (running, client):
        gate = AsyncGate(Providers.of(*(providers or (FMP,))), MemoryStore(clock=running.clock))
        running.decider.open_providers(gate)
        yield running, client
        await gate.close()


async def used(client, provider):
    return [limit[2] for limit in await client.ask("TG.PROVIDER", "USAGE", provider)]


@pytest.mark.parametrize("target", ["fmp", "fmp.example", "https://api.fmp.example/v3/quote?symbol=AAPL"])
async def test_a_provider_is_asked_by_name_domain_or_url(target):
    async with service() as (_running, client):
        replies = [await client.ask("TG.PROVIDER", "ACQUIRE", target) for _ in range(4)]
        assert [reply[:2] for reply in replies] == [[1, 2], [1, 1], [1, 0], [0, 0]]
        assert replies[3][2:] == [60_000, 60_000, ["fmp"], None]
        assert (await client.ask("tg.provider", "peek", target))[0] == 0
        assert await client.ask("TG.PROVIDER", "USAGE", target) == [["fmp", 3, 3, 0, 60_000, "requests"]]


async def test_the_member_of_a_pool_is_the_seventh_value():
    async with service({**FMP, "limit": 1, "pool": {"members": [{"name": "a"}, {"name": "b"}]}}) as (_running, client):
        replies = [await client.ask("TG.PROVIDER", "ACQUIRE", "fmp") for _ in range(3)]
        assert [reply[6:] for reply in replies] == [["a"], ["b"], []]


async def test_permits_are_settled_by_their_id_once():
    async with service(AI) as (_running, client):
        asked = ("TG.PROVIDER", "ACQUIRE", "ai.example", "COST", "tokens", 800)
        first = (await client.ask(*asked))[5]
        assert await used(client, "ai.example") == [1, 800, 1]
        assert (await client.ask(*asked))[4] == ["concurrency"]
        for _ in range(2):  # a client may repeat the same command
            assert await client.ask("TG.COMMIT", first, "COST", "tokens", 42) == "OK"
            assert await used(client, "ai.example") == [1, 42, 0]
        assert "already-settled" in str(await client.ask("TG.CANCEL", first))
        second = (await client.ask(*asked))[5]
        assert await client.ask("TG.CANCEL", second) == "OK"
        assert await used(client, "ai.example") == [1, 42, 0]


async def test_a_permit_with_a_ttl_counts_until_it_is_settled():
    async with service({**FMP, "limit": 1}) as (running, client):
        held = (await client.ask("TG.PROVIDER", "ACQUIRE", "fmp", "TTL", 300))[5]
        running.clock.advance(61)
        assert (await client.ask("TG.PROVIDER", "ACQUIRE", "fmp"))[0] == 0  # still in flight
        assert await client.ask("TG.COMMIT", held) == "OK"
        running.clock.advance(61)
        assert (await client.ask("TG.PROVIDER", "ACQUIRE", "fmp"))[0] == 1


async def test_a_call_waits_for_a_permit_up_to_its_timeout():
    async with service({**FMP, "limit": 1}) as (running, client):
        await client.ask("TG.PROVIDER", "ACQUIRE", "fmp")
        waiting = asyncio.ensure_future(client.ask("TG.PROVIDER", "ACQUIRE", "fmp", "TIMEOUT", 61, "PRIORITY", 1))
        while not running.app.waiting:
            await asyncio.sleep(0)
        running.clock.advance(60)
        assert (await waiting)[0] == 1
        assert running.app.waiting == 0


async def test_the_count_is_shared_with_http_and_a_pipeline_is_answered_in_order():
    async with service() as (running, client):
        first = (await running.post("acquire", {"provider": "fmp"})).json()
        assert first["remaining"] == 2
        replies = await client.ask_all(*[("TG.PROVIDER", "ACQUIRE", "fmp")] * 3)
        assert sorted(reply[0] for reply in replies) == [0, 1, 1]
        assert await client.ask("TG.CANCEL", first["id"]) == "OK"
        assert await used(client, "fmp") == [2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("ACQUIRE", "fpm"), "did you mean 'fmp'"),
        (("ACQUIRE",), "wrong number of arguments; usage: TG.PROVIDER ACQUIRE target"),
        (("TAKE", "fmp"), "unknown subcommand 'TAKE'; usage: TG.PROVIDER ACQUIRE target"),
        (("PEEK", "fmp", "TTL", 3), "expected COST"),
        (("USAGE", "fmp", "COST", 3), "expected no further arguments"),
        (("ACQUIRE", "fmp", "PRIORITY", 10**9), "priority"),
    ],
)
async def test_wrong_commands_are_explained(words, message):
    async with service() as (_running, client):
        assert message in str(await client.ask("TG.PROVIDER", *words))


async def test_without_providers_the_service_says_how_to_load_them():
    async with connected(policies={"api": "9/1m"}) as (_running, client):
        assert "--provider-dir" in str(await client.ask("TG.PROVIDER", "ACQUIRE", "fmp"))


async def test_a_host_without_a_provider_is_not_limited():
    async with service() as (_running, client):
        assert await client.ask("TG.PROVIDER", "ACQUIRE", "https://other.example/") == [1, 0, 0, 0, [], None]


@pytest.mark.parametrize("protocol", [2, 3])
def test_redis_py(tmp_path, protocol):
    (tmp_path / "fmp.yaml").write_text("domain: fmp.example\nname: fmp\nlimit: 2\nperiod: 1m\n")
    flags = ("--provider", str(tmp_path / "fmp.yaml"))
    with (
        serving_resp(tmp_path, f"decision_token: {DECISION}\ndata: {tmp_path / 'data'}\n", *flags) as (_service, port),
        redis.Redis(port=port, password=DECISION, protocol=protocol, decode_responses=True) as client,
    ):
        *decision, permit = client.execute_command("TG.PROVIDER", "ACQUIRE", "fmp")
        assert decision[:2] == [1, 1]
        assert client.execute_command("TG.COMMIT", permit)
        *_, other = client.execute_command("TG.PROVIDER", "ACQUIRE", "fmp.example")
        assert client.execute_command("TG.PROVIDER", "ACQUIRE", "fmp")[0] == 0
        assert client.execute_command("TG.CANCEL", other)
        assert client.execute_command("TG.PROVIDER", "USAGE", "fmp")[0][2] == 1
