"""Runs at the gateway: a request with a token is charged to its node; each sentence of SECURITY.md has an attack."""

import asyncio
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.egress.harness import KEY, TOKEN, running, settled
from tests.outbound.server import as_json
from tidegate import ConfigError
from tidegate.agents import AsyncRun
from tidegate.egress import _run_tokens as run_tokens
from tidegate.egress import load_egress
from tidegate.egress._tracing import Tracing

PRICES = {"date": "2026-11-01", "models": {"m": {"input": 1, "output": 10}}}
USAGE = {"usage": {"prompt_tokens": 100, "completion_tokens": 50, "total_tokens": 150}}
CONTENT = {"model": "m", "max_tokens": 500, "messages": []}
COST = 100 * 1 + 50 * 10  # micros
FIELDS = {
    "api_key": KEY,
    "key": {"header": "Authorization", "prefix": "Bearer"},
    "profile": "openai",
    "price": PRICES,
    "limits": ["1000/1m"],
}
CALLERS = {"callers": {"a": {"token": TOKEN}, "agents": {"runs": True, "limits": ["5/1m"]}}}


@pytest.fixture
def upstream(upstream):
    upstream.respond = lambda _request: as_json(USAGE)
    return upstream


async def post(gateway, **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    status, _, text = await gateway.send("POST", "/up/v1/chat/completions", json=CONTENT, headers=headers)
    return status, json.loads(text)


async def new_run(gateway, *limits, **options):
    return await AsyncRun("research", store=gateway.gateway.gate.store, limits=limits, **options)


@pytest.mark.parametrize("place", ["X-Tidegate-Run", "Authorization", "X-Api-Key", "X-Tidegate-Token", "query"])
async def test_a_call_is_charged_to_its_node_before_it_is_sent_and_settled_to_its_usage(upstream, place):
    async with running(upstream.url, **FIELDS) as gateway:
        run = await new_run(gateway, "0.012/run unit=usd")
        child = await run.child("planner", limits=["2/run"])
        token = await child.token()
        path, headers = "/up/v1/chat/completions", {}
        if place == "query":
            path += f"?key={token}"
        else:
            headers = {place: f"Bearer {token}" if place == "Authorization" else token}
        for _ in range(2):
            assert (await gateway.send("POST", path, json=CONTENT, headers=headers))[0] == 200
        await settled(lambda: gateway.gateway.stats.counts("local", "up").active == 0)
        usage = await run.usage()
        assert usage.used == {"usd_micros": 2 * COST, "requests": 2}
        status, sent, text = await gateway.send("POST", path, json=CONTENT, headers=headers)
        body = json.loads(text)
        assert status == 429
        assert sent["X-Should-Retry"] == "false"
        assert "requests-run has 0 of 2 requests left" in str(body)
        assert body["run"] == {
            "node": "research/planner",
            "limit": "requests-run",
            "needed": 1,
            "left": {"research/planner": {"requests-run": 0}, "research": {"usd_micros-run": 12_000 - 2 * COST}},
        }
    assert len(upstream.requests) == 2
    for request in upstream.requests:
        assert token not in str(request)
        assert "tgr1" not in str(request)
        assert request.headers["authorization"] == f"Bearer {KEY}"


async def test_a_budget_stops_the_next_call(upstream):
    async with running(upstream.url, **FIELDS) as gateway:
        run = await new_run(gateway, "0.0062/run unit=usd")
        token = await run.token()
        statuses = [(await post(gateway, X_Tidegate_Run=token))[0] for _ in range(4)]
        assert statuses == [200, 200, 429, 429], "5,0xx micros are reserved for a call that costs 600"
        assert (await run.usage()).used["usd_micros"] == 2 * COST
        await run.extend({"usd": "0.01"})
        assert (await post(gateway, X_Tidegate_Run=token))[0] == 200
        await run.stop()
        status, body = await post(gateway, X_Tidegate_Run=token)
        assert (status, body["run"]["limit"]) == (429, "stopped")
        assert (await post(gateway))[0] == 200, "without a run, nothing of it applies"


async def test_the_token_is_that_of_the_caller_of_runs(upstream):
    async with running(upstream.url, CALLERS, **FIELDS) as gateway:
        token = await (await new_run(gateway, "9/run")).token()
        assert (await post(gateway, Authorization=f"Bearer {token}"))[0] == 200
        assert [row["caller"] for row in gateway.gateway.describe()["rows"]] == ["agents"]
        found = [await post(gateway, Authorization=f"Bearer {token}") for _ in range(5)]
        assert [status for status, _ in found] == [200] * 4 + [429], "its own limits hold, too"
        assert "caller agents" in str(found[-1][1])
        assert (await post(gateway, Authorization=f"Bearer {TOKEN}", X_Tidegate_Run=token))[0] == 200
        assert {row["caller"] for row in gateway.gateway.describe()["rows"]} == {"agents", "a"}


# ---- attacks ---------------------------------------------------------------------------------------------------------


async def test_the_field_never_replaces_the_authentication_of_the_caller(upstream):
    async with running(upstream.url, CALLERS, **FIELDS) as gateway:
        token = await (await new_run(gateway, "9/run")).token()
        assert (await post(gateway, X_Tidegate_Run=token))[0] == 401
        assert (await post(gateway, X_Tidegate_Run=token, Authorization="Bearer wrong"))[0] == 401
    only = {"callers": {"a": {"token": TOKEN}}}
    async with running(upstream.url, only, **FIELDS) as gateway:
        token = await (await new_run(gateway, "9/run")).token()
        assert (await post(gateway, Authorization=f"Bearer {token}"))[0] == 401, "no caller has runs: true"
    assert not upstream.requests


@pytest.mark.parametrize("change", ["changed", "of another store", "key of the creator", "nonsense", "unknown run"])
async def test_a_token_that_is_not_valid_is_refused_and_nothing_is_sent(upstream, change):
    async with running(upstream.url, CALLERS, **FIELDS) as gateway:
        run = await new_run(gateway, "9/run")
        token = await run.token()
        if change == "changed":
            token = token[:-4] + "AAAA"
        elif change == "of another store":
            token = await (await AsyncRun("r", store="memory://", limits="9/run")).token()
        elif change == "key of the creator":
            token = await run.owner_key()
        elif change == "nonsense":
            token = "tgr1.a.b"  # noqa: S105 - of a test
        else:
            gateway.gateway.gate.store.delete_value(run._node().collection, run.id)  # noqa: SLF001 - as an eviction would
        for headers in ({"Authorization": f"Bearer {token}"}, {"X-Tidegate-Token": TOKEN, "X-Tidegate-Run": token}):
            status, body = await post(gateway, **headers)
            assert status in (401, 429)
            assert token not in str(body)
    assert not upstream.requests


async def test_the_token_is_never_logged_shown_or_traced(upstream, caplog, tmp_path):
    log = tmp_path / "access.log"
    spans = []

    class Recorder:
        def start_span(self, name, _context, _kind, attributes):
            spans.append((name, attributes))
            return self

        def __getattr__(self, _name):
            return lambda *parts, **_: spans.append(parts)

    async with running(upstream.url, {**CALLERS, "access_log": str(log)}, **FIELDS) as gateway:
        tracing = Tracing.__new__(Tracing)
        tracing._tracer = Recorder()  # noqa: SLF001 - records all attributes
        run = await new_run(gateway, "1/run")
        token = await run.token()
        for headers in ({"X_Tidegate_Run": token, "Authorization": f"Bearer {TOKEN}"}, {"Authorization": token}):
            _status, sent, text = await gateway.send(
                "POST",
                f"/up/v1/chat/completions?key={token}",
                json=CONTENT,
                headers={name.replace("_", "-"): value for name, value in headers.items()},
            )
            assert token not in str(sent) + text.decode()
        await settled(lambda: log.read_text().count("\n") == 2)
        shown = json.dumps(gateway.gateway.describe()) + str(gateway.gateway.families())
    for text in (log.read_text(), caplog.text, str(spans), shown, str(upstream.requests)):
        assert token not in text
        assert "tgr1" not in text


async def test_a_stolen_token_spends_at_most_what_its_node_has_left(upstream):
    async with running(upstream.url, **FIELDS) as gateway:
        run = await new_run(gateway, "20/run")
        child = await run.child("c", limits=["6/run"])
        token = await child.token()
        statuses = await asyncio.gather(*(post(gateway, X_Tidegate_Run=token) for _ in range(30)))
        assert [status for status, _ in statuses].count(200) == 6
        assert (await run.usage()).used["requests"] == 6


async def test_tunnels_and_websockets_are_refused_because_nothing_in_them_is_charged(upstream):
    async with running(upstream.url, {"tunnels": "allow"}, **FIELDS) as gateway:
        token = await (await new_run(gateway, "9/run")).token()
        headers = {"Connection": "Upgrade", "Upgrade": "websocket", "X-Tidegate-Run": token}
        assert (await gateway.get("/up/x", headers=headers))[0] == 403


def test_a_caller_of_runs_needs_no_token_and_there_is_one():
    assert load_egress(CALLERS).callers[1].runs
    with pytest.raises(ConfigError, match="only one caller may have runs"):
        load_egress({"callers": {"a": {"runs": True}, "b": {"runs": True}}})
    with pytest.raises(ConfigError, match="needs either a token or a token_file"):
        load_egress({"callers": {"a": {"runs": False}}})


# ---- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [True, False])
async def test_a_stop_ends_streams_if_asked(monkeypatch, ends):
    monkeypatch.setattr(run_tokens, "STOP_CHECK", 0.01)
    more, sent = asyncio.Event(), []

    async def stream(request):
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        sent.append("began")
        await more.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/{path:.*}", stream)
    async with TestServer(app) as provider, running(str(provider.make_url("/")), **FIELDS) as gateway:
        run = await new_run(gateway, "1/run unit=usd")
        child = await run.child("c")
        headers = {"X-Tidegate-Run": await child.token()}
        url = f"{gateway.url}/up/v1/chat/completions"
        async with gateway.client.post(url, json={**CONTENT, "stream": True}, headers=headers) as response:
            assert await response.content.readany()
            await run.stop(end_streams=ends)
            if ends:
                with pytest.raises(Exception, match=r"(?i)payload|closed|disconnect"):
                    await response.content.read()
            else:
                await asyncio.sleep(0.05)  # several checks
                more.set()
                assert b"DONE" in await response.content.read()
        more.set()
        await settled(lambda: gateway.gateway.stats.counts("local", "up").active == 0)
        assert (await run.usage()).used["requests"] == 1


@pytest.mark.parametrize("place", ["query", "unknown parameter", "tab", "cookie", "unknown field"])
async def test_the_token_is_never_sent_wherever_it_was_put(upstream, place):
    async with running(upstream.url, **FIELDS) as gateway:
        token = await (await new_run(gateway, "9/run")).token()
        path, headers = "/up/v1/chat/completions", {"X-Tidegate-Run": token}
        if place == "query":
            path, headers = f"{path}?key=%20{token}", {}
        elif place == "unknown parameter":
            path += f"?a=1&note=x{token}"
        elif place == "tab":
            headers = {"Authorization": f"Bearer\t{token}"}
        else:
            headers |= {"Cookie": f"t={token}"} if place == "cookie" else {"X-Note": f"run {token}"}
        assert (await gateway.send("POST", path, json=CONTENT, headers=headers))[0] == 200
        (request,) = upstream.requests
        assert token not in str(request)
        assert "a=1" in str(request) or place != "unknown parameter"


async def test_a_token_without_the_right_to_charge_is_refused_with_403(upstream):
    async with running(upstream.url, **FIELDS) as gateway:
        token = await (await new_run(gateway, "9/run")).token(rights=("read",))
        status, body = await post(gateway, X_Tidegate_Run=token)
        assert (status, body["error"]["type"]) == (403, "run-right")
    assert not upstream.requests
