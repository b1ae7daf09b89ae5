"""The table of verbs: a new verb is one entry and one function, and errors name the field, the value and its type."""

import inspect
import json

import httpx
import pytest

from tests.cases import cases
from tests.service.harness import InProcessService
from tidegate import ConfigError, ResourceUnknown, StoreUnavailable
from tidegate.service import client as client_module
from tidegate.service._api.requests import CostRequest, SubjectRequest
from tidegate.service._api.responses import VerbResponse
from tidegate.service._api.verbs import PEEK, RELEASE, USAGE, VERBS, ServiceVerb
from tidegate.service._http.verbs import Verbs
from tidegate.service.client import AsyncClient
from tidegate.service.client._protocol import read_response, verb_request
from tidegate.service.client._reservation import ServiceReserving
from tidegate.stores import MemoryStore

POLICIES = {"api": "2/1m fixed_window", "many": "1000/1m"}
K = {"policy": "api", "key": "k"}
MAX = 2**53 - 1


class ShoutRequest(SubjectRequest):
    """A request that only this test has."""

    times: int = 1


class ShoutResponse(VerbResponse):
    """A response that only this test has."""

    text: str


SHOUT = ServiceVerb("shout", "Return the key in upper case.", ShoutRequest, ShoutResponse, idempotent=True)


async def shout(_verbs, request, _call=None):
    return ShoutResponse(str(request.subject.key).upper() * request.times)


async def test_a_new_verb_is_one_entry_and_one_function(monkeypatch):
    monkeypatch.setitem(VERBS, "shout", SHOUT)
    monkeypatch.setattr(Verbs, "shout", shout, raising=False)
    async with InProcessService(policies=POLICIES) as service:
        response = await service.post("shout", {**K, "times": 2}, headers={"idempotency-key": "1"})
        assert (response.status_code, response.json()) == (200, {"text": "KK"})
        assert (await service.post("shout", {**K, "tims": 2})).json()[
            "detail"
        ] == "unknown field: did you mean 'times'?"
        assert "shout" in service.decider.stats.latency
        described = (await service.http.get("/openapi.json")).json()
        operation = described["paths"]["/v1/shout"]["post"]
        assert operation["summary"] == SHOUT.summary
        assert [each["name"] for each in operation["parameters"]] == ["Idempotency-Key"]
        schema = described["components"]["schemas"]["ShoutRequest"]["oneOf"][0]
        assert (schema["required"], schema["properties"]["times"]["type"]) == (["policy", "key"], "integer")
        assert described["components"]["schemas"]["ShoutResponse"]["required"] == ["text"]
        client = AsyncClient("http://127.0.0.1:8080")
        await client.close()
        client._http = service.http  # noqa: SLF001 - calls the app without a socket
        assert (await client.call(SHOUT, ShoutRequest(policy="api", key="hey"))).text == "HEY"


@cases(("verb", "body", "pointer", "detail"), [
        ("acquire", 5, None, "expected an object, not an integer"),
        ("acquire", {}, "/policy", "missing: expected policy and key, or domain and descriptor, or provider"),
        ("acquire", {"key": "k"}, "/policy", "missing: expected policy and key, or domain and descriptor, or provider"),
        ("acquire", {"domain": "e"}, "/descriptor",
         "missing: expected policy and key, or domain and descriptor, or provider"),
        ("acquire", {**K, "domain": "e"}, "/domain",
         "cannot be combined with policy: expected policy and key, or domain and descriptor, or provider"),
        ("acquire", {**K, "policy": ""}, "/policy", "expected a non-empty string, not an empty string"),
        ("acquire", {**K, "policy": None}, "/policy", "expected a non-empty string, not null"),
        ("acquire", {**K, "key": ["a", 5]}, "/key",
         "expected a string of up to 1024 characters, or an array of 1 to 32 strings, not an array with an integer"),
        ("acquire", {**K, "key": []}, "/key",
         "expected a string of up to 1024 characters, or an array of 1 to 32 strings, not an empty array"),
        ("acquire", {**K, "key": "k" * 1025}, "/key",
         "expected a string of up to 1024 characters, or an array of 1 to 32 strings, not a string of 1025 characters"),
        ("acquire", {"domain": "e", "descriptor": [["a"]]}, "/descriptor",
         'expected an array of 1 to 32 pairs such as [["path", "/login"]], not an array with an array'),
        ("acquire", {**K, "cost": 1.5}, "/cost",
         f'expected an integer from 0 to {MAX}, or an object such as {{"tokens": 100}}, not 1.5'),
        ("acquire", {**K, "cost": True}, "/cost",
         f'expected an integer from 0 to {MAX}, or an object such as {{"tokens": 100}}, not a boolean'),
        ("acquire", {**K, "cost": {"a": 1, "b": -1}}, "/cost",
         f'expected an integer from 0 to {MAX}, or an object such as {{"tokens": 100}}, not an object with -1'),
        ("acquire", {**K, "timeout": "long"}, "/timeout", "expected a number, not a string"),
        ("acquire", {**K, "timeout": {}}, "/timeout", "expected a number, not an object"),
        ("acquire", {**K, "timeout": {"a": 1}}, "/timeout", "expected a number, not an object"),
        ("acquire", {**K, "timeout": 10**400}, "/timeout", f"expected a number, not 1{'0' * 49}"),
        ("reserve", {**K, "ttl": 0}, "/ttl", "expected a number above 0 and at most 86400, not 0"),
        ("lease", {**K, "max_permits": 0}, "/max_permits", "expected an integer from 1 to 100000, not 0"),
        ("commit", {}, "/id", "expected a non-empty string, but the field is missing"),
        ("commit", {"id": "x", "cost": "y"}, "/cost",
         f'expected an integer from 0 to {MAX}, or an object such as {{"tokens": 100}}, or null, not a string'),
        ("batch", {}, "/asks", "missing: expected asks, or policy and keys"),
        ("batch", {"policy": "api"}, "/keys", "missing: expected asks, or policy and keys"),
        ("batch", {"asks": []}, "/asks", "expected an array of 1 to 1000 objects, not an empty array"),
        ("batch", {"policy": "api", "keys": ["k"] * 1001}, "/keys",
         "expected an array of 1 to 1000 items, not an array of 1001 items"),
        ("batch", {"asks": [K, {**K, "costs": 1}]}, "/asks/1/costs", "unknown field: did you mean 'cost'?"),
        ("batch", {"asks": [K, 5]}, "/asks/1", "expected an object, not an integer"),
        ("batch", {"asks": [K, {"policy": "api"}]}, "/asks/1/key",
         "missing: expected policy and key, or domain and descriptor"),
        ("release", {**K, "cost": -1}, "/cost",
         f'expected an integer from 0 to {MAX}, or an object such as {{"tokens": 100}}, not -1'),
    ])  # fmt: skip
async def test_an_error_names_the_field_what_was_given_and_what_is_expected(verb, body, pointer, detail):
    async with InProcessService(policies=POLICIES) as service:
        found = (await service.post(verb, body)).json()
        assert (found.get("pointer"), found["detail"]) == (pointer, detail)


@pytest.mark.parametrize(
    ("body", "used"),
    [
        (b'{"policy":"many","key":"k","cost":3.0}', 3),  # JSON has only one number type
        (b'{"policy":"many","key":"k","cost":{"requests":3.0}}', 3),
        (b'{"policy":"many","key":"k","timeout":1e999}', 1),
        (b'{"policy":"many","key":"k","timeout":-5}', 1),
        (b'{"policy":"other","policy":"many","key":"k"}', 1),
        (b' {"policy" : "m\\u0061ny", "key":["k"]} ', 1),
    ],
)
async def test_unusual_json_is_accepted(body, used):
    async with InProcessService(policies=POLICIES) as service:
        response = await service.http.post("/v1/acquire", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 200
        usage = (await service.post("usage", {"policy": "many", "key": "k"})).json()["limits"]
        assert usage[0]["used"] == used


class SlowStore(MemoryStore):
    """A store in memory that has no fast path."""

    instant = False


@pytest.mark.parametrize("store", [MemoryStore, SlowStore])
async def test_an_invalid_ask_has_its_place_as_its_pointer(store):
    async with InProcessService(store=store(), policies=POLICIES) as service:
        asks = [K, {**K, "key": "x" * 1025}, {**K, "cost": {"usd": 1}}, {**K, "policy": "nope"}]
        answers = (await service.post("batch", {"asks": asks})).json()["answers"]
        assert [answer["error"].get("pointer") for answer in answers[1:]] == ["/asks/1/key", "/asks/2/cost", None]
        answers = (await service.post("batch", {"asks": asks[:2]})).json()["answers"]
        assert answers[1]["error"]["pointer"] == "/asks/1/key"


@pytest.mark.parametrize("store", [MemoryStore, SlowStore])
async def test_an_invalid_key_of_a_batch_does_not_affect_the_others(store):
    async with InProcessService(store=store(), policies=POLICIES) as service:
        body = rb'{"policy":"many","keys":["a","\ud800",5,["b","c"],[],"' + b"x" * 1025 + b'"]}'
        response = await service.http.post("/v1/batch", content=body, headers={"content-type": "application/json"})
        answers = response.json()["answers"]
        assert [answer.get("allowed") for answer in answers] == [True, None, None, True, None, None]
        assert [answer["error"]["pointer"] for answer in answers if "error" in answer] == [
            "/keys/1", "/keys/2", "/keys/4", "/keys/5",
        ]  # fmt: skip


@cases(
    ("verb", "body", "pointer"),
    [
        ("acquire", rb'{"policy":"many","key":"k","\ud800":1}', "/\\ud800"),
        ("batch", rb'{"asks":[{"policy":"many","key":"k","\ud800":1}]}', "/asks/0/\\ud800"),
        ("acquire", rb'{"policy":"many","key":"k","cost":{"\ud800":-1}}', "/cost"),
        ("acquire", rb'{"policy":"many","key":"k","cost":{"\ud800":1}}', "/cost"),
        ("commit", rb'{"id":"\ud800"}', None),
        ("acquire", rb'{"policy":"\ud800","key":"k"}', None),
        ("batch", b'{"policy":"many","keys":[' + b"[" * 900 + b"]" * 900 + b"]}", None),
        ("batch", b'{"policy":"many","keys":' + b"[" * 900 + b"]" * 900 + b"}", None),
        ("acquire", b'{"policy":"many","key":' + b"[" * 900 + b"]" * 900 + b"}", "/key"),
    ],
)
async def test_lone_surrogates_and_deep_nesting_are_no_failure_of_the_service(verb, body, pointer):
    async with InProcessService(policies=POLICIES) as service:
        response = await service.http.post(f"/v1/{verb}", content=body, headers={"content-type": "application/json"})
        assert response.status_code < 500
        assert response.json().get("pointer") == pointer


# ---- the clients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "error", "message"),
    [
        (200, b"<html>", StoreUnavailable, "status 200 and a body that is not JSON"),
        (200, b"\xff", StoreUnavailable, "status 200 and a body that is not JSON"),
        (200, b'{"hello": "world"}', StoreUnavailable, "not a tidegate service: .* status 200 and an unexpected body"),
        (200, b"[]", StoreUnavailable, "status 200 and an unexpected body"),
        (502, b"<html>", StoreUnavailable, "status 502 and a body that is not JSON"),
        (502, b"{}", StoreUnavailable, "^status 502$"),
        (404, b'{"detail": "Not Found"}', ResourceUnknown, "status 404"),
    ],
)
def test_a_response_of_another_server(status, body, error, message):
    with pytest.raises(error, match=message):
        read_response(httpx.Response(status, content=body), PEEK.decode_response)


def test_a_client_ignores_new_fields_of_a_response():
    limit = {"name": "1m", "quota": 2, "used": 1, "remaining": 1, "reset_after": 1, "unit": "requests", "new": 1}
    body = json.dumps({"limits": [limit], "new": {}}).encode()
    assert read_response(httpx.Response(200, content=body), USAGE.decode_response).limits[0].used == 1


def test_the_error_of_a_client_names_the_field():
    problem = {"type": "x", "title": "x", "status": 422, "detail": "expected x", "pointer": "/asks/1/key"}
    body = json.dumps(problem).encode()
    with pytest.raises(ConfigError, match=r"^asks\.1\.key: expected x$") as caught:
        read_response(httpx.Response(422, content=body), PEEK.decode_response)
    assert caught.value.field == "asks.1.key"


@pytest.mark.parametrize("kind", [*(getattr(client_module, name) for name in client_module.__all__), ServiceReserving])
def test_the_public_signatures_of_the_client_have_no_any(kind):
    for name, member in inspect.getmembers(kind):
        if name.startswith("_") and name not in ("__init__", "__await__", "__enter__", "__aenter__"):
            continue
        found = member.fget if isinstance(member, property) else member
        if inspect.isfunction(found) or inspect.ismethod(found):
            assert "Any" not in str(inspect.signature(found)), f"{kind.__name__}.{name}"


def test_requests_omit_their_defaults():
    for request in (CostRequest(policy="api", key="k"), CostRequest(policy="api", key="k", cost=1)):
        assert RELEASE.decode(verb_request(RELEASE, request).content) == request
        assert verb_request(RELEASE, request).content == b'{"policy":"api","key":"k"}'
