"""The commands of the RESP port: replies, options, errors, tokens, blocks, reservations, commands of clients."""

import asyncio

import pytest

from tests.cases import cases
from tests.service.harness import ADMIN, DECISION
from tests.service.resp.harness import RespClient, connected, encode

POLICIES = {
    "api": "5/1m",
    "quiet": {"limits": "5/1m", "mode": "shadow"},
    "tiers": {"limits": ["3/1s", "100 tokens/1m"]},
    "slots": {"limits": [{"quota": 1, "period": "1m", "algorithm": "concurrency"}]},
    "vip": {"limits": "1/1m", "overrides": [{"key": "gold", "limits": "9/1m"}]},
}


async def test_acquire_answers_the_decision_in_five_values():
    async with connected(policies=POLICIES) as (service, client):
        assert await client.ask("TG.ACQUIRE", "api", "k") == [1, 4, 0, 12_000, []]
        assert await client.ask("tg.acquire", "api", "k", "cost", "4") == [1, 0, 0, 60_000, []]
        assert await client.ask("TG.ACQUIRE", "api", "k") == [0, 0, 12_000, 60_000, ["1m"]]
        assert await client.ask("TG.ACQUIRE", "api", "k", "COST", "6") == [0, 0, -1, 60_000, ["1m"]]
        service.clock.advance(0.0005)
        assert await client.ask("TG.ACQUIRE", "api", "k") == [0, 0, 12_000, 60_000, ["1m"]]  # rounded up
        assert await client.ask("TG.PEEK", "api", "other") == [1, 4, 0, 12_000, []]
        assert await client.ask("TG.PEEK", "api", "other", "COST", "5") == [1, 0, 0, 60_000, []]
        assert await client.ask("TG.ACQUIRE", "vip", "gold") == [1, 8, 0, 6667, []]


async def test_costs_in_units_and_several_limits():
    async with connected(policies=POLICIES) as (_, client):
        reply = await client.ask("TG.ACQUIRE", "tiers", "k", "COST", "requests", "2", "tokens", "90")
        assert reply == [1, 1, 0, 54_000, []]
        reply = await client.ask("TG.ACQUIRE", "tiers", "k", "COST", "requests", "2", "tokens", "20", "TIMEOUT", "0")
        assert reply[0] == 0
        assert reply[4] == ["1s", "tokens-1m"]


async def test_a_shadow_policy_allows_and_names_the_limits():
    async with connected(policies=POLICIES) as (_, client):
        await client.ask("TG.ACQUIRE", "quiet", "k", "COST", "5")
        assert await client.ask("TG.ACQUIRE", "quiet", "k") == [1, 0, 0, 60_000, ["1m"]]


async def test_a_call_waits_in_the_order_of_its_priority():
    async with connected(policies=POLICIES) as (service, client):
        await client.ask("TG.ACQUIRE", "api", "k", "COST", "5")
        second = await service.connect()
        waiting = [asyncio.create_task(client.ask("TG.ACQUIRE", "api", "k", "TIMEOUT", "20"))]
        while service.decider.waiting < 1:
            await asyncio.sleep(0)
        waiting.append(asyncio.create_task(second.ask("TG.ACQUIRE", "api", "k", "TIMEOUT", "20", "PRIORITY", "5")))
        while service.decider.waiting < 2:
            await asyncio.sleep(0)
        assert service.app.waiting == 2
        service.clock.advance(12)
        assert (await waiting[1])[0] == 1
        service.clock.advance(12)
        assert (await waiting[0])[0] == 1
        assert service.app.waiting == 0


async def test_a_client_that_disconnects_leaves_the_wait_queue():
    async with connected(policies=POLICIES) as (service, client):
        await client.ask("TG.ACQUIRE", "api", "k", "COST", "5")
        for name in ("TG.ACQUIRE", "TG.RESERVE"):
            gone = await service.connect()
            gone.writer.write(encode(name, "api", "k", "TIMEOUT", "20"))
            while not service.decider.waiting:
                await asyncio.sleep(0)
            gone.close()
            while service.decider.waiting:
                await asyncio.sleep(0)
        service.clock.advance(12)
        assert (await client.ask("TG.ACQUIRE", "api", "k"))[0] == 1


async def test_reservations():
    async with connected(policies=POLICIES) as (service, client):
        *decision, first = await client.ask("TG.RESERVE", "api", "k", "COST", "3", "TTL", "30")
        assert decision == [1, 2, 0, 36_000, []]
        assert await client.ask("TG.COMMIT", first, "COST", "1") == "OK"
        assert (await client.ask("TG.USAGE", "api", "k"))[0][2] == 1
        second = (await client.ask("TG.RESERVE", "api", "k", "COST", "4"))[5]
        assert await client.ask("TG.RESERVE", "api", "k") == [0, 0, 12_000, 60_000, ["1m"], None]
        assert await client.ask("TG.CANCEL", second) == "OK"
        assert (await client.ask("TG.USAGE", "api", "k"))[0][2] == 1
        assert await client.ask("TG.CANCEL", "forged.id") != "OK"
        third = (await client.ask("TG.RESERVE", "api", "k"))[5]
        assert (await service.post("cancel", {"id": third})).json() == {"ok": True}  # one service, two ports


async def test_a_settlement_may_be_repeated_but_not_replaced():
    async with connected(policies=POLICIES) as (_, client):
        reserved = (await client.ask("TG.RESERVE", "api", "k", "COST", "3"))[5]
        assert await client.ask_all(*[("TG.CANCEL", reserved)] * 3) == ["OK"] * 3
        assert (await client.ask("TG.USAGE", "api", "k"))[0][2] == 0
        assert "already-settled" in str(await client.ask("TG.COMMIT", reserved))
        reserved = (await client.ask("TG.RESERVE", "api", "k", "COST", "3"))[5]
        for _ in range(2):
            assert await client.ask("TG.COMMIT", reserved, "COST", "2") == "OK"
        assert (await client.ask("TG.USAGE", "api", "k"))[0][2] == 2
        assert "already-settled" in str(await client.ask("TG.COMMIT", reserved, "COST", "1"))
        assert "already-settled" in str(await client.ask("TG.CANCEL", reserved))


async def test_slots_usage_and_reset():
    async with connected(policies=POLICIES) as (_, client):
        assert (await client.ask("TG.ACQUIRE", "slots", "k"))[0] == 1
        assert (await client.ask("TG.ACQUIRE", "slots", "k"))[0] == 0
        assert await client.ask("TG.RELEASE", "slots", "k") == "OK"
        assert (await client.ask("TG.ACQUIRE", "slots", "k"))[0] == 1
        await client.ask("TG.ACQUIRE", "tiers", "k", "COST", "requests", "2", "tokens", "40")
        assert await client.ask("TG.USAGE", "tiers", "k") == [
            ["1s", 3, 2, 1, 667, "requests"],
            ["tokens-1m", 100, 40, 60, 24_000, "tokens"],
        ]
        assert await client.ask("TG.RESET", "tiers", "k") == "OK"
        assert (await client.ask("TG.USAGE", "tiers", "k"))[1][2] == 0


async def test_a_blocked_key_is_denied():
    async with connected(policies=POLICIES) as (service, client):
        assert (await client.ask("TG.ACQUIRE", "api", "bad"))[0] == 1
        await service.post("block", {"policy": "api", "key": "bad", "seconds": 90})
        for name in ("TG.ACQUIRE", "TG.PEEK"):
            assert await client.ask(name, "api", "bad") == [0, 0, 90_000, 90_000, ["blocked"]]
        replies = await client.ask_all(("TG.ACQUIRE", "api", "bad"), ("TG.ACQUIRE", "api", "good"))
        assert [reply[0] for reply in replies] == [0, 1]
        assert (await client.ask("TG.RESERVE", "api", "bad"))[4:] == [["blocked"], None]


@cases(("words", "message"), [
        (("TG.ACQUIRE", "apj", "k"), "ERR unknown-policy: there is no policy 'apj': did you mean 'api'?"),
        (("TG.ACQUIRE", "api"), "ERR wrong number of arguments; usage: TG.ACQUIRE policy key"),
        (("TG.ACQUIRE", "api", "k" * 2000), "ERR bad-field: key: is longer than 1024 characters"),
        (("TG.ACQUIRE", "api", b"\xff"), "ERR an argument is not valid UTF-8"),
        (("TG.ACQUIRE", "api", "k", "COST"), "ERR COST: expected an integer"),
        (("TG.ACQUIRE", "api", "k", "COST", "-1"), "ERR COST: expected an integer from 0"),
        (("TG.ACQUIRE", "api", "k", "COST", "1.5"), "ERR COST"),
        (("TG.ACQUIRE", "api", "k", "COST", "a", "1", "b"), "ERR COST"),
        (("TG.ACQUIRE", "api", "k", "COST", "a", "1", "a", "2"), "ERR COST: a unit is given twice"),
        (("TG.ACQUIRE", "api", "k", "COST", "1", "COST", "2"), "ERR COST is given twice"),
        (("TG.ACQUIRE", "tiers", "k", "COST", "apples", "2"), "ERR bad-field"),
        (("TG.ACQUIRE", "api", "k", "TIMEOUT", "soon"), "ERR TIMEOUT: expected one number, not 'soon'"),
        (("TG.ACQUIRE", "api", "k", "TIMEOUT", "nan"), "ERR TIMEOUT"),
        (("TG.ACQUIRE", "api", "k", "TIMEOUT"), "ERR TIMEOUT"),
        (("TG.ACQUIRE", "api", "k", "PRIORITY", "1000"), "ERR bad-field: priority"),
        (("TG.ACQUIRE", "api", "k", "TTL", "1"), "ERR unexpected argument 'TTL': expected COST or TIMEOUT or PRIORITY"),
        (("TG.ACQUIRE", "api", "k", "x"), "ERR unexpected argument 'x'"),
        (("TG.RESERVE", "api", "k", "TTL", "1e9"), "ERR bad-field: ttl"),
        (("TG.COMMIT", "x"), "ERR unknown-reservation"),
        (("TG.CANCEL", "x", "y"), "ERR wrong number of arguments; usage: TG.CANCEL id"),
        (("GET", "x"), "ERR unknown command 'GET'"),
        ((b"\xff\r\n",), "ERR unknown command"),
        (("SELECT", "1"), "ERR DB index is out of range"),
        (("CLIENT", "KILL"), "ERR CLIENT 'KILL' is not supported"),
        (("HELLO", "4"), "NOPROTO unsupported protocol version"),
        (("HELLO", "3", "X"), "ERR syntax error in HELLO"),
        (("AUTH", "x" * 16), "called without any password configured"),
        (("AUTH",), "ERR usage: AUTH"),
        (("COMMAND", "GETKEYS"), "ERR COMMAND 'GETKEYS' is not supported"),
    ])  # fmt: skip
async def test_errors_are_clear_and_the_connection_stays(words, message):
    async with connected(policies=POLICIES) as (_, client):
        assert message in str(await client.ask(*words))
        assert "\n" not in str(await client.ask(*words))
        assert await client.ask("PING") == "PONG"


async def test_a_refused_transaction_charges_nothing():
    async with connected(policies=POLICIES) as (_, client):
        words = ("TG.ACQUIRE", "api", "k")
        replies = await client.ask_all(
            ("MULTI",), words, words, ("TG.RESERVE", *words[1:]), ("PING",), ("EXEC",), words
        )
        assert all("transactions are not supported" in str(reply) for reply in replies[:-1])
        assert replies[-1] == [1, 4, 0, 12_000, []]
        assert "transactions are not supported" in str(await client.ask("MULTI"))
        assert "transactions are not supported" in str(await client.ask(*words))
        assert str(await client.ask("DISCARD")).startswith("EXECABORT")
        assert (await client.ask(*words))[1] == 3


async def test_the_commands_of_clients():
    async with connected(policies=POLICIES) as (service, client):
        assert await client.ask("PING", "hello") == "hello"
        assert await client.ask("ECHO", "hello") == "hello"
        assert await client.ask("SELECT", "0") == "OK"
        assert await client.ask("CLIENT", "SETINFO", "LIB-NAME", "x") == "OK"
        assert await client.ask("CLIENT", "GETNAME") is None
        assert await client.ask("CLIENT", "SETNAME", "web") == "OK"
        assert await client.ask("CLIENT", "GETNAME") == "web"
        other = await service.connect()
        assert await client.ask("CLIENT", "ID") != await other.ask("CLIENT", "ID")
        hello = await client.ask("HELLO", "2", "SETNAME", "api")
        assert dict(zip(hello[::2], hello[1::2], strict=True)) | {"id": 0} == {
            "server": "tidegate", "version": "7.0.0", "proto": 2, "id": 0, "mode": "standalone", "role": "master",
            "modules": [],
        }  # fmt: skip
        assert (await client.ask("HELLO", "3"))["proto"] == 3
        assert await client.ask("TG.RESERVE", "api", "k", "COST", "9") == [0, 5, -1, 0, ["1m"], None]
        assert "connected_clients:2" in await client.ask("INFO")
        assert await client.ask("COMMAND", "COUNT") == len(await client.ask("COMMAND")) == 13
        assert await client.ask("COMMAND", "INFO", "tg.acquire", "get") == [["tg.acquire", -3, [], 2, 2, 1], None]
        assert "cl.throttle" in await client.ask("COMMAND", "LIST")
        assert await client.ask("COMMAND", "DOCS") == {}
        client.writer.write(encode("QUIT") + encode("PING"))
        assert await client.read() == "OK"
        with pytest.raises(EOFError):
            await client.read()


# ---- tokens ----------------------------------------------------------------------------------------------------------


async def allowed_commands(client: RespClient) -> list[str]:
    """Return the first word of the reply to an acquire, and of the reply to a reset."""
    replies = await client.ask_all(("TG.ACQUIRE", "api", "k"), ("TG.RESET", "api", "k"))
    return [str(reply).split()[0] if not isinstance(reply, list) else "list" for reply in replies]


async def test_tokens():
    async with connected(policies=POLICIES, decision_token=DECISION, admin_token=ADMIN) as (service, client):
        assert await allowed_commands(client) == ["NOAUTH", "NOAUTH"]
        for words in [
            ("PING",),
            ("INFO",),
            ("GET", "x"),
            ("HELLO", "3"),
            ("CLIENT", "ID"),
            ("CL.THROTTLE", "k", 1, 1, 1),
        ]:
            assert str(await client.ask(*words)).startswith("NOAUTH"), words
        assert str(await client.ask("AUTH", "wrong")).startswith("WRONGPASS")
        assert str(await client.ask("HELLO", "3", "AUTH", "default", "wrong")).startswith("WRONGPASS")
        assert await allowed_commands(client) == ["NOAUTH", "NOAUTH"]
        assert await client.ask("AUTH", DECISION) == "OK"
        assert await allowed_commands(client) == ["list", "NOPERM"]
        assert await client.ask("AUTH", "any user", ADMIN) == "OK"
        assert await allowed_commands(client) == ["list", "OK"]
        assert str(await client.ask("AUTH", "wrong")).startswith("WRONGPASS")
        assert await client.ask("AUTH", DECISION) == "OK"
        assert await allowed_commands(client) == ["list", "NOPERM"]
        other = await service.connect()
        assert (await other.ask("HELLO", "3", "AUTH", "default", ADMIN))["proto"] == 3
        assert await allowed_commands(other) == ["list", "OK"]
        assert service.decider.stats.errors.totals()["unauthorized"] > 5


async def test_an_admin_token_alone_leaves_decisions_open():
    async with connected(policies=POLICIES, admin_token=ADMIN) as (_, client):
        assert await allowed_commands(client) == ["list", "NOPERM"]
        assert str(await client.ask("AUTH", DECISION)).startswith("WRONGPASS")
        assert await client.ask("AUTH", ADMIN) == "OK"
        assert await allowed_commands(client) == ["list", "OK"]


async def test_the_audit_log_names_the_client_of_a_reset():
    async with connected(policies=POLICIES) as (service, client):
        assert await client.ask("CLIENT", "SETNAME", "night-shift") == "OK"
        assert await client.ask("TG.RESET", "api", "k") == "OK"
        (entry,) = await service.decider.audit.read()
        assert (entry.actor, entry.address) == ("night-shift", "127.0.0.1")


async def test_a_decision_token_alone_allows_no_reset():
    async with connected(policies=POLICIES, decision_token=DECISION) as (_, client):
        replies = await client.ask_all(("AUTH", DECISION), ("TG.ACQUIRE", "api", "k"), ("TG.RESET", "api", "k"))
        assert replies[:2] == ["OK", [1, 4, 0, 12_000, []]]
        assert "no admin token is configured" in str(replies[2])


# ---- bounds ----------------------------------------------------------------------------------------------------------


async def test_a_stopping_or_busy_service_refuses_and_counts():
    async with connected(policies=POLICIES, max_concurrency=8) as (service, client):
        service.app.in_flight = 9
        assert str(await client.ask("TG.ACQUIRE", "api", "k")).startswith("TRYAGAIN busy")
        assert await client.ask("TG.RESET", "api", "k") == "OK"  # an admin request
        service.app.in_flight = 0
        service.app.waiting = 7
        assert str(await client.ask("TG.ACQUIRE", "api", "k", "TIMEOUT", "1")).startswith("TRYAGAIN busy: 7 calls")
        assert str(await client.ask("TG.RESERVE", "api", "k", "TIMEOUT", "1")).startswith("TRYAGAIN busy: 7 calls")
        service.app.waiting = 0
        service.app.stop()
        assert str(await client.ask("TG.ACQUIRE", "api", "k")).startswith("TRYAGAIN stopping")
        assert str(await client.ask("TG.RESET", "api", "k")).startswith("TRYAGAIN stopping")
        errors = service.decider.stats.errors.totals()
        assert (errors["busy"], errors["stopping"], service.app.in_flight) == (3, 2, 0)


async def test_decisions_are_counted_and_timed_as_over_http():
    async with connected(policies=POLICIES) as (service, client):
        await client.ask("TG.ACQUIRE", "api", "k")
        await client.ask_all(*[("TG.ACQUIRE", "api", "k")] * 6)
        await client.ask("TG.PEEK", "api", "k")
        await client.ask("TG.ACQUIRE", "api", "other", "TIMEOUT", "1")
        metrics = (await service.http.get("/metrics")).text
        assert 'tidegate_decisions_total{policy="api",outcome="allowed"} 6' in metrics
        assert 'tidegate_decisions_total{policy="api",outcome="denied"} 2' in metrics
        for verb in ("acquire", "batch", "peek", "acquire wait"):
            assert f'tidegate_request_seconds_count{{verb="{verb}"}} 1' in metrics
