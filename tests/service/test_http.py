"""The HTTP interface: verbs, tokens, bounds, idempotency, checks for proxies. The app runs in this process."""

import asyncio
import json

import httpx
import msgspec
import pytest

from tests.service.harness import ADMIN, DECISION, START, InProcessService
from tidegate.service.api.responses import decision_response
from tidegate.service.decisions.decider import Subject
from tidegate.service.http.problems import HTTPReply
from tidegate.service.http.replays import IdempotentReplies
from tidegate.stores import Store
from tidegate.testing import ManualClock

POLICIES = {"api": "2/1m fixed_window", "many": "1000/1m, 5000/1h", "tokens": "100/1m fixed_window unit=tokens",
            "slots": "1/1m concurrency", "shadow": {"limits": "2/1m", "mode": "shadow"}}  # fmt: skip
K = {"policy": "api", "key": "k"}


@pytest.fixture
async def service():
    async with InProcessService(policies=POLICIES, max_body=2048, max_concurrency=2) as service:
        yield service


def problem(response):
    assert response.headers["content-type"] == "application/problem+json"
    result = response.json()
    assert result["status"] == response.status_code
    return result["type"].removeprefix("urn:tidegate:problem:"), result.get("pointer")


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
        ("acquire", {**K, "wait": "long"}, "bad-field", "/wait"),
        ("acquire", {**K, "wait": 1, "timeout": 1}, "bad-field", "/wait"),
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
    assert service.decider.stats.errors[kind] == 1


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
        await service.post("acquire", {"policy": "wait", "key": "k", "wait": 1})
        await service.post("reserve", {"policy": "wait", "key": "k", "timeout": 1})
        assert set(service.decider.stats.latency) == {"acquire", "batch", "acquire wait", "reserve wait"}


async def test_wait_is_the_older_name_of_timeout(service):
    await service.post("acquire", {**K, "cost": 2})
    for name in ("wait", "timeout"):
        for verb in ("acquire", "reserve"):
            waiting = asyncio.create_task(service.post(verb, {**K, name: 25}))
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
    response = await service.post("acquire", {**K, "wait": 1, "timeout": 1})
    assert response.json()["detail"] == "cannot be combined with timeout: wait is its older name"


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


@pytest.mark.parametrize(
    "body", ["", "{", "[NaN]", '{"a":Infinity}', "\xff", "[" * 100_000, "[" * 2000, '"' + "a" * 3000]
)
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


# ---- bounds ----------------------------------------------------------------------------------------------------------


async def test_too_many_concurrent_requests_get_busy(service):
    await service.post("acquire", {**K, "cost": 2})
    waiting = [asyncio.create_task(service.post("acquire", {**K, "timeout": 20})) for _ in range(2)]
    while service.decider.waiting < 2:
        await asyncio.sleep(0)
    busy = await service.post("acquire", {"policy": "many", "key": "k"})
    assert problem(busy)[0] == "busy"
    assert busy.headers["retry-after"] == "1"
    for each in waiting:
        await each
    assert service.app.in_flight == 0
    assert (await service.post("acquire", {"policy": "many", "key": "k"})).json()["allowed"]


async def raw(app, messages, headers=(), path="/v1/acquire"):
    """Send ASGI messages by hand; return the response."""
    sent = []

    async def receive():
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), *headers]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    await app(scope, receive, send)
    return (sent[0]["status"], json.loads(sent[1]["body"])) if sent else None


def piece(body, *, more):
    return {"type": "http.request", "body": body, "more_body": more}


async def test_a_body_in_several_messages(service):
    text = json.dumps(K).encode()
    status, result = await raw(service.app, [piece(text[:5], more=True), piece(text[5:], more=False)])
    assert (status, result["remaining"]) == (200, 1)
    # A body of the announced length is complete, even if the server says that there is more.
    status, result = await raw(service.app, [piece(text, more=True)], [(b"content-length", b"%d" % len(text))])
    assert (status, result["remaining"]) == (200, 0)
    status, result = await raw(service.app, [piece(b" " * 1500, more=True), piece(b" " * 1500, more=True)])
    assert (status, result["type"]) == (413, "urn:tidegate:problem:too-large")
    status, _ = await raw(service.app, [], [(b"content-length", b"99999")])
    assert status == 413
    assert await raw(service.app, [piece(b"{", more=True), {"type": "http.disconnect"}]) is None
    assert service.app.in_flight == 0


async def test_a_client_that_disconnects_leaves_the_wait_queue(service):
    await service.post("acquire", {**K, "cost": 2})
    waiting = json.dumps({**K, "timeout": 30}).encode()
    assert await raw(service.app, [piece(waiting, more=False), {"type": "http.disconnect"}]) is None
    while service.decider.waiting:
        await asyncio.sleep(0)
    assert (service.clock.now(), service.app.in_flight) == (START, 0)
    service.clock.advance(60)
    assert (await service.post("peek", {**K, "cost": 2})).json()["allowed"]  # nothing was taken


async def test_a_stopping_service_refuses_new_requests(service):
    service.app.stop()
    assert service.app.idle.is_set()
    assert problem(await service.post("acquire", K))[0] == "stopping"
    assert problem(await service.http.get("/readyz"))[0] == "stopping"
    assert (await service.http.get("/healthz")).status_code == 200


class Broken(Store):
    """A store that fails with an unexpected exception."""

    def apply(self, verb, asks, now=None, at=None):
        raise RuntimeError("inside")


async def test_an_unexpected_exception_is_logged_and_not_sent(caplog):
    async with InProcessService(store=Broken(), policies=POLICIES) as service:
        response = await service.post("acquire", K)
        assert problem(response)[0] == "internal"
        assert "inside" not in response.text
        assert "inside" in caplog.text
        assert service.app.in_flight == 0


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "sent", "decides", "administers"),
    [
        ({}, None, 200, 200),
        ({"decision_token": DECISION}, None, 401, 403),
        ({"decision_token": DECISION}, "wrong", 401, 403),
        ({"decision_token": DECISION}, DECISION, 200, 403),
        ({"decision_token": DECISION, "admin_token": ADMIN}, DECISION, 200, 403),
        ({"decision_token": DECISION, "admin_token": ADMIN}, ADMIN, 200, 200),
        ({"decision_token": DECISION, "admin_token": ADMIN}, None, 401, 401),
        ({"admin_token": ADMIN}, None, 200, 401),
        ({"admin_token": ADMIN}, ADMIN, 200, 200),
    ],
)
@pytest.mark.parametrize("field", ["authorization", "x-tidegate-token"])
async def test_tokens(tokens, sent, decides, administers, field):
    value = f"Bearer {sent}" if field == "authorization" else sent
    headers = {} if sent is None else {field: value}
    async with InProcessService(policies=POLICIES, **tokens) as service:
        assert (await service.post("acquire", K, headers=headers)).status_code == decides
        assert (await service.http.get("/v1/check?policy=api&key=k", headers=headers)).status_code == decides
        assert (await service.http.get("/metrics", headers=headers)).status_code == decides
        assert (await service.post("reset", K, headers=headers)).status_code == administers
        assert (await service.http.get("/healthz")).status_code == 200


# The paths that docs/service.md lists for the decision token. A new path has to be added here and there.
WITHOUT_TOKEN = {"/healthz", "/readyz", "/openapi.json"}
WITH_DECISION = {
    *("/v1/acquire", "/v1/peek", "/v1/reserve", "/v1/lease", "/v1/commit", "/v1/cancel", "/v1/release", "/v1/batch"),
    *("/v1/usage", "/v1/check", "/v1/policies", "/v1/overview", "/metrics"),
}
WITH_ADMIN = {"/v1/refund", "/v1/reset", "/v1/block", "/v1/unblock", "/v1/blocks"}


async def test_a_decision_token_allows_only_the_listed_paths():
    async with InProcessService(policies=POLICIES, decision_token=DECISION, admin_token=ADMIN) as service:
        described = (await service.http.get("/openapi.json")).json()["paths"]
        assert set(described) == WITHOUT_TOKEN | WITH_DECISION | WITH_ADMIN
        for path, methods in described.items():
            method = "POST" if "post" in methods and path != "/v1/check" else "GET"
            statuses = []
            for token in ("", DECISION, ADMIN):
                headers = {"x-tidegate-token": token} if token else {}
                sent = {"json": {}} if method == "POST" else {}
                statuses.append((await service.http.request(method, path, headers=headers, **sent)).status_code)
            refused = [status if status in (401, 403) else None for status in statuses]
            expected = [None] * 3 if path in WITHOUT_TOKEN else [401, 403 if path in WITH_ADMIN else None, None]
            assert (path, refused) == (path, expected)


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:8080", 200), ("localhost", 200), ("[::1]:80", 200), ("[::1]", 200), ("127.0.0.2:80", 200),
     ("evil.example", 403), ("127.0.0.1.evil.example:8080", 403), ("", 403)],
)  # fmt: skip
@pytest.mark.parametrize("tokens", [{}, {"admin_token": ADMIN}])
async def test_a_foreign_host_name_is_refused(tokens, host, status):
    async with InProcessService(policies=POLICIES, **tokens) as service:
        assert (await service.post("peek", K, headers={"host": host})).status_code == status


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
        asked = {"policy": "two", "key": "k", "most": 10}
        assert (
            (await service.post("lease", asked)).status_code
            == (await service.post("acquire", asked)).status_code
            == 422
        )


# ---- idempotency -----------------------------------------------------------------------------------------------------


async def test_the_same_idempotency_key_gets_the_same_response(service):
    headers = {"idempotency-key": "one"}
    first = await service.post("acquire", K, headers=headers)
    again = await service.post("acquire", K, headers=headers)
    assert first.json() == again.json()
    assert ("idempotency-replayed" in first.headers, again.headers["idempotency-replayed"]) == (False, "true")
    assert (await service.post("usage", K)).json()["limits"][0]["used"] == 1
    other = await service.post("acquire", {**K, "cost": 2}, headers=headers)
    assert problem(other)[0] == "idempotency-mismatch"
    service.clock.advance(601)
    later = await service.post("acquire", K, headers=headers)
    assert "idempotency-replayed" not in later.headers


async def test_the_size_of_remembered_responses_is_bounded():
    replays = IdempotentReplies(ManualClock(), max_bytes=1000)

    async def ask():
        return HTTPReply(200, b"x" * 400)

    for number in range(10):
        await replays.reply(b"%d" % number, ("batch", b"asked"), ask)
    assert len(replays) == 3
    again = await replays.reply(b"9", ("batch", b"asked"), ask)
    assert again.headers == ((b"idempotency-replayed", b"true"),)


async def test_a_repeated_request_waits_for_the_first(service):
    await service.post("acquire", {**K, "cost": 1})
    headers = {"idempotency-key": "two"}
    both = [service.post("acquire", {**K, "cost": 2, "timeout": 30}, headers=headers) for _ in range(2)]
    answers = [response.json() for response in await asyncio.gather(*both)]
    assert answers[0] == answers[1]
    assert service.decider.stats.count("api").denied == 1


@pytest.mark.parametrize("verb", ["acquire", "reserve"])
async def test_a_client_with_a_key_that_disconnects_leaves_the_wait_queue(service, verb):
    await service.post("acquire", {**K, "cost": 2})
    ask, key = {**K, "timeout": 90}, (b"idempotency-key", b"abandoned")
    for _ in range(3):
        messages = [piece(json.dumps(ask).encode(), more=False), {"type": "http.disconnect"}]
        assert await raw(service.app, messages, [key], f"/v1/{verb}") is None
        while service.decider.waiting:
            await asyncio.sleep(0)
    assert (service.clock.now(), service.app.in_flight, service.app.waiting) == (START, 0, 0)
    service.decider.max_wait = 90
    headers = {"idempotency-key": "abandoned"}
    first = await service.post(verb, ask, headers=headers)  # waits anew
    assert (service.clock.now(), first.json()["allowed"]) == (START + 60, True)
    again = await service.post(verb, ask, headers=headers)
    assert (again.json(), again.headers["idempotency-replayed"]) == (first.json(), "true")
    assert (await service.post("usage", K)).json()["limits"][0]["used"] == 1


async def test_a_repeated_request_keeps_waiting_when_the_first_client_disconnects(service):
    await service.post("acquire", {**K, "cost": 2})
    gone = asyncio.Event()
    body = json.dumps({**K, "timeout": 20}).encode()

    async def ask(*messages):
        sent, left = [], [piece(body, more=False), *messages]

        async def receive():
            if len(left) == 1 and left[0]["type"] == "http.disconnect":
                await gone.wait()
            return left.pop(0) if left else await asyncio.Event().wait()

        async def send(message):
            sent.append(message)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"idempotency-key", b"twice")]
        scope = {"type": "http", "method": "POST", "path": "/v1/acquire", "query_string": b"", "headers": headers}
        await service.app(scope, receive, send)
        return json.loads(sent[1]["body"]) if sent else None

    first = asyncio.create_task(ask({"type": "http.disconnect"}))
    second = asyncio.create_task(ask())
    while service.app.waiting < 2:
        await asyncio.sleep(0)
    gone.set()
    assert await first is None
    assert (await second)["allowed"] is False  # at its own deadline


async def test_waiting_calls_leave_capacity_for_other_calls():
    async with InProcessService(policies=POLICIES, max_concurrency=8) as service:
        await service.post("acquire", {**K, "cost": 2})
        asking = [asyncio.create_task(service.post("acquire", {**K, "timeout": 20})) for _ in range(8)]
        while service.app.waiting < 7 or service.app.in_flight > 7:
            await asyncio.sleep(0)
        assert (await service.post("acquire", {"policy": "many", "key": "k"})).json()["allowed"]
        statuses = [(await each).status_code for each in asking]
        assert (statuses.count(200), statuses.count(503)) == (7, 1)


async def test_an_error_is_not_remembered_for_its_key(service):
    headers = {"idempotency-key": "three"}
    wrong = {"policy": "nope", "key": "k"}
    assert [(await service.post("acquire", wrong, headers=headers)).status_code for _ in range(2)] == [404, 404]
    assert (await service.post("acquire", K, headers=headers)).status_code == 200
    assert (await service.post("acquire", K, headers={"idempotency-key": "x" * 300})).status_code == 400


# ---- checks for proxies ----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
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
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS"])
async def test_check_refuses_pages_of_other_sites_without_a_token(method, fields, status):
    path = "/v1/check?policy=api&key=k"
    for tokens, expected in (({}, status), ({"admin_token": ADMIN}, status), ({"decision_token": DECISION}, 200)):
        async with InProcessService(policies=POLICIES, **tokens) as service:
            sent = {**fields, **({"x-tidegate-token": DECISION} if "decision_token" in tokens else {})}
            assert (await service.http.request(method, path, headers=sent)).status_code == expected
            assert service.decider.stats.count("api").allowed == (expected == 200)


async def test_a_page_cannot_send_json_without_a_preflight(service):
    """A request without a preflight is refused by its content type, and the preflight is refused, too."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        reply = await service.http.post("/v1/acquire", content=json.dumps(K), headers={"content-type": kind})
        assert problem(reply)[0] == "unsupported-type"
    reply = await service.http.options("/v1/acquire", headers={"origin": "https://evil.example"})
    assert reply.status_code == 405
    assert not [name for name in reply.headers if name.startswith("access-control")]
    assert (await service.post("usage", K)).json()["limits"][0]["used"] == 0


@pytest.mark.parametrize(
    "query",
    ["", "policy=api", "key=a", "policy=api&key=", "policy=api&key=a&policy=many", "policy=api&key=a&colour=red",
     "policy=api&key=a&cost=-1", "policy=api&key=a&cost=x", "policy=api&key=a&deny=200",
     "policy=api&key=a&deny=403&deny=429", "policy=api&key=a&cost=1&cost=0",
     "%ff", "policy=api&key=a&&", "policy=api;key=a", "policy=api&key=%ff", "policy=api&key=a%fe"],
)  # fmt: skip
async def test_an_invalid_query_is_refused(service, query):
    assert (await service.http.get(httpx.URL("http://127.0.0.1/v1/check", query=query.encode()))).status_code == 400
    assert service.decider.stats.counts == {}


# ---- metrics ---------------------------------------------------------------------------------------------------------


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
