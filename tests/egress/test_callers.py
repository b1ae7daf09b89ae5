"""Callers: tokens where the provider's key would be, rights, limits of their own, and who is refused."""

import asyncio
import base64
import json

import pytest

from tests.egress.harness import KEY, OTHER_TOKEN, TOKEN, raw, running
from tests.outbound.server import QuotaServer, as_json
from tidegate import ConfigError
from tidegate.egress import load_egress

CALLERS = {
    "research": {"token": TOKEN, "limits": ["3/1m"], "max_priority": 5, "connections": 2},
    "other": {"token": OTHER_TOKEN, "providers": ["elsewhere"]},
}
KEY_FIELDS = {"api_key": KEY, "key": {"header": "Authorization", "prefix": "Bearer"}}


@pytest.fixture(scope="module")
def server():
    with QuotaServer() as server:
        yield server


@pytest.fixture
def upstream(server):
    server.requests.clear()
    server.respond = lambda request: as_json({"path": request.path})
    return server


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


async def test_tokens_of_a_callers_budget_are_settled(upstream):
    upstream.respond = lambda _request: as_json({"usage": {"prompt_tokens": 12, "completion_tokens": 30}})
    callers = {"research": {"token": TOKEN, "limits": ["1_000_000/1d unit=tokens"]}}
    async with running(upstream.url, {"callers": callers}) as gateway:
        body = {"model": "m", "max_tokens": 5000, "messages": []}
        for _ in range(2):
            assert (await gateway.send("POST", "/up/v1/chat/completions", json=body, headers={"X-Api-Key": TOKEN}))[
                0
            ] == 200
        limiter = gateway.gateway.limits._limiters["research"]  # noqa: SLF001 - its usage
        assert [each.used for each in (await limiter.usage("research")).values()] == [84]
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


@pytest.mark.parametrize(
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


def test_settings_never_show_a_token(monkeypatch):
    monkeypatch.setenv("EGRESS_TOKEN", TOKEN)
    settings = load_egress({"callers": {"a": {"token": "${EGRESS_TOKEN}"}}, "metrics_token": OTHER_TOKEN})
    assert settings.callers[0].name == "a"
    assert TOKEN not in repr(settings)
    assert OTHER_TOKEN not in repr(settings)
