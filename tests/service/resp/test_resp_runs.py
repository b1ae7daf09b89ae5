"""Runs over RESP: the JSON of the same requests over HTTP."""

import json

from tests.service.harness import ADMIN, DECISION
from tests.service.resp.harness import connected


async def run_command(client, command, /, **fields):
    reply = await client.ask("TG.RUN", command, json.dumps(fields))
    return reply if not isinstance(reply, str) or not reply.startswith("{") else json.loads(reply)


async def test_a_tree_over_resp():
    async with connected(policies={"api": "9/1m"}) as (_running, client):
        run = await run_command(client, "create", name="r", limits=["0.02/run unit=usd"])
        child = await run_command(client, "CHILD", token=run["token"], name="c", limits=["1/run"])
        assert (await run_command(client, "CHARGE", token=child["token"], cost={"usd": "0.01"}))["allowed"]
        denied = await run_command(client, "CHARGE", token=child["token"], cost={"usd": "0.01"})
        assert (denied["allowed"], denied["node"], denied["limit"]) == (False, "r/c", "requests-run")
        assert await run_command(client, "EXTEND", owner=child["owner"], more={"requests": 1}) == {"ok": True}
        assert (await run_command(client, "READ", id=run["id"]))["used"]["usd_micros"] == 10_000
        assert await run_command(client, "STOP", owner=run["owner"]) == {"ok": True}
        assert "run-denied" in str(await run_command(client, "CHILD", token=run["token"], name="d"))
        assert await run_command(client, "CLOSE", owner=run["owner"]) == {"ok": True}
        assert json.loads(await client.ask("TG.RUN", "LIST")) == {"runs": [{"id": run["id"], "name": "r"}]}
        assert "usage: TG.RUN" in str(await client.ask("TG.RUN", "NOPE", "{}"))
        refused = await client.ask("TG.RUN", "READ", '{"token": "tgr1.a.b"}')
        assert "bad-run-token" in str(refused)


async def test_an_id_needs_the_admin_token_over_resp():
    tokens = {"decision_token": DECISION, "admin_token": ADMIN}
    async with connected(policies={"api": "9/1m"}, **tokens) as (_running, client):
        assert "NOAUTH" in str(await run_command(client, "CREATE", name="r"))
        await client.ask("AUTH", DECISION)
        run = await run_command(client, "CREATE", name="r", limits=["1/run"])
        for name in ("READ", "STOP", "CLOSE", "EXTEND"):
            assert "NOPERM" in str(await run_command(client, name, id=run["id"]))
        assert "NOPERM" in str(await client.ask("TG.RUN", "LIST"))
        await client.ask("AUTH", ADMIN)
        assert (await run_command(client, "READ", id=run["id"]))["status"] == "open"
