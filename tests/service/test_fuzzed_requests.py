"""Every request gets a response that matches the OpenAPI description: a decision or a problem."""

import asyncio
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import cases
from tests.service.harness import InProcessService
from tidegate.service._api.problems import ProblemError
from tidegate.service._api.verbs import VERBS
from tidegate.service._http.openapi import document
from tidegate.service._http.request_head import RequestHead

API = json.loads(document())
SCHEMAS = API["components"]["schemas"]
POLICIES = {
    "api": "2/1m",
    "both": "5/1m, 10/1h sliding_log",
    "tokens": "100/1m unit=tokens",
    "slots": "1/1m concurrency",
}
DOMAINS = [{"domain": "e", "descriptors": [{"key": "ip", "limits": "3/1m"}]}]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
# Values that are often right, and sometimes not.
LIKELY = {
    "policy": st.sampled_from([*POLICIES, "nope", ""]),
    "key": st.text(max_size=5) | st.lists(st.text(max_size=3), max_size=3),
    "domain": st.sampled_from(["e", "nope"]),
    "descriptor": st.lists(st.tuples(st.sampled_from(["ip", "x"]), st.text(max_size=3)).map(list), max_size=2),
    "cost": st.integers(-1, 6) | st.dictionaries(st.sampled_from(["tokens", "requests"]), st.integers(0, 5)),
    "timeout": st.sampled_from([0, 0.5, -3, 1e300]),
    "priority": st.integers(-5, 5),
    "ttl": st.sampled_from([1, 0, 60, 1e9]),
    "seconds": st.sampled_from([1, 0, -1, 60, 1e9]),
    "reason": st.text(max_size=5) | st.just("x" * 300),
    "actor": st.text(max_size=5),
    "max_permits": st.integers(-1, 20),
    "id": st.text(max_size=10),
    "provider": st.sampled_from(["fmp", "fmp.example", "https://fmp.example/", "nope", ""]),
    "name": st.text(max_size=3),
    "limits": st.lists(st.sampled_from(["5/run", "0.2/run unit=usd", "x"]), max_size=2),
    "credits": st.lists(st.sampled_from(["red", "a/b"]), max_size=1),
    "max_repeats": st.integers(-1, 3),
    "token": st.text(max_size=5),
    "owner": st.sampled_from(["tgk1.e30.e30", "tgr1.e30.e30", ""]),
    "carve": st.dictionaries(st.sampled_from(["usd", "requests"]), st.integers(-1, 3), max_size=2),
    "more": st.dictionaries(st.sampled_from(["usd", "requests"]), st.integers(-1, 3), max_size=2),
    "alternatives": st.dictionaries(st.text(max_size=2), st.just({"usd": 1}) | st.just({"x": -1}), max_size=2),
    "request": st.text(max_size=3),
    "end_streams": st.booleans(),
    "keys": st.lists(st.text(max_size=3) | JSON, max_size=4),
    "asks": st.lists(st.fixed_dictionaries({"policy": st.sampled_from([*POLICIES]), "key": st.text()}), max_size=3),
}  # fmt: skip


def bodies(verb):
    fields = {name: LIKELY[name] for name in VERBS[verb].request.__struct_fields__}
    strange = st.sampled_from(sorted(fields)).flatmap(
        lambda name: st.fixed_dictionaries({}, optional={**fields, name: JSON})
    )
    subjects = st.fixed_dictionaries(
        {name: each for name, each in fields.items() if name in ("policy", "key", "id", "keys")},
        optional={name: each for name, each in fields.items() if name in ("cost", "timeout", "priority", "ttl")},
    )
    return subjects | st.fixed_dictionaries({}, optional=fields) | strange | JSON


def fits(value, schema):
    """Return whether a value matches a schema; supports the part of JSON Schema that our description uses."""
    if "$ref" in schema:
        return fits(value, SCHEMAS[schema["$ref"].rpartition("/")[2]])
    kinds = schema.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return (
        ("anyOf" not in schema or any(fits(value, each) for each in schema["anyOf"]))
        and ("oneOf" not in schema or sum(fits(value, {"type": "object", **each}) for each in schema["oneOf"]) == 1)
        and ("not" not in schema or not fits(value, schema["not"]))
        and ("const" not in schema or value == schema["const"])
        and ("enum" not in schema or value in schema["enum"])
        and (not kinds or any(is_a(value, kind) for kind in kinds))
        and fits_inside(value, schema)
    )


def fits_inside(value, schema):
    if isinstance(value, dict):
        properties, more = schema.get("properties", {}), schema.get("additionalProperties", True)
        return all(name in value for name in schema.get("required", ())) and all(
            fits(each, properties[name]) if name in properties else more and (more is True or fits(each, more))
            for name, each in value.items()
        )
    if isinstance(value, list):
        bounded = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        first = schema.get("prefixItems", [])
        rest = schema.get("items") or {}  # False: there are no others, which maxItems bounds
        return bounded and all(fits(each, (first[n:] or [rest])[0]) for n, each in enumerate(value))
    if isinstance(value, str):
        return schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        inside = schema.get("minimum", value) <= value <= schema.get("maximum", value)
        return inside and value > schema.get("exclusiveMinimum", float("-inf"))
    return True


def is_a(value, kind):
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return {
        "object": isinstance(value, dict),
        "array": isinstance(value, list),
        "string": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "null": value is None,
        "number": number,
        "integer": number and int(value) == value,
    }[kind]


async def answer(verb, body):
    async with InProcessService(policies=POLICIES, domains=DOMAINS, max_wait=1) as service:
        response = await service.http.post(
            VERBS[verb].path, content=json.dumps(body), headers={"content-type": "application/json"}
        )
        assert service.app.in_flight == 0
        return response


@cases("verb", [name for name, verb in VERBS.items() if verb.method == "POST"])
def test_every_response_matches_the_openapi_description(monkeypatch, verb):
    monkeypatch.setattr(
        "tidegate._runtime.clock.IDLE_GRACE", 0.0001
    )  # calls that wait advance the clock: they need no real time
    described = API["paths"][VERBS[verb].path]["post"]
    asked = described["requestBody"]["content"]["application/json"]["schema"]

    @settings(max_examples=60)
    @given(bodies(verb))
    def check(body):
        response = asyncio.run(answer(verb, body))
        assert str(response.status_code) in described["responses"]
        assert response.status_code < 500
        ((kind, content),) = described["responses"][str(response.status_code)]["content"].items()
        assert response.headers["content-type"] == kind
        assert fits(response.json(), content["schema"])
        if response.status_code == 200:
            assert fits(body, asked) or verb == "batch"  # where what is wrong with one is the answer to it
        elif not fits(body, asked):
            assert response.status_code in (400, 404, 422)

    check()


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
@settings(max_examples=60)
def test_every_query_gets_a_response(query):
    async def ask():
        async with InProcessService(policies=POLICIES) as service:
            headers = {b"host": b"localhost", b"x": query}
            head = RequestHead(service.app.find_route("/v1/check"), "GET", "/v1/check", query, headers, 0, True)
            try:
                reply = head.route.run(head, b"", None)
            except ProblemError as problem:
                reply = problem.reply()
            return reply.status

    assert asyncio.run(ask()) == 400


def test_the_openapi_description_has_every_path_and_reference():
    async def paths():
        async with InProcessService(policies=POLICIES) as service:
            routes = service.app._routes  # noqa: SLF001 - there is no other list of them
            return {path for path in routes if path != "/" and not path.startswith("/dashboard/")}

    assert set(API["paths"]) == asyncio.run(paths())
    text = document().decode()
    for part in text.split('"$ref": "#/components/schemas/')[1:]:
        assert part.partition('"')[0] in SCHEMAS
