"""Callers: tokens where the provider's key would be, rights, limits of their own, and who is refused."""

import asyncio
import base64
import json

import pytest

from tests.cases import cases
from tests.egress.harness import KEY, OTHER_TOKEN, TOKEN, raw, running, settled, used_by
from tests.outbound.flows import FailingSettlements
from tests.outbound.server import Answer, as_json
from tidegate import ConfigError
from tidegate.egress import load_egress
from tidegate.testing import ManualClock

START = 1_728_000_000
CALLERS = {
    "research": {"token": TOKEN, "limits": ["3/1m"], "max_priority": 5, "connections": 2},
    "other": {"token": OTHER_TOKEN, "providers": ["elsewhere"]},
}
KEY_FIELDS = {"api_key": KEY, "key": {"header": "Authorization", "prefix": "Bearer"}}


def basic(user, password):
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {TOKEN}"},
        {"X-Api-Key": TOKEN},
        {"Api-Key": TOKEN},
        {"X-Goog-Api-Key": TOKEN},
        {"X-Tidegate-Token": TOKEN},
        {"Proxy-Authorization": "Basic " + base64.b64encode(f"research:{TOKEN}".encode()).decode()},
        {"Proxy-Authorization": f"Bearer {TOKEN}"},
    ],
    ids="".join,
)
async def test_the_token_is_read_where_the_key_would_be_and_never_passed_on(upstream, headers):
    async with running(upstream.url, {"callers": CALLERS}, **KEY_FIELDS) as gateway:
        status, _, _ = await gateway.get("/up/x", headers=headers)
    assert status == 200
    (request,) = upstream.requests
    assert TOKEN not in str(request)
    assert request.headers["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(
    ("place", "headers", "query"),
    [
        ({"header": "Xi-Api-Key"}, {"xi-api-key": TOKEN}, ""),
        ({"header": "Authorization", "prefix": "Token"}, {"Authorization": f"Token {TOKEN}"}, ""),
        ({"header": "Authorization", "prefix": "Basic"}, {"Authorization": basic(TOKEN, "")}, ""),
        ({"header": "Authorization", "prefix": "Basic"}, {"Authorization": basic("api", TOKEN)}, ""),
        ({"query": "apikey"}, {}, f"?apikey={TOKEN}"),
    ],
    ids=["own field", "own scheme", "user", "password", "parameter"],
)
async def test_the_token_is_read_where_the_provider_file_puts_the_key(upstream, place, headers, query):
    async with running(upstream.url, {"callers": CALLERS}, api_key=KEY, key=place) as gateway:
        assert (await gateway.get(f"/up/x{query}", headers=headers))[0] == 200
    (request,) = upstream.requests
    assert KEY in str(request)
    assert TOKEN not in str(request)
    assert basic(TOKEN, "")[6:] not in str(request)


ACCOUNT_HEADERS = {"OpenAI-Organization": "org-x", "openai-project": "proj-x", "X-Goog-User-Project": "x"}


@pytest.mark.parametrize(
    "fields",
    [
        KEY_FIELDS,
        {"key": KEY_FIELDS["key"], "pool": {"members": [{"name": "a", "api_key": KEY}]}},
    ],
    ids=["key", "pool"],
)
async def test_the_account_headers_of_a_caller_are_not_sent_with_the_key_of_the_gateway(upstream, fields):
    """They would select another organization for the key, or provoke a rejection of it."""
    async with running(upstream.url, {"callers": CALLERS}, **fields) as gateway:
        headers = {"X-Tidegate-Token": TOKEN, "X-Other": "stays", **ACCOUNT_HEADERS}
        assert (await gateway.get("/up/x", headers=headers))[0] == 200
    (request,) = upstream.requests
    assert request.headers["x-other"] == "stays"
    assert not {name.lower() for name in ACCOUNT_HEADERS} & set(request.headers)


async def test_the_account_headers_of_a_caller_are_sent_with_its_own_key(upstream):
    async with running(upstream.url, {"callers": CALLERS}) as gateway:
        await gateway.get("/up/x", headers={"X-Tidegate-Token": TOKEN, **ACCOUNT_HEADERS})
    assert upstream.requests[0].headers["openai-organization"] == "org-x"


async def test_a_response_is_passed_on_even_if_it_cannot_be_settled(upstream, caplog):
    usage = {"usage": {"prompt_tokens": 5, "completion_tokens": 2}}
    upstream.respond = lambda _request: as_json(usage)
    callers = {"research": {"token": TOKEN, "limits": ["10/1m", "1000/1m unit=tokens"]}}
    fields = {"limits": ["10/1m", "1000/1m unit=tokens"], "profile": "openai", "store": FailingSettlements()}
    async with running(upstream.url, {"callers": callers}, **fields) as gateway:
        body = {"model": "m", "max_tokens": 50}
        status, _, text = await gateway.send("POST", "/up/x", json=body, headers={"X-Tidegate-Token": TOKEN})
        assert (status, json.loads(text)) == (200, usage)
        await settled(lambda: gateway.gateway.gate.metrics()["unsettled"] == 2)  # of the provider, and of the caller
    assert "up: could not settle a call" in caplog.text
    assert "caller research: could not settle a call" in caplog.text


async def test_an_input_that_is_not_reported_leaves_what_is_reserved_for_the_caller(upstream):
    upstream.respond = lambda _request: as_json({"usage": {"completion_tokens": 2}})
    callers = {"research": {"token": TOKEN, "limits": ["1000/1m unit=tokens name=tpm"]}}
    async with running(upstream.url, {"callers": callers}) as gateway:
        body = {"model": "m", "max_tokens": 50}
        await gateway.send("POST", "/up/x", json=body, headers={"X-Tidegate-Token": TOKEN})
        assert (await used_by(gateway, "research"))["tpm"] > 50


async def test_the_token_is_read_where_a_member_of_a_pool_has_its_key(upstream):
    members = [{"name": "a", "api_key": KEY, "key": {"header": "X-Own"}}]
    async with running(upstream.url, {"callers": CALLERS}, pool={"members": members}) as gateway:
        assert (await gateway.get("/up/x", headers={"X-Own": TOKEN}))[0] == 200
    assert upstream.requests[0].headers["x-own"] == KEY


@pytest.mark.parametrize("key", [{}, KEY_FIELDS], ids=["no key", "key"])
async def test_a_token_that_is_sent_in_several_places_is_removed_from_all(upstream, key):
    headers = {"Authorization": f"Bearer {TOKEN}", "X-Tidegate-Token": TOKEN, "X-Api-Key": OTHER_TOKEN}
    async with running(upstream.url, {"callers": CALLERS}, **key) as gateway:
        assert (await gateway.get(f"/up/x?key={TOKEN}&a=1", headers=headers))[0] == 200
    (request,) = upstream.requests
    assert request.path == "/x?a=1"
    assert TOKEN not in str(request)
    assert OTHER_TOKEN not in str(request)


async def test_the_token_is_read_from_the_parameter_key_and_removed(upstream):
    async with running(upstream.url, {"callers": CALLERS}) as gateway:
        assert (await gateway.get(f"/up/x?a=1&key={TOKEN}&b=2"))[0] == 200
    assert upstream.requests[0].path == "/x?a=1&b=2"


async def test_a_callers_own_key_is_passed_on_if_the_gateway_has_none(upstream):
    async with running(upstream.url, {"callers": CALLERS}) as gateway:
        headers = {"X-Tidegate-Token": TOKEN, "Authorization": "Bearer of-the-caller"}
        assert (await gateway.get("/up/x", headers=headers))[0] == 200
    assert upstream.requests[0].headers["authorization"] == "Bearer of-the-caller"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong-token-of-nobody"}, 401),
        ({"Authorization": "Basic !!"}, 401),
        ({"Proxy-Authorization": "Basic !!"}, 401),
        ({"Authorization": f"Bearer {OTHER_TOKEN}"}, 403),
    ],
)
async def test_who_has_no_right_is_refused(upstream, headers, status):
    async with running(upstream.url, {"callers": CALLERS}) as gateway:
        assert (await gateway.get("/up/x", headers=headers))[0] == status
    assert not upstream.requests


async def test_a_callers_own_limit_holds_and_a_denied_call_costs_the_provider_nothing(upstream):
    async with running(upstream.url, {"callers": CALLERS}) as gateway:
        headers = {"X-Api-Key": TOKEN, "X-Tidegate-Timeout": "0"}
        statuses = [(await gateway.get("/up/x", headers=headers))[0] for _ in range(5)]
        assert statuses == [200, 200, 200, 429, 429]
        assert gateway.gateway.gate.metrics()["sent"] == 3
        _, answer, body = await gateway.get("/up/x", headers=headers)
        assert "caller research" in json.loads(body)["detail"]
        assert 0 < int(answer["Retry-After"]) <= 60


async def test_a_call_that_the_provider_has_no_permit_for_costs_its_caller_nothing(upstream):
    async with running(upstream.url, {"callers": CALLERS}, limits=["1/1m"]) as gateway:
        headers = {"X-Api-Key": TOKEN, "X-Tidegate-Timeout": "0"}
        statuses = [(await gateway.get("/up/x", headers=headers))[0] for _ in range(6)]
        assert statuses == [200, 429, 429, 429, 429, 429]
        assert "caller" not in json.loads((await gateway.get("/up/x", headers=headers))[2])["detail"]


async def test_a_client_that_leaves_while_it_waits_costs_its_caller_nothing(upstream):
    async with running(upstream.url, {"callers": CALLERS}, limits=["1/1h"]) as gateway:
        headers = {"X-Api-Key": TOKEN}
        assert (await gateway.get("/up/x", headers=headers))[0] == 200
        call = asyncio.create_task(gateway.get("/up/x", headers=headers))
        counts = gateway.gateway.stats.counts("research", "up")
        await settled(lambda: counts.waiting == 1 and gateway.gateway.gate.metrics()["waiting"] == 1)
        assert await used_by(gateway, "research") == {"1m": 1}, "both are charged in one step"
        call.cancel()
        await settled(lambda: counts.active == 0)
        await gateway.gateway.background.finish()
        assert await used_by(gateway, "research") == {"1m": 1}
        assert counts.gone == 1


async def test_a_caller_without_permits_holds_up_no_other(upstream):
    callers = {"slow": {"token": "slow-token-0123456789", "limits": ["1/1h"]}, "research": {"token": TOKEN}}
    clock = ManualClock(start=START)
    async with running(upstream.url, {"callers": callers}, clock=clock, limits=["3/1h"]) as gateway:
        slow = {"X-Api-Key": "slow-token-0123456789"}
        assert (await gateway.get("/up/x", headers=slow))[0] == 200
        call = asyncio.create_task(gateway.get("/up/x", headers=slow | {"X-Tidegate-Timeout": "20"}))
        counts = gateway.gateway.stats.counts("slow", "up")
        await settled(lambda: counts.waiting == 1)
        assert (await gateway.get("/up/x", headers={"X-Api-Key": TOKEN}))[0] == 200
        clock.advance(21)
        status, _, body = await call
        assert (status, b"caller slow: rate limit reached" in body) == (429, True)


async def test_a_request_that_is_sent_again_costs_its_caller_one(upstream):
    answers = iter([Answer(429, (("Retry-After", "1"),), (b"",)), as_json({"ok": 1})])
    upstream.respond = lambda _request: next(answers)
    clock = ManualClock(start=START)
    async with running(upstream.url, {"callers": CALLERS}, clock=clock, limits=["100/1h"], retries=3) as gateway:
        call = asyncio.create_task(gateway.get("/up/x", headers={"X-Api-Key": TOKEN}))
        while not call.done():
            clock.advance(0.5)
            await asyncio.sleep(0.005)
        assert ((await call)[0], len(upstream.requests)) == (200, 2)
        assert await used_by(gateway, "research") == {"1m": 1}


async def test_a_provider_that_cannot_be_reached_costs_its_caller_nothing():
    limits = ["3/1m", "1000/1m unit=input-tokens name=in", "1000/1m unit=tokens name=all"]
    callers = {"research": {"token": TOKEN, "limits": limits}}
    async with running("http://127.0.0.1:9", {"callers": callers}) as gateway:
        body = {"model": "m", "max_tokens": 50, "messages": []}
        status, _, _ = await gateway.send("POST", "/up/x", json=body, headers={"X-Api-Key": TOKEN})
        assert status == 502
        assert await used_by(gateway, "research") == {"1m": 0, "in": 0, "all": 0}


async def test_an_estimate_includes_the_callers_own_limits(upstream):
    async with running(upstream.url, {"callers": CALLERS}) as gateway:
        headers = {"X-Api-Key": TOKEN}

        async def estimate():
            _, _, body = await gateway.send("POST", "/v1/egress/estimate", json={"url": "/up/x"}, headers=headers)
            return json.loads(body)

        before = await estimate()
        assert (before["allowed"], before["wait"], before["caller_remaining"]) == (True, 0, {"1m": 2})
        for _ in range(3):
            assert (await gateway.get("/up/x", headers=headers))[0] == 200
        after = await estimate()
        assert (after["allowed"], after["caller_remaining"]) == (False, {"1m": 0})
        assert 0 < after["wait"] <= 60


async def test_tokens_of_a_callers_budget_are_settled(upstream):
    upstream.respond = lambda _request: as_json({"usage": {"prompt_tokens": 12, "completion_tokens": 30}})
    callers = {"research": {"token": TOKEN, "limits": ["1_000_000/1d unit=tokens"]}}
    async with running(upstream.url, {"callers": callers}) as gateway:
        body = {"model": "m", "max_tokens": 5000, "messages": []}
        for _ in range(2):
            assert (await gateway.send("POST", "/up/v1/chat/completions", json=body, headers={"X-Api-Key": TOKEN}))[
                0
            ] == 200
        assert [*(await used_by(gateway, "research")).values()] == [84]
        (row,) = gateway.gateway.describe()["rows"]
        assert (row["caller"], row["input_tokens"], row["output_tokens"]) == ("research", 24, 60)


# ---- without callers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost"}, 200),
        ({"Host": "127.0.0.1:8090"}, 200),
        ({"Host": "[::1]:8090"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost.evil.example:80"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "none"}, 200),
    ],
)
async def test_pages_of_other_sites_and_foreign_hosts_are_refused(upstream, headers, status):
    async with running(upstream.url) as gateway:
        assert (await gateway.get("/up/x", headers=headers))[0] == status
    assert len(upstream.requests) == (status == 200)


async def test_more_requests_at_once_than_a_caller_may_have_are_refused(upstream):
    async with running(upstream.url, {"callers": CALLERS}, limits=["1/1h"]) as gateway:
        headers = {"X-Api-Key": TOKEN}
        await gateway.get("/up/x", headers=headers)
        waiting = [asyncio.create_task(gateway.get("/up/x", headers=headers)) for _ in range(2)]
        while gateway.gateway.stats.counts("research", "up").waiting < 2:
            await asyncio.sleep(0.005)
        status, answer, body = await gateway.get("/up/x", headers=headers)
        assert (status, json.loads(body)["error"]["type"]) == (429, "too-many-connections")
        assert answer["Retry-After"] == "1"
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        while gateway.gateway.stats.counts("research", "up").active:
            await asyncio.sleep(0.005)
        assert gateway.gateway.stats.counts("research", "up").gone == 2


async def test_forward_mode_asks_for_the_token_as_a_proxy_does(upstream):
    async with running(upstream.url, {"callers": CALLERS}) as gateway:
        request = f"GET {upstream.url}/x HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
        answer = await raw(gateway.port, request.encode())
        assert answer.startswith(b"HTTP/1.1 407 ")
        assert b"Proxy-Authenticate: Basic" in answer


# ---- settings --------------------------------------------------------------------------------------------------------


@cases(
    ("settings", "message"),
    [
        ({"listen": "0.0.0.0:8090"}, "reachable from other machines: set callers"),
        ({"callers": {"a": {"token": "short"}}}, "callers.a.token: expected at least 16 printable"),
        ({"callers": {"a": {}}}, "callers.a: needs either a token or a token_file"),
        ({"callers": {"a": {"token": TOKEN}, "b": {"token": TOKEN}}}, "callers.b: has the token of a"),
        ({"callers": {"a b": {"token": TOKEN}}}, "expected a name of letters"),
        ({"callers": {"a": {"token": TOKEN, "limit": "1/1m"}}}, "did you mean 'limits'"),
        (
            {"callers": {"a": {"token": "${NO_SUCH_VARIABLE_1}"}}},
            "the environment variable NO_SUCH_VARIABLE_1 is not set",
        ),
        ({"upstreams": {"up": "ftp://x"}}, "upstreams.up: expected a URL such as"),
        ({"upstreams": {"up": "https://u:p@x"}}, "upstreams.up: expected a URL such as"),
        ({"allow_private": ["a b"]}, "expected a host such as"),
        ({"tunnels": "maybe"}, "tunnels: expected allow or refuse"),
        ({"tunnel": "allow"}, "did you mean 'tunnels'"),
    ],
)
def test_wrong_settings_are_refused_with_their_place(settings, message):
    with pytest.raises(ConfigError) as caught:
        load_egress(settings)
    assert message in str(caught.value)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("value", [0, -1, "soon", ["5s"], True])
def test_what_is_no_duration_is_refused(value):
    with pytest.raises(ConfigError, match="timeout: expected a duration such as"):
        load_egress({"timeout": value})


def test_settings_never_show_a_token(monkeypatch):
    monkeypatch.setenv("EGRESS_TOKEN", TOKEN)
    settings = load_egress({"callers": {"a": {"token": "${EGRESS_TOKEN}"}}, "metrics_token": OTHER_TOKEN})
    assert settings.callers[0].name == "a"
    assert TOKEN not in repr(settings)
    assert OTHER_TOKEN not in repr(settings)
