"""Runs over HTTP and RESP, by token, key of the creator and id; each sentence of SECURITY.md has an attack."""

import base64
import json

import pytest

from tests.service.harness import ADMIN, DECISION, InProcessService, serving
from tidegate import ConfigError, RateLimitError
from tidegate.agents import AsyncCredits, AsyncRun, RunDenied, RunEndedError, TokenError
from tidegate.service.client import AsyncClient, Client

POLICIES = {"api": "2/1m"}


@pytest.fixture
async def service():
    async with InProcessService(policies=POLICIES) as running:
        yield running


@pytest.fixture
async def guarded():
    async with InProcessService(policies=POLICIES, decision_token=DECISION, admin_token=ADMIN) as running:
        yield running


async def post(service, verb, body, token=None, status=200):
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    response = await service.post(f"runs/{verb}", body, headers=headers)
    assert response.status_code == status, response.text
    return response.json()


async def test_a_tree_is_created_charged_read_extended_stopped_and_closed(service):
    run = await post(service, "create", {"name": "research", "limits": ["0.05/run unit=usd"], "ttl": 100})
    assert run["ends"] == service.clock.ns() / 1e9 + 100
    child = await post(service, "child", {"token": run["token"], "name": "planner", "limits": ["2/run"]})
    assert child["name"] == "research/planner"
    for _ in range(2):
        charged = await post(service, "charge", {"token": child["token"], "cost": {"usd": "0.01"}})
        assert charged == {**charged, "allowed": True, "node": "research/planner", "alternative": "0"}
    denied = await post(service, "charge", {"token": child["token"], "cost": {"usd": 0.01}})
    assert denied == {
        "allowed": False,
        "alternative": "",
        "node": "research/planner",
        "limit": "requests-run",
        "needed": 1,
        "left": {"research/planner": {"requests-run": 0}, "research": {"usd_micros-run": 30_000}},
        "retry_after": None,
        "detail": denied["detail"],
    }
    await post(service, "extend", {"owner": child["owner"], "more": {"requests": 3}})
    assert (await post(service, "charge", {"token": child["token"], "cost": {"usd": "0.01"}}))["allowed"]
    usage = await post(service, "read", {"token": run["token"]})
    assert usage["used"] == {"usd_micros": 30_000, "requests": 3}
    assert usage["children"][0]["limits"]["requests-run"] == {
        "unit": "requests", "quota": 5, "used": 3, "remaining": 2,
    }  # fmt: skip
    await post(service, "stop", {"owner": run["owner"]})
    stopped = await post(service, "charge", {"token": child["token"]})
    assert (stopped["allowed"], stopped["node"], stopped["limit"]) == (False, "research", "stopped")
    refused = await post(service, "child", {"token": run["token"], "name": "late"}, status=409)
    assert refused["type"].endswith("run-denied")
    await post(service, "close", {"id": run["id"]})
    assert (await service.http.get("/v1/runs")).json() == {"runs": [{"id": run["id"], "name": "research"}]}


async def test_carve_outs_alternatives_credits_and_repeats(service):
    prepaid = AsyncCredits("red", store=service.decider.store)
    await prepaid.add("0.02")
    run = await post(
        service, "create", {"name": "r", "limits": ["0.03/run unit=usd"], "credits": ["red"], "max_repeats": 1}
    )
    carved = await post(service, "child", {"token": run["token"], "name": "c", "carve": {"usd": "0.02"}})
    refused = {"token": run["token"], "name": "d", "carve": {"usd": "0.02"}}
    assert "0.02" not in (await post(service, "child", refused, status=409))["detail"]
    cost = {"token": run["token"], "cost": {"usd": "0.01"}}
    assert [(await post(service, "charge", cost))["alternative"] for _ in range(3)] == ["0", "red", "red"]
    body = {"token": run["token"], "alternatives": {"large": {"usd": "0.01"}, "small": {"requests": 1}}}
    assert (await post(service, "charge", body))["alternative"] == "small"
    await post(service, "close", {"owner": carved["owner"]})
    assert (await post(service, "charge", body))["alternative"] == "large"
    loop = {"token": run["token"], "request": "search"}
    assert (await post(service, "charge", loop))["allowed"]
    assert (await post(service, "charge", loop))["limit"] == "repeats"


async def test_a_run_of_the_service_is_the_run_of_its_store(service):
    run = await post(service, "create", {"name": "r", "limits": ["2/run"]})
    here = await AsyncRun.join(run["token"], store=service.decider.store)
    await here.charge()
    assert (await post(service, "read", {"token": run["token"]}))["used"] == {"requests": 1}
    mine = await AsyncRun("mine", store=service.decider.store, limits="1/run")
    assert (await post(service, "charge", {"token": await mine.token()}))["allowed"]


# ---- attacks: one for each sentence ---------------------------------------------------------------------------------


async def test_a_token_never_stops_closes_or_extends(service):
    run = await post(service, "create", {"name": "r", "limits": ["1/run"]})
    for verb in ("stop", "close", "extend"):
        refused = await post(service, verb, {"owner": run["token"]}, status=403)
        assert "no right to" in refused["detail"]
    assert (await post(service, "read", {"token": run["token"]}))["status"] == "open"


async def test_no_token_becomes_the_key_of_a_creator(service):
    run = await post(service, "create", {"name": "r", "limits": ["1/run"]})
    _, payload, signature = run["token"].split(".")
    await post(service, "stop", {"owner": f"tgk1.{payload}.{signature}"}, status=422)
    _, owner, _ = run["owner"].split(".")
    await post(service, "stop", {"owner": f"tgk1.{owner}.{signature}"}, status=422)
    content = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    content[2] = ["charge", "child", "read", "stop", "extend"]
    forged = base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")
    await post(service, "stop", {"owner": f"tgr1.{forged}.{signature}"}, status=422)


async def test_an_id_needs_the_admin_token(guarded):
    run = await post(guarded, "create", {"name": "r", "limits": ["1/run"]}, DECISION)
    for verb in ("read", "extend", "stop", "close"):
        await post(guarded, verb, {"id": run["id"]}, DECISION, status=403)
        await post(guarded, verb, {"id": run["id"]}, status=401)
    assert (await guarded.http.get("/v1/runs", headers={"authorization": f"Bearer {DECISION}"})).status_code == 403
    assert (await post(guarded, "read", {"id": run["id"]}, ADMIN))["status"] == "open"
    await post(guarded, "stop", {"id": run["id"]}, ADMIN)


async def test_a_token_of_a_run_never_replaces_the_token_of_the_service(guarded):
    run = await post(guarded, "create", {"name": "r", "limits": ["1/run"]}, DECISION)
    await post(guarded, "charge", {"token": run["token"]}, status=401)
    await post(guarded, "charge", {"token": run["token"]}, run["token"], status=401)
    assert (await post(guarded, "charge", {"token": run["token"]}, DECISION))["allowed"]


async def test_a_token_reads_and_charges_only_its_subtree(service):
    run = await post(service, "create", {"name": "r", "limits": ["5/run"]})
    one = await post(service, "child", {"token": run["token"], "name": "one"})
    other = await post(service, "child", {"token": run["token"], "name": "other"})
    assert (await post(service, "read", {"token": one["token"]}))["id"] == one["id"]
    await post(service, "stop", {"owner": one["owner"]})
    assert (await post(service, "charge", {"token": other["token"]}))["allowed"]
    read_only = await (await AsyncRun.join(run["token"], store=service.decider.store)).token(rights=["read"])
    for verb, body in (("charge", {}), ("child", {"name": "x"})):
        await post(service, verb, {"token": read_only, **body}, status=403)


async def test_only_an_operator_names_the_credits_that_pay(guarded):
    prepaid = AsyncCredits("red", store=guarded.decider.store)
    await prepaid.add("0.02")
    body = {"name": "r", "limits": ["0.01/run unit=usd"]}
    await post(guarded, "create", {**body, "credits": ["red"]}, DECISION, status=403)
    run = await post(guarded, "create", body, DECISION)
    child = {"token": run["token"], "name": "c", "credits": ["red"]}
    for token in (DECISION, ADMIN):
        refused = await post(guarded, "child", child, token, status=403)
        assert "no credits 'red'" in refused["detail"]
    paid = await post(guarded, "create", {**body, "credits": ["red"]}, ADMIN)
    child = await post(guarded, "child", {**child, "token": paid["token"]}, DECISION)
    cost = {"token": child["token"], "cost": {"usd": "0.01"}}
    assert [(await post(guarded, "charge", cost, DECISION))["alternative"] for _ in range(2)] == ["0", "red"]
    assert (await prepaid.balance()).used == 10_000


async def test_a_child_has_the_rights_of_the_token_that_created_it(service):
    run = await post(service, "create", {"name": "r", "limits": ["1/run"]})
    weak = await (await AsyncRun.join(run["token"], store=service.decider.store)).token(rights=["child"], ttl=10)
    child = await post(service, "child", {"token": weak, "name": "c"})
    for verb in ("charge", "read"):
        await post(service, verb, {"token": child["token"]}, status=403)
    await post(service, "extend", {"owner": child["owner"], "ttl": 80_000}, status=403)
    await post(service, "stop", {"owner": child["owner"]})


async def test_the_key_of_a_creator_is_refused_where_a_token_goes(service):
    run = await post(service, "create", {"name": "r", "limits": ["1/run"]})
    for verb, body in (("charge", {}), ("child", {"name": "x"}), ("read", {}), ("report", {})):
        refused = await post(service, verb, {"token": run["owner"], **body}, status=422)
        assert "not a token of a run" in refused["detail"]
    assert (await post(service, "read", {"token": run["token"]}))["used"] == {"requests": 0}


async def test_tokens_are_neither_logged_nor_returned(service, caplog):
    run = await post(service, "create", {"name": "r", "limits": ["1/run"]})
    bad = run["token"][:-3] + "abc"
    for verb in ("charge", "read"):
        text = json.dumps(await post(service, verb, {"token": bad}, status=422))
        assert bad[10:40] not in text
    await post(service, "stop", {"owner": run["token"]}, status=403)
    assert bad[10:40] not in caplog.text


async def test_wrong_requests_are_named(service):
    for body, pointer in (
        ({}, "/name"),
        ({"name": "a/b"}, "/name"),
        ({"name": "r", "limits": ["5 per"]}, None),
        ({"name": "r", "ttl": 0}, "/ttl"),
        ({"name": "r", "max_repeats": 0}, "/max_repeats"),
    ):
        found = await post(service, "create", body, status=422)
        assert pointer is None or found["pointer"] == pointer
    run = await post(service, "create", {"name": "r", "limits": ["1/run"]})
    found = await post(service, "charge", {"token": run["token"], "cost": {"usdd": 1}}, status=422)
    assert "no node of the run counts 'usdd'" in found["detail"]
    await post(service, "stop", {"id": "ffff"}, status=404)
    await post(service, "stop", {"owner": run["owner"], "id": run["id"]}, status=422)


# ---- clients --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("service"), "policies: {api: 2/1m}\n") as found:
        yield found


@pytest.mark.process
def test_the_client_of_threads(running):
    with Client(running.url) as client:
        run = client.runs_create("r", ["0.02/run unit=usd"], ttl=60)
        child = client.runs_child(run.token, "c", carve={"usd": "0.01"})
        assert client.runs_charge(child.token, {"usd": "0.01"}).allowed
        with pytest.raises(RunDenied, match="r/c denied it") as caught:
            client.runs_charge(child.token, {"usd": "0.01"})
        assert (caught.value.node, caught.value.limit) == ("r/c", "usd_micros-run")
        assert caught.value.decision.retry_after is None
        client.runs_extend(run.owner, {"usd": 1}, ttl=90)
        assert client.runs_read(run.token).limits["usd_micros-run"].quota == 1_020_000
        client.runs_stop(id=run.id)
        with pytest.raises(RunDenied, match="was stopped"):
            client.runs_charge(run.token)
        client.runs_close(run.owner)
        assert next(each.id for each in client.runs().runs) == run.id
        with pytest.raises(TokenError):
            client.runs_read("tgr1.x.y")
        with pytest.raises(RunEndedError):
            client.runs_stop(id="none")
        with pytest.raises(RateLimitError, match="the run r"):
            client.runs_child(run.token, "late")
        with pytest.raises(ConfigError, match="no right to stop"):
            client.runs_stop(run.token)


@pytest.mark.process
async def test_the_client_of_tasks(running):
    async with AsyncClient(running.url) as client:
        run = await client.runs_create("r", ["1/run"])
        assert (await client.runs_charge(run.token, alternatives={"a": {"requests": 2}, "b": {}})).alternative == "b"
        assert (await client.runs_read(id=run.id)).used == {"requests": 1}
