"""/v1/key, /v1/history and /v1/audit: what is known of a key, of a time range, and of what was done."""

from __future__ import annotations

import pytest

from tests.service.harness import ADMIN, DECISION, START, InProcessService
from tidegate.service._config.settings import load_settings
from tidegate.service._decisions import audit
from tidegate.service._decisions.audit import AuditLog, Origin
from tidegate.stores._sqlite import SQLiteStore
from tidegate.testing import ManualClock

POLICIES = {"api": "10/1m fixed_window", "login": ["2/1m fixed_window", "20/1h"], "idle": "1/1m"}


@pytest.fixture
async def site():
    async with InProcessService(policies=POLICIES) as site:
        yield site


async def acquire(site, policy, key, times=1):
    return [(await site.post("acquire", {"policy": policy, "key": key})).json()["allowed"] for _ in range(times)]


async def get(site, path, **parameters):
    response = await site.http.get(f"/v1/{path}", params=parameters)
    assert response.status_code == 200, response.text
    return response.json()


# ---- a key -----------------------------------------------------------------------------------------------------------


async def test_a_key_is_described_by_all_policies_that_know_it(site):
    await acquire(site, "login", "k", 3)
    await acquire(site, "api", "k", 4)
    data = await get(site, "key", key="k")
    assert (data["seen"], data["other_policies"]) == (True, 1)
    api, login = data["policies"]
    assert (api["policy"], api["next"]) == ("api", {"allowed": True, "retry_after": 0.0, "over": []})
    assert [(each["text"], each["used"], each["remaining"]) for each in login["limits"]] == [
        ("2 per minute", 2, 0),
        ("20 per hour", 2, 18),
    ]
    assert login["next"] == {"allowed": False, "retry_after": 60.0, "over": ["2 per minute"]}
    assert [each["policy"] for each in data["denials"]] == ["login"]
    assert [(each["policy"], each["denied"]) for each in data["minutes"]] == [("login", 1)]


@pytest.mark.parametrize("key", ["ärger", "鍵/€", "a&b=c", " "])
async def test_a_key_may_have_any_characters(site, key):
    await acquire(site, "api", key)
    data = await get(site, "key", key=key)
    assert (data["key"], [each["policy"] for each in data["policies"]]) == (key, ["api"])


async def test_an_unknown_key_was_never_seen_and_stays_unknown(site):
    data = await get(site, "key", key="nobody")
    assert (data["seen"], data["policies"], data["other_policies"]) == (False, [], 3)
    assert (await get(site, "key", key="nobody"))["seen"] is False


async def test_a_blocked_key_has_its_reason_and_actor_and_its_next_call_is_denied(site):
    body = {"policy": "login", "key": ["tenant", "a/b"], "seconds": 60, "reason": "password guessing", "actor": "Ada"}
    assert (await site.post("block", body)).status_code == 200
    data = await get(site, "key", key=["tenant", "a/b"])
    (login,) = data["policies"]
    block = login["block"]
    assert (block["seconds"], block["reason"], block["actor"], block["at"]) == (
        60,
        "password guessing",
        "Ada",
        START * 1000,
    )
    assert login["next"] == {"allowed": False, "retry_after": 60.0, "over": ["blocked"]}
    assert [(each["action"], each["actor"]) for each in data["audit"]] == [("block", "Ada")]
    overview = await get(site, "overview")
    assert overview["blocks"][0]["reason"] == "password guessing"
    await site.post("unblock", {"policy": "login", "key": ["tenant", "a/b"]})
    data = await get(site, "key", key=["tenant", "a/b"])
    assert data["policies"] == []
    assert [each["action"] for each in data["audit"]] == ["unblock", "block"]


async def test_a_block_is_described_after_a_restart(tmp_path):
    clock = ManualClock(start=START)
    for _ in range(2):
        async with InProcessService(SQLiteStore(tmp_path / "limits.db", clock=clock), policies=POLICIES) as site:
            if (await get(site, "overview"))["audit"] == []:
                await site.post("block", {"policy": "login", "key": "k", "seconds": 60, "actor": "Ada"})
            else:
                await site.decider.blocks.refresh()
                (login,) = (await get(site, "key", key="k"))["policies"]
                assert (login["block"]["seconds"], login["block"]["actor"]) == (60.0, "Ada")


async def test_an_unblocked_key_is_blocked_nowhere(site):
    await site.post("block", {"policy": "login", "key": "k", "seconds": 60})
    assert await acquire(site, "login", "k", 2) == [False, False]
    await site.post("unblock", {"policy": "login", "key": "k"})
    data = await get(site, "overview")
    assert (data["near"], data["blocks"]) == ([], [])


@pytest.mark.parametrize("query", ["", "?key=" + "x" * 2000])
async def test_an_invalid_key_is_rejected(site, query):
    response = await site.http.get(f"/v1/key{query}")
    assert (response.status_code, response.json()["pointer"]) == (422, "/key")


# ---- a time range ----------------------------------------------------------------------------------------------------


async def test_the_history_of_a_range_in_the_finest_steps_that_reach_back(site):
    history = site.app.overview.history
    for _ in range(20):
        await acquire(site, "login", f"k{site.clock.now()}", 3)
        site.clock.advance(30)
        history.sample()
    now = (START + 600) * 1000
    recent = await get(site, "history", **{"from": now - 60_000, "to": now})
    assert (recent["step"], sum(recent["admitted"]), sum(recent["denied"])) == (1, 4, 2)
    hour = await get(site, "history", **{"from": now - 3_600_000, "to": now, "policy": "login"})
    assert (hour["step"], sum(hour["admitted"]), sum(hour["denied"])) == (10, 40, 20)
    middle = await get(site, "history", **{"from": now - 400_000, "to": now - 100_000})
    assert middle["end"] <= now - 100_000 + 10_000
    assert len(middle["admitted"]) == len(middle["states"]) == len(middle["p99"]) == 30
    day = await get(site, "history", **{"from": now - 86_400_000, "to": now})
    assert (day["step"], len(day["top"])) == (10, 20)  # these steps cover all that is known
    site.clock.advance(3600)
    assert (await get(site, "history", **{"from": now - 86_400_000, "to": now}))["step"] == 60
    other = await get(site, "history", **{"from": now - 3_600_000, "to": now, "policy": "idle"})
    assert (sum(other["admitted"]), other["top"]) == (0, [])


async def test_a_change_of_the_rules_is_marked(site):
    new = load_settings({"policies": {**POLICIES, "api": "20/1m", "more": "1/1s"}}).policies
    site.app.update_policies(new)
    data = await get(site, "overview")
    assert [(mark["kind"], mark["at"]) for mark in data["marks"]] == [("rules", START * 1000)]
    assert data["marks"][0]["text"] == "more added; api: 10/1m fixed_window → 20/1m"


@pytest.mark.parametrize("query", ["from=x", "to=-1", "from=1&from=2"])
async def test_an_invalid_range_is_rejected(site, query):
    assert (await site.http.get(f"/v1/history?{query}")).status_code == 422


@pytest.mark.parametrize(("path", "given", "status"), [
    ("key?key=a", None, 401), ("key?key=a", DECISION, 200), ("history", None, 401), ("history", DECISION, 200),
    ("audit", DECISION, 403), ("audit", ADMIN, 200),
])  # fmt: skip
async def test_tokens(path, given, status):
    async with InProcessService(policies=POLICIES, decision_token=DECISION, admin_token=ADMIN) as site:
        headers = {} if given is None else {"authorization": f"Bearer {given}"}
        assert (await site.http.get(f"/v1/{path}", headers=headers)).status_code == status


# ---- the audit log ---------------------------------------------------------------------------------------------------


async def test_every_change_is_recorded_with_its_address(site):
    for verb, more in (("block", {"seconds": 9}), ("unblock", {"reason": "sorry"}), ("reset", {"actor": "Ada"})):
        await site.post(verb, {"policy": "login", "key": "k", **more})
    entries = (await get(site, "audit"))["entries"]
    assert [(each["action"], each["seconds"], each["reason"], each["actor"]) for each in entries] == [
        ("reset", None, "", "Ada"),
        ("unblock", None, "sorry", ""),
        ("block", 9.0, "", ""),
    ]
    assert {each["address"] for each in entries} == {"127.0.0.1"}


async def test_the_log_is_kept_in_the_store_for_all_services(tmp_path):
    clock = ManualClock(start=START)
    stores = [SQLiteStore(tmp_path / "limits.db", clock=clock) for _ in range(2)]
    first, second = (AuditLog(store) for store in stores)
    for number in range(5):
        await first.add("block", "api", ("a", f"{number}"), Origin("Ada", "192.0.2.1", "r" * 500), 60.0)
        await second.add("reset", "api", f"{number}", Origin())
        clock.advance(20_000)  # more than a day in all
    restarted = AuditLog(stores[0])
    entries = await restarted.read()
    assert entries == await first.read()
    assert [entry.key for entry in entries] == [
        key for number in (4, 3, 2, 1, 0) for key in (("a", f"{number}"), f"{number}")
    ]
    assert len(entries[0].reason) == audit.MAX_REASON_LENGTH
    assert (await restarted.find_last("api", ("a", "2"), "block")).actor == "Ada"
    clock.advance(audit.KEPT_DAYS * audit.DAY)
    assert await AuditLog(stores[0]).read() == []
    for store in stores:
        store.close()


async def test_the_log_is_bounded(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(audit, "MAX_ENTRIES_PER_DAY", 7)
    clock = ManualClock(start=START)
    store = SQLiteStore(tmp_path / "limits.db", clock=clock)
    log = AuditLog(store)
    for number in range(9):
        await log.add("reset", "api", f"{number}", Origin())
    assert len(await AuditLog(store).read()) == 7
    assert len(await log.read()) == 9  # this process keeps the others
    assert "the audit log in the store is full" in caplog.text
    store.close()
