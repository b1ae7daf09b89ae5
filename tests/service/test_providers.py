"""Permits of providers over HTTP: asked for by name, domain or URL, settled by their id, shared with transports."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from tests.cases import cases
from tests.outbound.flows import CALL, answer
from tests.service.harness import ADMIN, DECISION, InProcessService, serving
from tests.service.test_start_command import write
from tidegate._cli import main
from tidegate.outbound import AsyncGate, Gate, Providers
from tidegate.service.client import AsyncClient, Client
from tidegate.stores import MemoryStore
from tidegate.stores._sqlite import SQLiteStore

FMP = {"domain": "fmp.example", "name": "fmp", "limit": 3, "period": "1m"}


@asynccontextmanager
async def service(*providers, **settings):
    """A service in this process that has loaded providers; its gate and the service share a manual clock."""
    async with InProcessService(policies={"api": "9/1m"}, **settings) as running:
        gate = AsyncGate(Providers.of(*(providers or (FMP,))), MemoryStore(clock=running.clock))
        running.decider.open_providers(gate)
        yield running, gate
        await gate.close()


async def used(running, provider="fmp"):
    reply = await running.post("usage", {"provider": provider})
    return [limit["used"] for limit in reply.json()["limits"]]


@pytest.mark.parametrize("target", ["fmp", "fmp.example", "https://api.fmp.example/v3/quote?symbol=AAPL"])
@pytest.mark.parametrize("verb", ["acquire", "reserve"])
async def test_a_provider_is_asked_by_name_domain_or_url(verb, target):
    async with service() as (running, _gate):
        replies = [(await running.post(verb, {"provider": target})).json() for _ in range(4)]
        assert [reply["allowed"] for reply in replies] == [True, True, True, False]
        assert [reply["remaining"] for reply in replies] == [2, 1, 0, 0]
        assert replies[3]["retry_after"] == 60
        assert replies[3]["id"] is None
        assert await used(running) == [3]
        assert (await running.post("peek", {"provider": target})).json()["allowed"] is False


async def test_peek_and_usage_of_a_pool_see_all_its_members():
    pool = {
        "domain": "ai.example",
        "name": "ai",
        "limit": 1,
        "period": "1m",
        "pool": {"members": [{"name": "a"}, {"name": "b"}]},
    }
    async with service(pool) as (running, _gate):
        peeks, replies = [], []
        for _ in range(3):
            peeks.append((await running.post("peek", {"provider": "ai"})).json()["allowed"])
            replies.append((await running.post("acquire", {"provider": "ai"})).json())
        assert peeks == [True, True, False]
        assert [reply.get("member") for reply in replies] == ["a", "b", None]
        limits = (await running.post("usage", {"provider": "ai"})).json()["limits"]
        assert [(limit["name"], limit["used"]) for limit in limits] == [("a/1m", 1), ("b/1m", 1)]


@pytest.mark.parametrize("verb", ["acquire", "reserve"])
async def test_permits_are_settled_by_their_id(verb):
    limits = {"domain": "ai.example", "limits": ["500/1m", "2000/1m unit=tokens"], "concurrency": 1}
    async with service(limits) as (running, _gate):
        asked = {"provider": "ai.example", "cost": {"tokens": 800}}
        first = (await running.post(verb, asked)).json()
        assert await used(running, "ai.example") == [1, 800, 1]
        assert (await running.post(verb, asked)).json()["violated"] == ["concurrency"]
        settled = {"id": first["id"], "cost": {"tokens": 42}}
        assert (await running.post("commit", settled)).json() == {"ok": True}
        assert await used(running, "ai.example") == [1, 42, 0]
        assert (await running.post("commit", settled)).status_code == 409
        second = (await running.post(verb, asked)).json()
        assert (await running.post("cancel", {"id": second["id"]})).status_code == 200
        assert await used(running, "ai.example") == [1, 42, 0]
        wrong = await running.post("commit", {"id": (await running.post(verb, asked)).json()["id"], "cost": {"x": 1}})
        assert wrong.status_code == 422


@pytest.mark.parametrize("algorithm", ["sliding_log", "fixed_window", "calendar_window"])
async def test_a_slow_request_counts_until_it_is_committed(algorithm):
    slow = {**FMP, "limit": 1, "algorithm": algorithm}
    async with service(slow) as (running, _gate):
        held = (await running.post("reserve", {"provider": "fmp", "ttl": 300})).json()
        running.clock.advance(61)
        assert (await running.post("acquire", {"provider": "fmp"})).json()["allowed"] is False  # still in flight
        await running.post("commit", {"id": held["id"]})
        running.clock.advance(59 if algorithm == "sliding_log" else 50)
        assert (await running.post("acquire", {"provider": "fmp"})).json()["allowed"] is False
        running.clock.advance(61)
        assert (await running.post("acquire", {"provider": "fmp"})).json()["allowed"] is True


@pytest.mark.parametrize("algorithm", ["sliding_log", "fixed_window"])
async def test_another_process_commits_a_slow_request_as_exactly(algorithm):
    """Its id says when it was charged; nothing of the first process is needed."""
    slow = {**FMP, "limit": 1, "algorithm": algorithm}
    async with service(slow) as (running, gate):
        held = (await running.post("acquire", {"provider": "fmp"})).json()
        other = AsyncGate(Providers.of(slow), gate.store)
        running.decider.open_providers(other)
        running.clock.advance(40)
        assert (await running.post("commit", {"id": held["id"]})).status_code == 200
        running.clock.advance(19)
        assert not await other.try_acquire("fmp")
        running.clock.advance(2)
        assert bool(await other.try_acquire("fmp")) is (algorithm == "fixed_window")  # its window is over
        await other.close()


PAID = {
    "domain": "ai.example",
    "limits": ["500/1m"],
    "profile": "openai",
    "price": {"date": "2026-11-01", "models": {"*": {"input": 1, "output": 4}}},
    "spend": ["25/day unit=usd"],
    "pool": {"members": [{"name": "a"}, {"name": "b"}]},
}


@pytest.mark.parametrize("cost", [{"usd_micros": 1200}, {"usd_micros": 3_000_000, "requests": 1}])
@pytest.mark.parametrize("tracked", [True, False])
async def test_any_process_settles_what_a_call_has_cost(cost, tracked, tmp_path):
    """The ceiling of the pool counts the settled amount, and the ledger of the process that settled has it."""
    async with service(PAID) as (running, gate):
        asked = {"provider": "ai.example", "cost": {"usd_micros": 2_000_000}}
        held = (await running.post("reserve", {**asked, "ttl": 60})).json()
        assert (await gate.ceilings[0].usage("all"))["usd-day"].used == 2_000_000
        other = AsyncGate(Providers.of(PAID), gate.store, spending=str(tmp_path / "spending.db"))
        if not tracked:
            running.decider.open_providers(other)
        wrong = await running.post("commit", {"id": held["id"], "cost": {"eur_micros": 1}})
        assert wrong.status_code == 422
        wrong = await running.post("commit", {"id": held["id"], "cost": {"usd_micros": -1}})
        assert wrong.status_code == 422
        assert (await running.post("commit", {"id": held["id"], "cost": cost})).json() == {"ok": True}
        assert (await gate.ceilings[0].usage("all"))["usd-day"].used == cost["usd_micros"]
        assert [entry.amount for entry in other.spending.ledger.read()] == [cost["usd_micros"]][tracked:]
        await other.close()


class RecordingStore(SQLiteStore):
    """Records the steps of tasks: the verb, and how many values each writes."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.steps = []

    async def apply_async(self, verb, asks, now=None, at=None, writes=()):
        self.steps.append((verb, len(writes)))
        return await super().apply_async(verb, asks, now, at, writes)


@cases(
    ("verb", "fields", "expected"),
    [
        ("commit", {}, 300),
        ("commit", {"cost": {"tokens": 42}}, 42),
        ("cancel", {}, 0),
    ],
)
async def test_a_permit_is_settled_in_one_step_with_its_id(verb, fields, expected, tmp_path):
    limits = {"domain": "ai.example", "limits": ["2000/1m unit=tokens"]}
    async with service(limits) as (running, _gate):
        stores = [RecordingStore(tmp_path / f"{verb}-{expected}.db", clock=running.clock) for _ in range(2)]
        gates = [AsyncGate(Providers.of(limits), store) for store in stores]
        running.decider.open_providers(gates[0])
        held = (await running.post("acquire", {"provider": "ai.example", "cost": {"tokens": 300}})).json()
        stores[0].steps.clear()
        assert (await running.post(verb, {"id": held["id"], **fields})).status_code == 200
        assert stores[0].steps == [("adjust", 1)]
        assert await used(running, "ai.example") == [expected]
        for gate in gates:  # also in another process, which knows from the store only that it is settled
            running.decider.open_providers(gate)
            for again, more in (("commit", {"cost": {"tokens": 7}}), ("commit", {}), ("cancel", {})):
                assert (await running.post(again, {"id": held["id"], **more})).status_code == 409
            assert await used(running, "ai.example") == [expected]
        for gate, store in zip(gates, stores, strict=True):
            await gate.close()
            store.close()


async def test_any_process_cancels_what_a_call_would_have_cost():
    async with service(PAID) as (running, gate):
        held = (await running.post("acquire", {"provider": "ai.example", "cost": {"usd_micros": 2_000_000}})).json()
        other = AsyncGate(Providers.of(PAID), gate.store)
        running.decider.open_providers(other)
        assert (await running.post("cancel", {"id": held["id"]})).status_code == 200
        assert (await gate.ceilings[0].usage("all"))["usd-day"].used == 0
        await other.close()


async def test_a_removed_ceiling_does_not_keep_an_id_from_being_settled():
    async with service(PAID) as (running, gate):
        held = (await running.post("acquire", {"provider": "ai.example", "cost": {"usd_micros": 2_000_000}})).json()
        other = AsyncGate(Providers.of({**PAID, "spend": []}), gate.store)
        running.decider.open_providers(other)
        assert (await running.post("commit", {"id": held["id"], "cost": {"requests": 1}})).status_code == 200
        await other.close()


async def test_a_call_without_its_money_is_refused_where_a_ceiling_counts_it():
    async with service(PAID) as (running, _gate):
        reply = await running.post("acquire", {"provider": "ai.example"})
        assert reply.status_code == 422
        assert "needs the money that the request may cost" in reply.text


async def test_a_permit_that_is_never_settled_counts_until_its_ttl():
    async with service({**FMP, "limit": 1}) as (running, _gate):
        await running.post("reserve", {"provider": "fmp", "ttl": 90})
        running.clock.advance(61)
        assert (await running.post("acquire", {"provider": "fmp"})).json()["allowed"] is False
        running.clock.advance(61)
        assert (await running.post("acquire", {"provider": "fmp"})).json()["allowed"] is True


async def test_the_count_is_shared_with_transports_and_counted_in_the_metrics():
    async with service() as (running, gate):
        transport = Gate(gate.providers, gate.store, timeout=0)
        answer(transport, call=CALL._replace(url="https://fmp.example/"))
        assert (await running.post("acquire", {"provider": "fmp"})).json()["remaining"] == 1
        transport.close()
        metrics = (await running.http.get("/metrics")).text
        assert 'policy="provider:fmp.example"' in metrics


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"provider": "fpm"}, 404, "did you mean 'fmp'"),
        ({"provider": ""}, 422, "a string of 1 to 1024 characters"),
        ({"provider": 3}, 422, "a string of 1 to 1024 characters"),
        ({"provider": "fmp", "policy": "api", "key": "k"}, 422, "cannot be combined with policy"),
        ({"provider": "fmp", "priority": 10**9}, 422, "priority"),
    ],
)
async def test_wrong_requests_are_explained(body, status, message):
    async with service() as (running, _gate):
        reply = await running.post("acquire", body)
        assert (reply.status_code, message in reply.text) == (status, True)
        assert (await running.post("release", {"provider": "fmp"})).status_code == 422


async def test_without_providers_the_service_says_how_to_load_them():
    async with InProcessService(policies={"api": "9/1m"}) as running:
        reply = await running.post("acquire", {"provider": "fmp"})
        assert (reply.status_code, "--provider-dir" in reply.text) == (404, True)


async def test_a_host_without_a_provider_is_not_limited():
    async with service() as (running, _gate):
        reply = (await running.post("acquire", {"provider": "https://elsewhere.example/"})).json()
        assert (reply["allowed"], reply["remaining"], reply["id"]) == (True, None, None)


async def test_a_call_waits_for_a_permit_of_a_provider():
    async with service({**FMP, "limit": 1}, max_wait=90) as (running, gate):
        await running.post("acquire", {"provider": "fmp"})
        waiting = asyncio.create_task(running.post("acquire", {"provider": "fmp", "timeout": 80}))
        while not gate.metrics()["waiting"]:
            await asyncio.sleep(0)
        running.clock.advance(60)
        assert (await waiting).json()["allowed"] is True


def test_commands_and_clients_name_the_member_of_a_pool(tmp_path, capsys):
    pool = "pool: {members: [{name: a}, {name: b}]}\n"
    write(tmp_path / "providers" / "ai.yaml", f"domain: ai.example\nlimit: 1\nperiod: 1h\n{pool}")
    with serving(tmp_path, "provider_dirs: providers\ndata: data\n") as running:
        assert main(["acquire", "--provider", "ai", "--url", running.url]) == 0
        assert ", member a\n" in capsys.readouterr().out
        with Client(running.url) as client, client.reserve_provider("ai") as held:
            assert held.decision.member == "b"
        assert main(["usage", "--provider", "ai", "--url", running.url]) == 0
        assert "a/1h" in capsys.readouterr().out


def test_commands_and_clients_ask_a_running_service(tmp_path, capsys, monkeypatch):
    write(tmp_path / "providers" / "fmp.yaml", "domain: fmp.example\nlimit: 4\nperiod: 1h\nconcurrency: 4\n")
    text = f"provider_dirs: providers\ndata: data\nstore: sqlite:///{tmp_path / 'limits.db'}?deadline=10s\n"
    text += f"decision_token: {DECISION}\nadmin_token: {ADMIN}\n"
    monkeypatch.setenv("TIDEGATE_TOKEN", DECISION)
    with serving(tmp_path, text, "--workers", "2") as running:
        url = ["--url", running.url]
        assert main(["acquire", "--provider", "fmp", "--json", *url]) == 0
        first = json.loads(capsys.readouterr().out)
        assert main(["commit", first["id"], *url]) == 0
        assert main(["peek", "--provider", "fmp.example", *url]) == 0
        assert main(["usage", "--provider", "https://api.fmp.example/v3", *url]) == 0
        shown = capsys.readouterr().out
        assert "allowed, 2 left" in shown  # after the call
        assert " 1 4 requests " in " ".join(shown.split())
        assert main(["peek", "--provider", "fmp", "--cost", "9", *url]) == 1
        assert "the cost is more than the limit can ever allow" in capsys.readouterr().out
        assert main(["usage", "--provider", "https://other.example/", *url]) == 0
        assert capsys.readouterr().out == "not limited\n"
        for verb in ("peek", "usage"):
            assert main([verb, "--provider", "fpm", *url]) == 2
            assert "did you mean 'fmp'" in capsys.readouterr().err
            assert main([verb, "api", "--provider", "fmp", *url]) == 2
            assert main([verb, "api", *url]) == 2
            assert "expected POLICY and KEY, or --provider" in capsys.readouterr().err
        assert main(["acquire", "--provider", "fmp.example", "--ttl", "60", "--json", *url]) == 0
        assert main(["cancel", json.loads(capsys.readouterr().out.splitlines()[-1])["id"], *url]) == 0
        with Client(running.url, token=DECISION) as client:
            with client.reserve_provider("fmp") as held:
                assert held.decision.remaining == 2
            with pytest.raises(ZeroDivisionError), client.reserve_provider("https://api.fmp.example/x"):
                _ = 1 / 0  # the request may have arrived
            client.reserve_provider("fmp").commit()
        capsys.readouterr()
        assert main(["acquire", "--provider", "fmp", *url]) == 1
        assert "denied by 1h" in capsys.readouterr().out
        assert main(["acquire", *url]) == 2
        assert "expected POLICY and KEY, or --provider" in capsys.readouterr().err
        # A transport in another process shares the count.
        gate = Gate(
            Providers.load(directories=[str(tmp_path / "providers")]), f"sqlite:///{tmp_path / 'limits.db'}", timeout=0
        )
        assert not gate.try_acquire("fmp")
        gate.close()


async def test_the_asynchronous_client_reserves_permits_of_a_provider(tmp_path):
    write(tmp_path / "fmp.yaml", "domain: fmp.example\nlimit: 2\nperiod: 1h\n")
    with serving(tmp_path, f"providers: [{tmp_path / 'fmp.yaml'}]\ndata: {tmp_path / 'data'}\n") as running:
        async with AsyncClient(running.url) as client:
            async with client.reserve_provider("fmp", 1) as held:
                assert held.decision.remaining == 1
            held = await client.reserve_provider("fmp")
            await held.cancel()
            assert (await client.reserve_provider("fmp")).decision.allowed
