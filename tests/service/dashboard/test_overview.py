"""What the page is told: the seconds, keys near their limit, denials, panels; and who may hear it."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.service.harness import ADMIN, DECISION, START, Site
from tidegate.service.dashboard import near_limit, overview
from tidegate.service.dashboard.history import HISTORY_SECONDS, quantile, spread
from tidegate.service.decisions.stats import LATENCY_BUCKETS

POLICIES = {"api": "10/1m fixed_window", "login": "2/1m fixed_window", "trial": {"limits": "1/1m", "mode": "shadow"}}


@pytest.fixture
async def site():
    async with Site(policies=POLICIES) as site:
        yield site


async def look(site, since=None, **headers):
    query = "" if since is None else f"?since={since}"
    answer = await site.http.get(f"/v1/overview{query}", headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def ask(site, policy, key, times=1):
    return [(await site.post("acquire", {"policy": policy, "key": key})).json()["allowed"] for _ in range(times)]


# ---- the seconds -----------------------------------------------------------------------------------------------------


async def test_each_second_is_told_once(site):
    await ask(site, "login", "a", 3)
    site.clock.advance(1)
    first = await look(site)
    assert first["tracks"]["login"] == [[2], [1], [0]]
    await ask(site, "api", "a", 4)
    assert (await look(site, first["tick"]))["tracks"]["login"] == [[], [], []]  # the second is not over
    site.clock.advance(1)
    second = await look(site, first["tick"])
    assert (second["tick"], second["seconds"]) == (first["tick"] + 1, 1)
    assert second["tracks"] == {"login": [[0], [0], [0]], "api": [[4], [0], [0]]}
    whole = await look(site)
    assert whole["tracks"] == {"login": [[2, 0], [1, 0], [0, 0]], "api": [[0, 4], [0, 0], [0, 0]]}


async def test_seconds_that_nobody_looked_at_share_what_happened(site):
    await ask(site, "api", "a", 7)
    site.clock.advance(3)
    assert (await look(site))["tracks"]["api"][0] == [2, 2, 3]


async def test_the_history_is_bounded(site):
    await ask(site, "api", "a")
    site.clock.advance(HISTORY_SECONDS * 10)
    told = await look(site, 0)
    assert told["seconds"] == HISTORY_SECONDS
    assert [len(column) for column in (*told["tracks"]["api"], *told["latency"])] == [HISTORY_SECONDS] * 5
    assert sum(told["tracks"]["api"][0]) == 1


async def test_who_waits_is_told_by_policy(site):
    await ask(site, "login", "a", 2)
    waiting = asyncio.create_task(site.post("acquire", {"policy": "login", "key": "a", "wait": 30}))
    while not site.decider.waiting:
        await asyncio.sleep(0)
    site.app.overview.history.tick -= 1  # time stands still while somebody waits for it
    told = await look(site)
    assert told["waiting"] == 1
    assert {policy["name"]: policy["waiting"] for policy in told["policies"]} == {"api": 0, "login": 1, "trial": 0}
    assert told["tracks"]["login"][2] == [1]
    await waiting


async def test_a_timer_writes_the_seconds_of_a_running_service():
    async with Site(policies=POLICIES) as site:
        site.app.overview.start()
        assert site.app.overview._timer is not None  # noqa: SLF001 - it is asked for nowhere else
        site.app.overview.close()
        assert site.app.overview._timer is None  # noqa: SLF001 - as above


@pytest.mark.parametrize("since", ["x", "-1", "1.5", "", "1&since=2", "9" * 17, "%D9%A3"])
async def test_an_odd_tick_is_refused(site, since):
    answer = await site.http.get(f"/v1/overview?since={since}")
    assert (answer.status_code, answer.json()["pointer"]) == (422, "/since")


@pytest.mark.parametrize(("share", "expected"), [(0.5, 75), (0.75, 100), (0.99, 246), (1.0, 250)])
def test_quantiles_lie_within_their_bucket(share, expected):
    counts = [0] * (len(LATENCY_BUCKETS) + 1)
    counts[LATENCY_BUCKETS.index(100)], counts[LATENCY_BUCKETS.index(250)] = 75, 25
    counts[LATENCY_BUCKETS.index(100)] = 75
    assert quantile(counts, share) == pytest.approx(expected, abs=10)
    assert quantile([0] * len(counts), share) is None
    beyond = [0] * len(LATENCY_BUCKETS) + [1]
    assert quantile(beyond, share) == LATENCY_BUCKETS[-1]


@pytest.mark.parametrize("amount", [0, 1, 7, 1000])
def test_what_is_spread_adds_up(amount):
    shared = list(spread(amount, 6))
    assert (sum(shared), len(shared)) == (amount, 6)
    assert max(shared) - min(shared) <= 1


# ---- near a limit, and denied ----------------------------------------------------------------------------------------


async def test_keys_near_their_limit_come_first(site):
    await look(site)  # somebody watches
    await ask(site, "api", "far", 3)
    await ask(site, "api", "close", 9)
    await ask(site, "login", "out", 3)
    site.clock.advance(20)
    told = (await look(site))["near"]
    assert [(each["key"], each["used"], each["remaining"], each["reset_after"]) for each in told] == [
        ("out", 2, 0, 40.0),
        ("close", 9, 1, 40.0),
        ("far", 3, 7, 40.0),
    ]
    site.clock.advance(40)
    assert (await look(site))["near"] == []


async def test_while_nobody_watches_only_denied_keys_are_noted(site):
    await ask(site, "api", "quiet", 9)
    await ask(site, "login", "out", 3)
    assert [each["key"] for each in (await look(site))["near"]] == ["out"]


async def test_a_key_that_is_reset_is_forgotten(site):
    await ask(site, "login", "out", 3)
    await site.post("reset", {"policy": "login", "key": "out"})
    assert (await look(site))["near"] == []


async def test_notes_are_bounded(site):
    notes = near_limit.NearLimitKeys()
    decision = await site.decider.store.apply_async("peek", ((site.decider.policies.entries["api"].policy, "k", (1,)),))
    for number in range(near_limit.MAX_KEYS * 3):
        notes.note("api", f"k{number}", decision[0])
        assert len(notes.seen) <= near_limit.MAX_KEYS
    assert ("api", f"k{near_limit.MAX_KEYS * 3 - 1}") in notes.seen
    assert notes.left == 0


async def test_denials_say_when_who_and_why(site):
    await ask(site, "login", "a", 3)
    site.clock.advance(1)
    await ask(site, "trial", "b", 2)
    (await site.post("acquire", {"policy": "api", "key": ["x", "y"], "cost": 99})).json()
    told = (await look(site))["denials"]
    assert told == [
        {"at": (START + 1) * 1000, "policy": "api", "key": ["x", "y"], "violated": ["1m"], "retry_after": None,
         "shadow": False},
        {"at": (START + 1) * 1000, "policy": "trial", "key": "b", "violated": ["1m"], "retry_after": 60.0,
         "shadow": True},
        {"at": START * 1000, "policy": "login", "key": "a", "violated": ["1m"], "retry_after": 60.0, "shadow": False},
    ]  # fmt: skip
    counts = {policy["name"]: (policy["admitted"], policy["denied"]) for policy in (await look(site))["policies"]}
    assert counts == {"api": (0, 1), "login": (2, 1), "trial": (2, 0)}


async def test_blocks_are_told(site):
    await site.post("block", {"policy": "login", "key": "a", "seconds": 60})
    assert (await look(site))["blocks"] == [{"policy": "login", "key": "a", "seconds": 60.0}]


# ---- panels ----------------------------------------------------------------------------------------------------------


async def test_a_panel_that_fails_or_hangs_harms_no_other(site, monkeypatch):
    monkeypatch.setattr(overview, "PANEL_TIMEOUT", 0.01)

    async def hang():
        await asyncio.Event().wait()

    async def fine():
        return [1]

    def fail():
        raise OSError("the disk is gone")

    site.app.panels |= {"a": hang, "b": fail, "c": fine, "d": lambda: {"x": 1}}
    assert (await look(site))["panels"] == {
        "a": {"error": "no answer within 0.01 s"},
        "b": {"error": "the disk is gone"},
        "c": [1],
        "d": {"x": 1},
    }


async def test_panels_are_asked_once_a_second_however_many_watch(site):
    asked = []

    async def panel():
        asked.append(site.clock.now())
        await asyncio.sleep(0)

    site.app.panels["a"] = panel
    await asyncio.gather(*(look(site) for _ in range(5)))
    assert len(asked) == 1
    site.clock.advance(1)
    await look(site)
    assert len(asked) == 2


# ---- who may hear it -------------------------------------------------------------------------------------------------


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
async def test_the_overview_needs_a_token_where_there_is_one(tokens, given, status):
    async with Site(policies=POLICIES, **tokens) as site:
        headers = {} if given is None else {"authorization": f"Bearer {given}"}
        assert (await site.http.get("/v1/overview", headers=headers)).status_code == status
        # The page has no data in it. It is told whether to ask for a token.
        assert (await site.http.get("/")).status_code == 200
        assert (await site.http.get("/dashboard/access.json")).json() == {"token": bool(tokens)}


async def test_without_a_token_no_other_host_name_leads_to_it(site):
    answer = await site.http.get("/v1/overview", headers={"host": "rebound.example:8080"})
    assert answer.status_code == 403


async def test_files_come_with_what_keeps_them_safe(site):
    page = await site.http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for path in ("/", *(f"/dashboard/{name}" for name in ("app.js", "style.css", "icon.svg", "access.json"))):
        answer = await site.http.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        assert (await site.http.head(path)).content == b""
        assert (await site.http.post(path)).status_code == 405


@pytest.mark.parametrize("path", ["/dashboard/", "/dashboard/../decider.py", "/dashboard/none.js", "/index.html"])
async def test_nothing_else_is_served(site, path):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(site.app), base_url="http://localhost") as client:
        answer = await client.get(httpx.URL("http://localhost", raw_path=path.encode()))
    assert answer.status_code == 404


async def test_every_script_is_short_and_none_comes_from_elsewhere(site):
    files = site.app._files  # noqa: SLF001 - there is no other list of them
    assert {"/", "/dashboard/app.js", "/dashboard/style.css"} <= set(files)
    for path, reply in files.items():
        text = reply.body.decode()
        assert len(text.splitlines()) <= 300, path
        for mark in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "https://"):
            assert mark not in text, (path, mark)
