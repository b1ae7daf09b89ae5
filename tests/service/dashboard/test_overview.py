"""/v1/overview: history, keys near their limit, denials, panels and access; and the files of the page."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.service.harness import ADMIN, DECISION, START, InProcessService, http_client
from tidegate.observe._histogram import quantile
from tidegate.service._dashboard import overview
from tidegate.service._dashboard.history import HISTORY_SECONDS, MAX_POLICIES, spread
from tidegate.service._dashboard.static_files import read_files
from tidegate.service._decisions import near_limit
from tidegate.service._decisions.stats import LATENCY_BUCKETS

POLICIES = {"api": "10/1m fixed_window", "login": "2/1m fixed_window", "trial": {"limits": "1/1m", "mode": "shadow"}}


@pytest.fixture
async def site():
    async with InProcessService(policies=POLICIES) as site:
        yield site


async def get_overview(site, since=None, **headers):
    query = "" if since is None else f"?since={since}"
    response = await site.http.get(f"/v1/overview{query}", headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


async def acquire(site, policy, key, times=1):
    return [(await site.post("acquire", {"policy": policy, "key": key})).json()["allowed"] for _ in range(times)]


# ---- history ---------------------------------------------------------------------------------------------------------


async def test_each_second_is_returned_once(site):
    await acquire(site, "login", "a", 3)
    site.clock.advance(1)
    first = await get_overview(site)
    assert first["tracks"]["login"] == [[2], [1], [0]]
    await acquire(site, "api", "a", 4)
    assert (await get_overview(site, first["tick"]))["tracks"]["login"] == [[], [], []]  # the second is not over
    site.clock.advance(1)
    second = await get_overview(site, first["tick"])
    assert (second["tick"], second["seconds"]) == (first["tick"] + 1, 1)
    assert second["tracks"] == {"login": [[0], [0], [0]], "api": [[4], [0], [0]]}
    complete = await get_overview(site)
    assert complete["tracks"] == {"login": [[2, 0], [1, 0], [0, 0]], "api": [[0, 4], [0, 0], [0, 0]]}


async def test_calls_are_spread_over_the_seconds_since_the_last_sample(site):
    await acquire(site, "api", "a", 7)
    site.clock.advance(3)
    assert (await get_overview(site))["tracks"]["api"][0] == [2, 2, 3]


async def test_the_total_has_every_policy():
    policies = {f"policy-{number}": "9/1m" for number in range(MAX_POLICIES + 30)}
    async with InProcessService(policies=policies) as site:
        for name in policies:
            await acquire(site, name, "a")
        site.clock.advance(1)
        result = await get_overview(site)
        assert result["total"] == [[MAX_POLICIES + 30], [0], [0]]
        assert len(result["tracks"]) == MAX_POLICIES


async def test_the_history_is_bounded(site):
    await acquire(site, "api", "a")
    site.clock.advance(HISTORY_SECONDS * 10)
    result = await get_overview(site, 0)
    assert result["seconds"] == HISTORY_SECONDS
    assert [len(column) for column in (*result["tracks"]["api"], *result["latency"])] == [HISTORY_SECONDS] * 5
    assert sum(result["tracks"]["api"][0]) == 1


async def test_waiting_calls_are_counted_by_policy(site):
    await acquire(site, "login", "a", 2)
    waiting = asyncio.create_task(site.post("acquire", {"policy": "login", "key": "a", "timeout": 30}))
    while not site.decider.waiting:
        await asyncio.sleep(0)
    site.app.overview.history.seconds.tick -= 1  # the virtual clock does not advance while a call waits
    result = await get_overview(site)
    assert result["waiting"] == 1
    assert {policy["name"]: policy["waiting"] for policy in result["policies"]} == {"api": 0, "login": 1, "trial": 0}
    assert result["tracks"]["login"][2] == [1]
    await waiting


async def test_a_running_service_samples_with_a_timer(monkeypatch):
    loop, timers = asyncio.get_running_loop(), []
    call_later = loop.call_later

    def recorded(*arguments):
        timers.append(call_later(*arguments))
        return timers[-1]

    async with InProcessService(policies=POLICIES) as site:
        monkeypatch.setattr(loop, "call_later", recorded)
        site.app.overview.start()
        (timer,) = timers
        assert 0 < timer.when() - loop.time() <= 1
        site.app.overview.close()
        assert timer.cancelled()


@pytest.mark.parametrize("since", ["x", "-1", "1.5", "", "1&since=2", "9" * 17, "%D9%A3"])
async def test_an_invalid_tick_is_rejected(site, since):
    response = await site.http.get(f"/v1/overview?since={since}")
    assert (response.status_code, response.json()["pointer"]) == (422, "/since")


@pytest.mark.parametrize(("fraction", "expected"), [(0.5, 75), (0.75, 100), (0.99, 246), (1.0, 250)])
def test_quantiles_lie_within_their_bucket(fraction, expected):
    counts = [0] * (len(LATENCY_BUCKETS) + 1)
    counts[LATENCY_BUCKETS.index(100)], counts[LATENCY_BUCKETS.index(250)] = 75, 25
    counts[LATENCY_BUCKETS.index(100)] = 75
    assert quantile(LATENCY_BUCKETS, counts, fraction) == pytest.approx(expected, abs=10)
    assert quantile(LATENCY_BUCKETS, [0] * len(counts), fraction) is None
    beyond = [0] * len(LATENCY_BUCKETS) + [1]
    assert quantile(LATENCY_BUCKETS, beyond, fraction) == LATENCY_BUCKETS[-1]


@pytest.mark.parametrize("amount", [0, 1, 7, 1000])
def test_spread_amounts_add_up(amount):
    shared = list(spread(amount, 6))
    assert (sum(shared), len(shared)) == (amount, 6)
    assert max(shared) - min(shared) <= 1


# ---- keys near a limit, denials --------------------------------------------------------------------------------------


async def test_keys_near_their_limit_come_first(site):
    await get_overview(site)  # from now on allowed calls are recorded
    await acquire(site, "api", "far", 3)
    await acquire(site, "api", "close", 9)
    await acquire(site, "login", "out", 3)
    site.clock.advance(20)
    near = (await get_overview(site))["near"]
    assert [(each["key"], each["used"], each["remaining"], each["reset_after"]) for each in near] == [
        ("out", 2, 0, 40.0),
        ("close", 9, 1, 40.0),
        ("far", 3, 7, 40.0),
    ]
    site.clock.advance(40)
    assert (await get_overview(site))["near"] == []


async def test_while_no_page_is_open_only_denied_keys_are_recorded(site):
    await acquire(site, "api", "quiet", 9)
    await acquire(site, "login", "out", 3)
    assert [each["key"] for each in (await get_overview(site))["near"]] == ["out"]


async def test_a_reset_key_is_removed(site):
    await acquire(site, "login", "out", 3)
    await site.post("reset", {"policy": "login", "key": "out"})
    assert (await get_overview(site))["near"] == []


async def test_recorded_keys_are_bounded(site):
    keys = near_limit.NearLimitKeys()
    decision = await site.decider.store.apply_async("peek", ((site.decider.policies.entries["api"].policy, "k", (1,)),))
    for number in range(near_limit.MAX_KEYS * 3):
        keys.record("api", f"k{number}", decision[0])
        assert len(keys.decisions) <= near_limit.MAX_KEYS
    assert ("api", f"k{near_limit.MAX_KEYS * 3 - 1}") in keys.decisions
    assert keys.samples_left == 0


async def test_denials_have_time_key_and_violated_limits(site):
    await acquire(site, "login", "a", 3)
    site.clock.advance(1)
    await acquire(site, "trial", "b", 2)
    (await site.post("acquire", {"policy": "api", "key": ["x", "y"], "cost": 99})).json()
    denials = (await get_overview(site))["denials"]
    assert denials == [
        {"at": (START + 1) * 1000, "policy": "api", "key": ["x", "y"], "violated": ["1m"], "retry_after": None,
         "shadow": False, "over": ["10 per minute"]},
        {"at": (START + 1) * 1000, "policy": "trial", "key": "b", "violated": ["1m"], "retry_after": 60.0,
         "shadow": True, "over": ["1 per minute"]},
        {"at": START * 1000, "policy": "login", "key": "a", "violated": ["1m"], "retry_after": 60.0, "shadow": False,
         "over": ["2 per minute"]},
    ]  # fmt: skip
    counts = {
        policy["name"]: (policy["admitted"], policy["denied"]) for policy in (await get_overview(site))["policies"]
    }
    assert counts == {"api": (0, 1), "login": (2, 1), "trial": (2, 0)}


async def test_blocks_are_returned(site):
    await site.post("block", {"policy": "login", "key": "a", "seconds": 60})
    assert (await get_overview(site))["blocks"] == [
        {"policy": "login", "key": "a", "seconds": 60.0, "reason": "", "actor": ""}
    ]


# ---- panels ----------------------------------------------------------------------------------------------------------


async def test_a_panel_that_fails_or_hangs_does_not_affect_others(site, monkeypatch):
    monkeypatch.setattr(overview, "PANEL_TIMEOUT", 0.01)

    async def hang():
        await asyncio.Event().wait()

    async def fine():
        return [1]

    def fail():
        raise OSError("the disk is gone")

    site.app.panels |= {"a": hang, "b": fail, "c": fine, "d": lambda: {"x": 1}}
    assert (await get_overview(site))["panels"] == {
        "a": {"error": "no response within 0.01 s"},
        "b": {"error": "the disk is gone"},
        "c": [1],
        "d": {"x": 1},
    }


async def test_panels_are_read_once_a_second_for_all_clients(site):
    calls = []

    async def panel():
        calls.append(site.clock.now())
        await asyncio.sleep(0)

    site.app.panels["a"] = panel
    await asyncio.gather(*(get_overview(site) for _ in range(5)))
    assert len(calls) == 1
    site.clock.advance(1)
    await get_overview(site)
    assert len(calls) == 2


# ---- access and files ------------------------------------------------------------------------------------------------


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
async def test_the_overview_requires_a_token_if_one_is_set(tokens, given, status):
    async with InProcessService(policies=POLICIES, **tokens) as site:
        headers = {} if given is None else {"authorization": f"Bearer {given}"}
        assert (await site.http.get("/v1/overview", headers=headers)).status_code == status
        # The page contains no data; access.json contains whether it needs a token.
        assert (await site.http.get("/")).status_code == 200
        assert (await site.http.get("/dashboard/access.json")).json() == {"token": bool(tokens)}


async def test_without_a_token_other_host_names_are_rejected(site):
    response = await site.http.get("/v1/overview", headers={"host": "rebound.example:8080"})
    assert response.status_code == 403


async def test_files_have_security_headers(site):
    page = await site.http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for path in ("/", *(f"/dashboard/{name}" for name in ("app.js", "style.css", "icon.svg", "access.json"))):
        response = await site.http.get(path)
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["cache-control"] == "no-store"
        assert (await site.http.head(path)).content == b""
        assert (await site.http.post(path)).status_code == 405


@pytest.mark.parametrize("path", ["/dashboard/", "/dashboard/../decider.py", "/dashboard/none.js", "/index.html"])
async def test_no_other_files_are_served(site, path):
    async with http_client(site.app, "http://localhost") as client:
        response = await client.get(httpx.URL("http://localhost", raw_path=path.encode()))
    assert response.status_code == 404


def test_files_are_short_and_use_no_markup_apis_or_external_urls():
    files = read_files(token=True)
    assert {"/", "/dashboard/app.js", "/dashboard/style.css"} <= set(files)
    for path, reply in files.items():
        text = reply.body.decode()
        assert len(text.splitlines()) <= 300, path
        for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "https://"):
            assert forbidden not in text, (path, forbidden)


async def test_inbound_requests_are_shown_by_domain_and_route():
    domains = [
        {
            "domain": "edge",
            "descriptors": [
                {"key": "path", "value": "/login", "rate_limit": {"unit": "minute", "requests_per_unit": 1}}
            ],
        }
    ]
    async with InProcessService(policies=POLICIES, domains=domains) as site:
        assert "inbound" not in (await get_overview(site))["panels"]
        body = {"domain": "edge", "descriptor": [["path", "/login"]]}
        assert [(await site.post("acquire", body)).json()["allowed"] for _ in range(3)] == [True, False, False]
        site.clock.advance(1)
        (route,) = (await get_overview(site))["panels"]["inbound"]
        assert (route["category"], route["admitted"], route["denied"]) == ("edge", 1, 2)
        assert "login" in route["route"]
