"""The verbs over HTTP: responses, invalid requests, priorities, metrics. The app runs in this process."""

import asyncio
import json

import msgspec
import pytest

from tests.cases import cases
from tests.service.harness import ADMIN, DECISION, START, InProcessService
from tests.service.http_harness import POLICIES, K, problem
from tidegate.service._api.responses import decision_response
from tidegate.service._decisions.decider import Subject


@pytest.fixture
async def service():
    async with InProcessService(policies=POLICIES, max_body=2048, max_concurrency=2) as service:
        yield service


async def test_a_complete_acquire_response(service):
    assert (await service.post("acquire", {**K, "cost": 2})).json() == {
        "allowed": True,
        "remaining": 0,
        "retry_after": 0.0,
        "reset_after": 60.0,
        "violated": [],
        "shadow": False,
        "local": False,
        "limits": [
            {
                "name": "1m",
                "quota": 2,
                "unit": "requests",
                "allowed": True,
                "remaining": 0,
                "retry_after": 0.0,
                "reset_after": 60.0,
            }
        ],
    }
    service.clock.advance(20)
    result = (await service.post("acquire", K)).json()
    assert (result["allowed"], result["retry_after"], result["violated"]) == (False, 40.0, ["1m"])
    assert result["limits"][0]["allowed"] is False
    result = (await service.post("acquire", {**K, "cost": 3})).json()
    assert result["retry_after"] is None


@pytest.mark.parametrize("policy", ["many", "api", "tokens", "shadow"])
async def test_a_response_has_the_attributes_of_its_decision(service, policy):
    """Allowed, denied and shadow decisions of one or several limits."""
    for cost in (1, 0, 2, 3, 101):
        decision = await service.decider.acquire(Subject(policy, "x"), cost)
        service.clock.advance(0.123457)
        found = msgspec.to_builtins(decision_response(decision))
        limits = [{**each._asdict()} for each in decision.limits]
        assert [each.pop("limit").name for each in limits] == [each["name"] for each in found["limits"]]
        assert found.pop("limits") == limits
        assert found.pop("local") is False
        assert found.pop("shadow") == (policy == "shadow" and not decision.within_limits)
        assert found.pop("violated") == list(decision.violated)
        assert found == {name: getattr(decision, name) for name in found}


async def test_reserve_commit_cancel_release(service):
    result = (await service.post("reserve", {"policy": "tokens", "key": "k", "cost": 60, "ttl": 5})).json()
    assert (result["allowed"], result["remaining"]) == (True, 40)
    assert (await service.post("commit", {"id": result["id"], "cost": 10})).json() == {"ok": True}
    assert problem(await service.post("cancel", {"id": result["id"]})) == ("already-settled", None)
    assert problem(await service.post("cancel", {"id": "x"})) == ("unknown-reservation", None)
    usage = (await service.post("usage", {"policy": "tokens", "key": "k"})).json()["limits"]
    assert [(each["name"], each["used"], each["unit"]) for each in usage] == [("tokens-1m", 10, "tokens")]
    denied = (await service.post("reserve", {"policy": "tokens", "key": "k", "cost": 91})).json()
    assert (denied["allowed"], denied["id"]) == (False, None)
    slot = {"policy": "slots", "key": "k"}
    assert [(await service.post("acquire", slot)).json()["allowed"] for _ in range(2)] == [True, False]
    await service.post("release", slot)
    assert (await service.post("acquire", slot)).json()["allowed"]


async def test_batches_report_errors_per_ask_and_invalid_batches_charge_nothing(service):
    result = (await service.post("batch", {"policy": "api", "keys": ["a", "a", ["a", "b"], "a", 5]})).json()["answers"]
    assert [answer.get("allowed") for answer in result] == [True, True, True, False, None]
    assert result[4]["error"]["pointer"] == "/keys/4"
    asks = [{**K, "cost": 2}, K, {"policy": "nope", "key": "k"}]
    result = (await service.post("batch", {"asks": asks})).json()["answers"]
    assert [answer.get("allowed") for answer in result] == [True, False, None]
    assert result[2]["error"]["status"] == 404
    # An invalid batch charges nothing, not even the valid asks before the invalid one.
    wrong = await service.post("batch", {"asks": [{"policy": "many", "key": "k"}, {"policy": "many"}]})
    assert problem(wrong) == ("bad-field", "/asks/1/key")
    usage = (await service.post("usage", {"policy": "many", "key": "k"})).json()["limits"]
    assert usage[0]["used"] == 0


async def test_a_batch_has_at_most_a_thousand_keys():
    async with InProcessService(policies=POLICIES) as large:
        keys = [str(number) for number in range(1000)]
        assert len((await large.post("batch", {"policy": "api", "keys": keys})).json()["answers"]) == 1000
        assert problem(await large.post("batch", {"policy": "api", "keys": [*keys, "x"]})) == ("bad-field", "/keys")


@pytest.mark.parametrize(
    ("verb", "body", "kind", "pointer"),
    [
        ("acquire", [], "bad-request", None),
        ("acquire", {}, "bad-field", "/policy"),
        ("acquire", {"policy": "api"}, "bad-field", "/key"),
        ("acquire", {"policy": 5, "key": "k"}, "bad-field", "/policy"),
        ("acquire", {**K, "colour": 1}, "bad-field", "/colour"),
        ("acquire", {**K, "cost": True}, "bad-field", "/cost"),
        ("acquire", {**K, "cost": 1.5}, "bad-field", "/cost"),
        ("acquire", {**K, "cost": None}, "bad-field", "/cost"),
        ("acquire", {**K, "cost": -1}, "bad-field", "/cost"),
        ("acquire", {**K, "cost": 2**60}, "bad-field", "/cost"),
        ("acquire", {**K, "cost": {"usd": 1}}, "bad-field", "/cost"),
        ("acquire", {**K, "timeout": "long"}, "bad-field", "/timeout"),
        ("peek", {**K, "timeout": 1}, "bad-field", "/timeout"),
        ("acquire", {"policy": "api", "key": "k" * 1025}, "bad-field", "/key"),
        ("acquire", {"policy": "api", "key": "\ud800"}, "bad-field", "/key"),
        ("acquire", {"policy": "nope", "key": "k"}, "unknown-policy", None),
        ("acquire", {"domain": "nope", "descriptor": [["a", "b"]]}, "unknown-policy", None),
        ("acquire", {"domain": "e", "policy": "api", "descriptor": [["a", "b"]]}, "bad-field", "/policy"),
        ("acquire", {"domain": "e", "descriptor": [["a"]]}, "bad-field", "/descriptor"),
        ("reserve", {**K, "ttl": 0}, "bad-field", "/ttl"),
        ("commit", {"id": 7}, "bad-field", "/id"),
        ("release", K, "bad-field", None),
        ("batch", {}, "bad-field", "/asks"),
        ("batch", {"policy": "api", "keys": []}, "bad-field", "/keys"),
        ("batch", {"policy": "api", "asks": [K]}, "bad-field", "/policy"),
    ],
)
async def test_invalid_requests_name_the_problem_and_the_field(service, verb, body, kind, pointer):
    response = await service.http.post(
        f"/v1/{verb}", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert problem(response) == (kind, pointer)
    assert service.decider.stats.errors.totals()[kind] == 1


async def test_errors_are_classified_by_type_whatever_the_names_of_policies():
    async with InProcessService(policies={"reservations": "2/1m"}) as service:
        for body in ({"policy": "reservation", "key": "k"}, {"domain": "reservation", "descriptor": [["a", "b"]]}):
            assert problem(await service.post("acquire", body))[0] == "unknown-policy"
        assert problem(await service.post("acquire", {"policy": "nope", "key": "k"}))[0] == "unknown-policy"
        assert problem(await service.post("commit", {"id": "nope"}))[0] == "unknown-reservation"


async def test_only_requests_that_may_wait_are_timed_as_waiting():
    async with InProcessService(policies={"wait": "20/1m, 5/1m unit=tokens"}) as service:
        await service.post("acquire", {"policy": "wait", "key": ["wait", "timeout"]})
        await service.post("batch", {"policy": "wait", "keys": ["wait", "timeout"]})
        await service.post("acquire", {"policy": "wait", "key": "k", "timeout": 0})
        assert set(service.decider.stats.latency) == {"acquire", "batch"}
        await service.post("acquire", {"policy": "wait", "key": "k", "timeout": 1})
        await service.post("reserve", {"policy": "wait", "key": "k", "timeout": 1})
        assert set(service.decider.stats.latency) == {"acquire", "batch", "acquire wait", "reserve wait"}


async def test_calls_wait_up_to_their_timeout(service):
    await service.post("acquire", {**K, "cost": 2})
    for verb in ("acquire", "reserve"):
        waiting = asyncio.create_task(service.post(verb, {**K, "timeout": 25}))
        while not service.decider.waiting:
            await asyncio.sleep(0)
        service.clock.advance(24)
        await asyncio.sleep(0)
        assert service.decider.waiting == 1
        service.clock.advance(2)
        result = (await waiting).json()
        await service.post("reset", K)
        await service.post("acquire", {**K, "cost": 2})
        assert result["retry_after"] is not None


async def test_refunds_are_given_once_and_need_the_admin_token():
    async with InProcessService(policies=POLICIES, decision_token=DECISION, admin_token=ADMIN) as service:
        admin = {"x-tidegate-token": ADMIN}
        await service.post("acquire", {**K, "cost": 2}, headers=admin)
        assert problem(await service.post("refund", K, headers={"x-tidegate-token": DECISION}))[0] == "forbidden"
        for _ in range(2):  # the second is a repetition
            again = await service.post("refund", K, headers={**admin, "idempotency-key": "1"})
            assert again.json() == {"ok": True}
        usage = (await service.post("usage", K, headers=admin)).json()["limits"][0]
        assert (usage["used"], usage["remaining"]) == (1, 1)
        assert problem(await service.post("refund", {**K, "cost": -1}, headers=admin)) == ("bad-field", "/cost")


async def test_unknown_names_get_a_suggestion(service):
    detail = (await service.post("acquire", {**K, "costs": 1})).json()["detail"]
    assert detail == "unknown field: did you mean 'cost'?"
    detail = (await service.post("acquire", {"key": 5, "cost": -1, "costs": 1})).json()["detail"]
    assert detail == "unknown field: did you mean 'cost'?"  # before other errors
    detail = (await service.post("cancel", {"colour": 1})).json()["detail"]
    assert detail == "unknown field: expected one of id"
    detail = (await service.http.get("/v1/check?polcy=api&key=k")).json()["detail"]
    assert detail == "unknown parameter 'polcy': did you mean 'policy'?"


@cases("body", ["", "{", "[NaN]", '{"a":Infinity}', "\xff", "[" * 100_000, "[" * 2000, '"' + "a" * 3000])
async def test_a_body_that_is_not_json_is_refused(service, body):
    response = await service.http.post(
        "/v1/acquire", content=body.encode("latin-1"), headers={"content-type": "application/json"}
    )
    assert problem(response)[0] in ("bad-request", "too-large")


async def test_paths_methods_and_content_types(service):
    assert problem(await service.http.get("/v2/acquire"))[0] == "not-found"
    assert problem(await service.http.get("/v1/acquire"))[0] == "method-not-allowed"
    assert problem(await service.http.post("/healthz"))[0] == "method-not-allowed"
    assert problem(await service.http.post("/v1/acquire", content=b"{}"))[0] == "unsupported-type"
    kind = {"content-type": "Application/JSON; charset=utf-8"}
    assert (await service.http.post("/v1/peek", content=json.dumps(K), headers=kind)).status_code == 200
    assert (await service.http.get("/healthz")).json() == {"ok": True}
    assert (await service.http.get("/readyz")).json() == {"ok": True, "state": "ready"}
    assert (await service.http.head("/healthz")).content == b""
    answer = await service.http.get("/v1/policies")
    assert [policy["name"] for policy in answer.json()["policies"]] == list(POLICIES)
    assert answer.headers["x-content-type-options"] == "nosniff"


async def test_waiting_over_http(service):
    await service.post("acquire", {**K, "cost": 2})
    result = (await service.post("acquire", {**K, "timeout": 30})).json()
    assert not result["allowed"]
    assert service.clock.now() == START + 30
    result = (await service.post("acquire", {**K, "timeout": 30})).json()
    assert result["allowed"]
    assert service.clock.now() == START + 60


DOMAINS = [{"domain": "edge", "descriptors": [{"key": "ip", "limits": "2/1h"}]}]


async def test_long_descriptors_are_limited_and_stored_as_digests():
    async with InProcessService(domains=DOMAINS) as service:
        long = {"domain": "edge", "descriptor": [["ip", "x" * 100_000]]}
        other = {"domain": "edge", "descriptor": [["ip", "x" * 100_001]]}
        allowed = [(await service.post("acquire", ask)).json()["allowed"] for ask in (long, long, long, other)]
        assert allowed == [True, True, False, True]
        kept = service.decider.store._tables.values()  # noqa: SLF001 - nothing else shows how long a kept key is
        assert all(len(str(key)) < 100 for table in kept for key in table.entries)


async def test_a_descriptor_with_a_lone_surrogate_is_refused():
    async with InProcessService(domains=DOMAINS) as service:
        body = rb'{"domain":"edge","descriptor":[["ip","\ud800"]]}'
        reply = await service.http.post("/v1/acquire", content=body, headers={"content-type": "application/json"})
        assert (reply.status_code, "surrogate" in reply.json()["detail"]) == (422, True)


async def test_a_lease_with_an_invalid_cost_is_refused():
    async with InProcessService(policies={"two": ["5/1h unit=tokens", "5/1h unit=widgets"]}) as service:
        asked = {"policy": "two", "key": "k", "max_permits": 10}
        assert (
            (await service.post("lease", asked)).status_code
            == (await service.post("acquire", asked)).status_code
            == 422
        )


@pytest.mark.parametrize("verb", ["acquire", "reserve"])
@pytest.mark.parametrize("wait", [0, 1])
@pytest.mark.parametrize("priority", [101, -101, 1e300])
async def test_a_priority_beyond_the_bound_is_refused_whether_or_not_the_call_waits(service, verb, wait, priority):
    body = {"policy": "api", "key": "k", "timeout": wait, "priority": priority}
    answer = await service.post(verb, body)
    assert (answer.status_code, problem(answer)) == (422, ("bad-field", "/priority"))
    assert "must be from -100 to 100 (max_priority)" in answer.json()["detail"]
    assert (await service.post(verb, {**body, "priority": 100})).json()["allowed"]


async def test_the_bound_of_priorities_is_a_setting():
    async with InProcessService(policies=POLICIES, max_priority=500) as service:
        for wait in (0, 1):
            body = {"policy": "api", "key": "k", "timeout": wait}
            assert (await service.post("acquire", {**body, "priority": 500})).json()["allowed"]
            assert (await service.post("acquire", {**body, "priority": 501})).status_code == 422


async def test_metrics_are_valid_and_contain_no_keys(service):
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415 - only here

    for number in range(5):
        await service.post("acquire", {"policy": "api", "key": f"user {number // 4}"})
    await service.post("acquire", {"policy": 'no\n"such', "key": "k"})
    text = (await service.http.get("/metrics")).text
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["tidegate_decisions_total", ("outcome", "allowed"), ("policy", "api")] == 3
    assert found["tidegate_decisions_total", ("outcome", "denied"), ("policy", "api")] == 2
    assert found["tidegate_denials_total", ("limit", "1m"), ("policy", "api")] == 2
    assert found["tidegate_problems_total", ("kind", "unknown-policy")] == 1
    assert found["tidegate_request_seconds_count", ("verb", "acquire")] == 6
    assert found["tidegate_store", ("name", "entries")] == 2
    assert "user" not in text
    assert "such" not in text
