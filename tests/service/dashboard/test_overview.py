"""The data of the dashboard: history, keys near their limit, denials, panels; and access to it."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.service.harness import ADMIN, DECISION, START, InProcessService
from tidegate.service.dashboard import near_limit, overview
from tidegate.service.dashboard.history import HISTORY_SECONDS, quantile, spread
from tidegate.service.decisions.stats import LATENCY_BUCKETS

POLICIES = {"api": "10/1m fixed_window", "login": "2/1m fixed_window", "trial": {"limits": "1/1m", "mode": "shadow"}}


@pytest.fixture
async def service():
    async with InProcessService(policies=POLICIES) as service:
        yield service


async def get_overview(service, since=None, **headers):
    query = "" if since is None else f"?since={since}"
    response = await service.http.get(f"/v1/overview{query}", headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


async def acquire(service, policy, key, times=1):
    return [(await service.post("acquire", {"policy": policy, "key": key})).json()["allowed"] for _ in range(times)]


# ---- history ---------------------------------------------------------------------------------------------------------


async def test_each_second_is_reported_once(service):
    await acquire(service, "login", "a", 3)
    service.clock.advance(1)
    first = await get_overview(service)
    assert first["tracks"]["login"] == [[2], [1], [0]]
    await acquire(service, "api", "a", 4)
    assert (await get_overview(service, first["tick"]))["tracks"]["login"] == [[], [], []]  # the second is not over
    service.clock.advance(1)
    second = await get_overview(service, first["tick"])
    assert (second["tick"], second["seconds"]) == (first["tick"] + 1, 1)
    assert second["tracks"] == {"login": [[0], [0], [0]], "api": [[4], [0], [0]]}
    complete = await get_overview(service)
    assert complete["tracks"] == {"login": [[2, 0], [1, 0], [0, 0]], "api": [[0, 4], [0, 0], [0, 0]]}


async def test_counts_are_spread_over_seconds_without_a_reader(service):
    await acquire(service, "api", "a", 7)
    service.clock.advance(3)
    assert (await get_overview(service))["tracks"]["api"][0] == [2, 2, 3]


async def test_the_history_is_bounded(service):
    await acquire(service, "api", "a")
    service.clock.advance(HISTORY_SECONDS * 10)
    data = await get_overview(service, 0)
    assert data["seconds"] == HISTORY_SECONDS
    assert [len(column) for column in (*data["tracks"]["api"], *data["latency"])] == [HISTORY_SECONDS] * 5
    assert sum(data["tracks"]["api"][0]) == 1


async def test_waiting_calls_are_reported_by_policy(service):
    await acquire(service, "login", "a", 2)
    waiting = asyncio.create_task(service.post("acquire", {"policy": "login", "key": "a", "wait": 30}))
    while not service.decider.waiting:
        await asyncio.sleep(0)
    service.app.overview.history.tick -= 1  # the manual clock does not advance while a call waits
    data = await get_overview(service)
    assert data["waiting"] == 1
    assert {policy["name"]: policy["waiting"] for policy in data["policies"]} == {"api": 0, "login": 1, "trial": 0}
    assert data["tracks"]["login"][2] == [1]
    await waiting


async def test_a_running_service_records_history_with_a_timer():
    async with InProcessService(policies=POLICIES) as service:
        service.app.overview.start()
        assert service.app.overview._timer is not None  # noqa: SLF001 - no public attribute shows it
        service.app.overview.close()
        assert service.app.overview._timer is None  # noqa: SLF001 - as above


@pytest.mark.parametrize("since", ["x", "-1", "1.5", "", "1&since=2", "9" * 17, "%D9%A3"])
async def test_an_invalid_tick_is_refused(service, since):
    response = await service.http.get(f"/v1/overview?since={since}")
    assert (response.status_code, response.json()["pointer"]) == (422, "/since")


@pytest.mark.parametrize(("share", "expected"), [(0.5, 75), (0.75, 100), (0.99, 246), (1.0, 250)])
def test_quantiles_are_within_their_bucket(share, expected):
    counts = [0] * (len(LATENCY_BUCKETS) + 1)
    counts[LATENCY_BUCKETS.index(100)], counts[LATENCY_BUCKETS.index(250)] = 75, 25
    counts[LATENCY_BUCKETS.index(100)] = 75
    assert quantile(counts, share) == pytest.approx(expected, abs=10)
    assert quantile([0] * len(counts), share) is None
    beyond = [0] * len(LATENCY_BUCKETS) + [1]
    assert quantile(beyond, share) == LATENCY_BUCKETS[-1]


@pytest.mark.parametrize("amount", [0, 1, 7, 1000])
def test_spread_counts_add_up(amount):
    shared = list(spread(amount, 6))
    assert (sum(shared), len(shared)) == (amount, 6)
    assert max(shared) - min(shared) <= 1


# ---- near a limit, denials -------------------------------------------------------------------------------------------


async def test_keys_near_their_limit_come_first(service):
    await get_overview(service)  # a reader of the overview exists
    await acquire(service, "api", "far", 3)
    await acquire(service, "api", "close", 9)
    await acquire(service, "login", "out", 3)
    service.clock.advance(20)
    data = (await get_overview(service))["near"]
    assert [(each["key"], each["used"], each["remaining"], each["reset_after"]) for each in data] == [
        ("out", 2, 0, 40.0),
        ("close", 9, 1, 40.0),
        ("far", 3, 7, 40.0),
    ]
    service.clock.advance(40)
    assert (await get_overview(service))["near"] == []


async def test_without_a_reader_only_denied_keys_are_recorded(service):
    await acquire(service, "api", "quiet", 9)
    await acquire(service, "login", "out", 3)
    assert [each["key"] for each in (await get_overview(service))["near"]] == ["out"]


async def test_a_reset_removes_a_key(service):
    await acquire(service, "login", "out", 3)
    await service.post("reset", {"policy": "login", "key": "out"})
    assert (await get_overview(service))["near"] == []


async def test_the_number_of_recorded_keys_is_bounded(service):
    notes = near_limit.NearLimitKeys()
    decision = await service.decider.store.apply_async(
        "peek", ((service.decider.policies.entries["api"].policy, "k", (1,)),)
    )
    for number in range(near_limit.MAX_KEYS * 3):
        notes.note("api", f"k{number}", decision[0])
        assert len(notes.seen) <= near_limit.MAX_KEYS
    assert ("api", f"k{near_limit.MAX_KEYS * 3 - 1}") in notes.seen
    assert notes.left == 0


async def test_denials_have_a_time_a_key_and_a_reason(service):
    await acquire(service, "login", "a", 3)
    service.clock.advance(1)
    await acquire(service, "trial", "b", 2)
    (await service.post("acquire", {"policy": "api", "key": ["x", "y"], "cost": 99})).json()
    data = (await get_overview(service))["denials"]
    assert data == [
        {"at": (START + 1) * 1000, "policy": "api", "key": ["x", "y"], "violated": ["1m"], "retry_after": None,
         "shadow": False},
        {"at": (START + 1) * 1000, "policy": "trial", "key": "b", "violated": ["1m"], "retry_after": 60.0,
         "shadow": True},
        {"at": START * 1000, "policy": "login", "key": "a", "violated": ["1m"], "retry_after": 60.0, "shadow": False},
    ]  # fmt: skip
    counts = {
        policy["name"]: (policy["admitted"], policy["denied"]) for policy in (await get_overview(service))["policies"]
    }
    assert counts == {"api": (0, 1), "login": (2, 1), "trial": (2, 0)}


async def test_blocks_are_reported(service):
    await service.post("block", {"policy": "login", "key": "a", "seconds": 60})
    assert (await get_overview(service))["blocks"] == [{"policy": "login", "key": "a", "seconds": 60.0}]


# ---- panels ----------------------------------------------------------------------------------------------------------


async def test_a_panel_that_fails_or_hangs_does_not_affect_others(service, monkeypatch):
    monkeypatch.setattr(overview, "PANEL_TIMEOUT", 0.01)

    async def hang():
        await asyncio.Event().wait()

    async def fine():
        return [1]

    def fail():
        raise OSError("the disk is gone")

    service.app.panels |= {"a": hang, "b": fail, "c": fine, "d": lambda: {"x": 1}}
    assert (await get_overview(service))["panels"] == {
        "a": {"error": "no answer within 0.01 s"},
        "b": {"error": "the disk is gone"},
        "c": [1],
        "d": {"x": 1},
    }


async def test_panels_are_called_once_a_second_for_all_readers(service):
    calls = []

    async def panel():
        calls.append(service.clock.now())
        await asyncio.sleep(0)

    service.app.panels["a"] = panel
    await asyncio.gather(*(get_overview(service) for _ in range(5)))
    assert len(calls) == 1
    service.clock.advance(1)
    await get_overview(service)
    assert len(calls) == 2


# ---- access ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "given", "status"),
    [
        ({}, None, 200),
        ({"decision_token": DECISION}, None, 401),
        ({"decision_token": DECISION}, DECISION, 200),
        ({"decision_token": DECISION, "admin_token": ADMIN}, DECISION, 200),
        ({"decision_token": DECISION, "admin_token": ADMIN}, ADMIN, 200),
        ({"admin_token": ADMIN}, None, 401),
        ({"admin_token": ADMIN}, ADMIN, 200),
    ],
)
async def test_the_overview_needs_a_configured_token(tokens, given, status):
    async with InProcessService(policies=POLICIES, **tokens) as service:
        headers = {} if given is None else {"authorization": f"Bearer {given}"}
        assert (await service.http.get("/v1/overview", headers=headers)).status_code == status
        # The page itself contains no data. It learns whether to request a token.
        assert (await service.http.get("/")).status_code == 200
        assert (await service.http.get("/dashboard/access.json")).json() == {"token": bool(tokens)}


async def test_without_a_token_a_foreign_host_name_is_refused(service):
    response = await service.http.get("/v1/overview", headers={"host": "rebound.example:8080"})
    assert response.status_code == 403


async def test_files_have_security_header_fields(service):
    page = await service.http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for path in ("/", *(f"/dashboard/{name}" for name in ("app.js", "style.css", "icon.svg", "access.json"))):
        response = await service.http.get(path)
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["cache-control"] == "no-store"
        assert (await service.http.head(path)).content == b""
        assert (await service.http.post(path)).status_code == 405


@pytest.mark.parametrize("path", ["/dashboard/", "/dashboard/../decider.py", "/dashboard/none.js", "/index.html"])
async def test_unknown_paths_are_not_found(service, path):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(service.app), base_url="http://localhost") as client:
        response = await client.get(httpx.URL("http://localhost", raw_path=path.encode()))
    assert response.status_code == 404


async def test_files_are_short_local_and_without_unsafe_functions(service):
    files = service.app._files  # noqa: SLF001 - no public list exists
    assert {"/", "/dashboard/app.js", "/dashboard/style.css"} <= set(files)
    for path, reply in files.items():
        text = reply.body.decode()
        assert len(text.splitlines()) <= 300, path
        for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "https://"):
            assert unsafe not in text, (path, unsafe)
