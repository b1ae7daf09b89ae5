"""`/v1/check`, the endpoint for proxies."""

import json

import httpx
import pytest

from tests.cases import cases
from tests.service.harness import ADMIN, DECISION, InProcessService
from tests.service.http_harness import POLICIES, K, problem


@pytest.fixture
async def service():
    async with InProcessService(policies=POLICIES, max_body=2048, max_concurrency=2) as service:
        yield service


async def test_check_returns_a_status_and_header_fields(service):
    path = "/v1/check?policy=api&key=203.0.113.9"
    answers = [await service.http.get(path) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining"] for answer in answers] == ["1", "0", "0"]
    assert answers[2].headers["retry-after"] == "60"
    assert answers[2].json()["violated-policies"] == ["1m"]
    denied = await service.http.get(f"{path}&deny=403")
    assert (denied.status_code, denied.json()["status"]) == (403, 403)
    assert (await service.http.request("DELETE", path)).status_code == 429  # a proxy asks with its client's method


async def test_check_reads_the_key_from_a_header_field(service):
    path = "/v1/check?policy=api&key=v1&key_header=X-Api-Key"
    for key, statuses in (("a", [200, 200, 429]), ("b", [200])):
        assert [(await service.http.get(path, headers={"x-api-key": key})).status_code for _ in statuses] == statuses
    assert problem(await service.http.get(path))[0] == "bad-request"  # clients must not share an empty key
    usage = (await service.post("usage", {"policy": "api", "key": ["v1", "a"]})).json()["limits"]
    assert usage[0]["used"] == 2
    forwarded = {"x-forwarded-for": "6.6.6.6, 203.0.113.1"}
    path = "/v1/check?policy=api&key_header=x-forwarded-for"
    assert (await service.http.get(path, headers=forwarded)).status_code == 200
    assert (await service.post("usage", {"policy": "api", "key": "203.0.113.1"})).json()["limits"][0]["used"] == 1


@cases(
    ("fields", "status"),
    [
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site", "origin": "http://localhost:9000"}, 403),  # another port is another program
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:8080", "sec-fetch-site": "cross-site"}, 403),
        ({"origin": "http://127.0.0.1:8080", "sec-fetch-site": "same-origin"}, 200),
        ({"origin": "http://127.0.0.1:8080"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({}, 200),
    ],
)
@cases("method", ["GET", "HEAD", "POST", "OPTIONS"])
async def test_check_refuses_pages_of_other_sites_without_a_token(method, fields, status):
    path = "/v1/check?policy=api&key=k"
    for tokens, expected in (({}, status), ({"admin_token": ADMIN}, status), ({"decision_token": DECISION}, 200)):
        async with InProcessService(policies=POLICIES, **tokens) as service:
            sent = {**fields, **({"x-tidegate-token": DECISION} if "decision_token" in tokens else {})}
            assert (await service.http.request(method, path, headers=sent)).status_code == expected
            assert service.decider.stats.count("api").allowed == (expected == 200)


@pytest.mark.parametrize("verb", ["acquire", "peek", "reserve", "batch", "block", "reset", "usage"])
async def test_every_verb_refuses_pages_of_other_sites_without_a_token(verb):
    """A page of another site cannot even send JSON through a proxy that answers its preflight."""
    page, own = {"origin": "https://evil.example"}, {"origin": "http://127.0.0.1:8080"}
    async with InProcessService(policies=POLICIES) as service:
        assert problem(await service.post(verb, K, headers=page))[0] == "forbidden"
        assert (await service.post(verb, K, headers=own)).status_code != 403
        assert problem(await service.http.get("/v1/overview", headers=page))[0] == "forbidden"
    async with InProcessService(policies=POLICIES, decision_token=DECISION, admin_token=ADMIN) as service:
        allowed = await service.post(verb, K, headers={**page, "x-tidegate-token": ADMIN})
        assert allowed.status_code != 403


async def test_a_page_cannot_send_json_without_a_preflight(service):
    """A request without a preflight is refused by its content type, and the preflight is refused, too."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        reply = await service.http.post("/v1/acquire", content=json.dumps(K), headers={"content-type": kind})
        assert problem(reply)[0] == "unsupported-type"
    reply = await service.http.options("/v1/acquire", headers={"origin": "https://evil.example"})
    assert reply.status_code == 405
    assert not [name for name in reply.headers if name.startswith("access-control")]
    assert (await service.post("usage", K)).json()["limits"][0]["used"] == 0


@cases("query", [
     "", "policy=api", "key=a", "policy=api&key=", "policy=api&key=a&policy=many", "policy=api&key=a&colour=red",
     "policy=api&key=a&cost=-1", "policy=api&key=a&cost=x", "policy=api&key=a&deny=200",
     "policy=api&key=a&deny=403&deny=429", "policy=api&key=a&cost=1&cost=0",
     "%ff", "policy=api&key=a&&", "policy=api;key=a", "policy=api&key=%ff", "policy=api&key=a%fe"])  # fmt: skip
async def test_an_invalid_query_is_refused(service, query):
    assert (await service.http.get(httpx.URL("http://127.0.0.1/v1/check", query=query.encode()))).status_code == 400
    assert service.decider.stats.totals().counts == {}
