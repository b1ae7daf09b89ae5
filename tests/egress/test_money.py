"""Money and pools: what callers spend, ceilings of callers, and the member of a pool that sends a call."""

import json

import pytest

from tests.egress.harness import TOKEN, running, settled
from tests.outbound.server import as_json

PRICES = {"date": "2026-11-01", "models": {"m": {"input": 1, "output": 10}}}
USAGE = {"usage": {"prompt_tokens": 100, "completion_tokens": 50, "total_tokens": 150}}
CONTENT = {"model": "m", "max_tokens": 500, "messages": []}
COST = 100 * 1 + 50 * 10  # micros
OTHER = "token-of-another-9999"


@pytest.fixture
def upstream(upstream):
    upstream.respond = lambda _request: as_json(USAGE)
    return upstream


async def post(gateway, token=TOKEN):
    headers = {"Authorization": f"Bearer {token}", "X-Tidegate-Timeout": "0"}
    return await gateway.send("POST", "/up/v1/chat/completions", json=CONTENT, headers=headers)


async def test_what_a_caller_spends_is_shown(upstream):
    settings = {"callers": {"a": {"token": TOKEN}}}
    async with running(
        upstream.url, settings, profile="openai", price=PRICES, limits=["100/1m", "1/day unit=usd"]
    ) as gateway:
        for _ in range(3):
            status, headers, _ = await post(gateway)
            assert (status, "usd_micros=" in headers["X-Tidegate-Cost"]) == (200, True)
        await settled(lambda: gateway.gateway.stats.counts("a", "up").active == 0)
        assert gateway.gateway.describe()["rows"][0]["cost_micros"] == 3 * COST


async def test_a_callers_own_budget_of_money_holds(upstream):
    budget = {"token": TOKEN, "limits": ["12_000/day unit=usd_micros"]}
    settings = {"callers": {"a": budget, "b": {"token": OTHER}}}
    fields = {"profile": "openai", "price": PRICES, "limits": ["1000/1m", "1/day unit=usd"]}
    async with running(upstream.url, settings, **fields) as gateway:
        statuses = [(await post(gateway))[0] for _ in range(20)]
        allowed = statuses.count(200)
        # 5,0xx micros are reserved for a call that costs 600 in the end.
        assert statuses == [200] * allowed + [429] * (20 - allowed)
        assert 10 <= allowed <= 13
        assert (await post(gateway, OTHER))[0] == 200


async def test_each_caller_is_a_team_of_the_providers_ceilings(upstream):
    settings = {"callers": {"a": {"token": TOKEN}, "b": {"token": OTHER}}}
    spend = [{"limit": 0.006, "period": "day", "unit": "usd", "per": "team"}]
    async with running(
        upstream.url, settings, profile="openai", price=PRICES, limits=["100/1m"], spend=spend
    ) as gateway:
        statuses = [(await post(gateway))[0] for _ in range(4)]
        assert statuses[0] == 200
        assert statuses[-1] == 429
        assert (await post(gateway, OTHER))[0] == 200


async def test_a_pool_sends_with_the_member_that_has_room(upstream):
    members = [{"name": f"m{number}", "api_key": f"key-{number}", "limits": ["2/1h"]} for number in (1, 2)]
    fields = {"pool": {"members": members}, "key": {"header": "Authorization", "prefix": "Bearer"}, "limits": ["2/1h"]}
    async with running(upstream.url, {"callers": {"a": {"token": TOKEN}}}, **fields) as gateway:
        found = [await post(gateway) for _ in range(5)]
        assert [status for status, *_ in found] == [200, 200, 200, 200, 429]
        assert [headers.get("X-Tidegate-Member") for _, headers, _ in found] == ["m1", "m1", "m2", "m2", None]
        assert json.loads(found[-1][2])["status"] == 429
    keys = [request.headers["authorization"] for request in upstream.requests]
    assert keys == ["Bearer key-1", "Bearer key-1", "Bearer key-2", "Bearer key-2"]
    assert TOKEN not in str(upstream.requests)


async def test_a_member_may_have_a_url_of_its_own(upstream):
    members = [
        {"name": "here", "api_key": "key-1", "limits": ["1/1h"]},
        {"name": "there", "api_key": "key-2", "limits": ["1/1h"], "url": upstream.url + "/region"},
    ]
    fields = {"pool": {"members": members}, "key": {"header": "X-Api-Key"}, "limits": ["1/1h"]}
    async with running(upstream.url, **fields) as gateway:
        for member in ("here", "there"):
            status, headers, _ = await gateway.get("/up/v1/x?a=b", headers={"X-Api-Key": "dummy"})
            assert (status, headers["X-Tidegate-Member"]) == (200, member)
    assert [request.path for request in upstream.requests] == ["/v1/x?a=b", "/region/v1/x?a=b"]
    assert [request.headers["x-api-key"] for request in upstream.requests] == ["key-1", "key-2"]


async def test_a_model_without_a_price_is_refused_with_400_and_costs_the_caller_nothing(upstream):
    settings = {"callers": {"a": {"token": TOKEN, "limits": ["2/1h"]}}}
    fields = {"profile": "openai", "price": PRICES, "limits": ["100/1m"], "spend": ["1/day unit=usd"]}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with running(upstream.url, settings, **fields) as gateway:
        for content in ({"model": "unknown"}, {"max_tokens": 5}, {"model": "\ud800"}):
            status, _, body = await gateway.send("POST", "/up/v1/chat/completions", json=content, headers=headers)
            assert (status, json.loads(body)["error"]["type"]) == (400, "unknown-price")
        question = {"url": "/up/v1/chat/completions", "body": {"model": "unknown"}}
        status, _, body = await gateway.send("POST", "/v1/egress/estimate", json=question, headers=headers)
        assert (status, json.loads(body)["error"]["type"]) == (400, "unknown-price")
        assert not upstream.requests
        statuses = [(await post(gateway))[0] for _ in range(3)]
        assert statuses == [200, 200, 429]


async def test_the_money_of_a_shared_ceiling_is_part_of_the_reserved_cost(upstream):
    fields = {"profile": "openai", "price": PRICES, "limits": ["100/1m"], "spend": ["1/day unit=usd"]}
    async with running(upstream.url, {"callers": {"a": {"token": TOKEN}}}, **fields) as gateway:
        _, headers, _ = await post(gateway)
        assert headers["X-Tidegate-Cost"].startswith("usd_micros=50")
        question = {"url": "/up/v1/chat/completions", "body": CONTENT}
        found = await gateway.send(
            "POST", "/v1/egress/estimate", json=question, headers={"Authorization": f"Bearer {TOKEN}"}
        )
        assert json.loads(found[2])["cost"]["usd_micros"] > 500


async def test_the_images_that_a_form_asks_for_are_paid(upstream):
    form = b'--b\r\nContent-Disposition: form-data; name="n"\r\n\r\n3\r\n--b--\r\n'
    fields = {
        "profile": "openai",
        "price": {**PRICES, "default": {"kinds": {"image": 0.04}}},
        "limits": ["0.2/day unit=usd"],
    }
    fields["strict"] = True
    settings = {"callers": {"a": {"token": TOKEN}}, "max_metered_body": 1024}
    headers = {"Authorization": f"Bearer {TOKEN}", "X-Tidegate-Timeout": "0"}
    headers["Content-Type"] = "multipart/form-data; boundary=b"
    async with running(upstream.url, settings, **fields) as gateway:

        async def send(body):
            return await gateway.send("POST", "/up/v1/images/edits", data=body, headers=headers)

        status, received, _ = await send(form)
        assert (status, received["X-Tidegate-Cost"]) == (200, "usd_micros=120000")
        assert [(await send(each))[0] for each in (form, form * 20)] == [429, 413]
    assert len(upstream.requests) == 1


async def test_a_member_that_cannot_be_reached_is_replaced_by_another(upstream):
    members = [
        {"name": "gone", "api_key": "key-1", "limits": ["5/1h"], "url": "http://127.0.0.1:9"},
        {"name": "there", "api_key": "key-2", "limits": ["5/1h"]},
    ]
    fields = {"pool": {"members": members}, "key": {"header": "X-Api-Key"}, "limits": ["5/1h"]}
    async with running(upstream.url, **fields) as gateway:
        status, headers, _ = await gateway.send("POST", "/up/v1/x", data=b"not in memory")
        assert (status, headers["X-Tidegate-Member"]) == (200, "there")
        accounts = gateway.gateway.gate.accounts
        used = sorted([(await account.limiter.usage(account.key))["1h"].used for account in accounts])
        assert used == [0, 1]  # nothing was sent by the member that is gone
    assert [request.headers["x-api-key"] for request in upstream.requests] == ["key-2"]


@pytest.mark.parametrize("limits", [[], ["5_000_000/day unit=usd_micros"]], ids=["no limits", "own budget"])
async def test_a_model_without_a_price_is_refused_and_the_log_says_which(upstream, limits, caplog):
    settings = {"callers": {"a": {"token": TOKEN, "limits": limits}}}
    async with running(upstream.url, settings, profile="openai", price=PRICES, spend=["25/day unit=usd"]) as gateway:
        for path, body in (
            ("/up/v1/chat/completions", {**CONTENT, "model": "unpriced"}),
            ("/v1/egress/estimate", {"url": "/up/v1/chat/completions", "body": {**CONTENT, "model": "unpriced"}}),
        ):
            status, _, answer = await gateway.send("POST", path, json=body, headers={"X-Api-Key": TOKEN})
            assert (status, json.loads(answer)["error"]["type"]) == (400, "unknown-price")
    assert "there is no price for the model 'unpriced'" in caplog.text
    assert not upstream.requests


async def test_a_model_whose_name_cannot_be_stored_uses_the_quota_of_all_other_models(upstream):
    async with running(upstream.url, profile="openai", per=["model"], limits=["5/1m"]) as gateway:
        body = b'{"model": "\\ud800", "messages": []}'
        for path, sent in (
            ("/up/v1/chat/completions", body),
            ("/v1/egress/estimate", b'{"url": "/up/v1/chat/completions", "body": %s}' % body),
        ):
            status, _, _ = await gateway.send("POST", path, data=sent, headers={"Content-Type": "application/json"})
            assert status == 200
        assert list(gateway.gateway.gate.capacities()) == ["127.0.0.1/model=*"]
