"""The status line, as data: a pure function of the overview."""

from __future__ import annotations

import pytest

from tests.cases import cases
from tidegate.service._dashboard.findings import BAD, GOOD, WARNING, describe_share, find_all

SINCE = 1_728_000_000_000


def overview(**changes):
    """Return an overview in which nothing is wrong."""
    normal = {
        "at": SINCE + 30_000,
        "store": {"kind": "redis", "lost": False, "lost_since": None},
        "recent": {"admitted": 100, "denied": 0, "share": 0.0, "usual": 0.0, "since": None, "policies": {}, "keys": []},
        "policies": [
            {"name": "login", "on_store_error": "deny", "mode": "enforce"},
            {"name": "api", "on_store_error": "allow", "mode": "enforce"},
        ],
        "rules": {"adopted": 0, "refused": 0, "error": None, "since": None},
        "workers": [{"id": 11, "since": SINCE, "seconds_ago": 0.1}, {"id": 12, "since": SINCE, "seconds_ago": 0.3}],
        "panels": {},
    }
    return normal | changes


def recent(admitted, denied, keys=(), policies=None, usual=0.0):
    rows = [{"policy": policy, "key": key, "denied": count, "limits": ["1m"], "over": ["5 per minute"]}
            for policy, key, count in keys]  # fmt: skip
    by_policy = {"login": (denied, len(rows))} if policies is None else policies
    found = {"admitted": admitted, "denied": denied, "share": 0.0, "usual": usual, "since": SINCE}
    return found | {"policies": by_policy, "keys": rows}


def texts(data):
    return [(finding.level, finding.text, finding.meaning) for finding in find_all(data)]


# ---- nothing is wrong ------------------------------------------------------------------------------------------------


def test_a_quiet_service_says_so():
    assert texts(overview(recent=recent(0, 0))) == [
        (GOOD, "No calls in the last minute", "No calls are denied or waiting.")
    ]
    assert texts(overview()) == [(GOOD, "All calls admitted", "No call was denied in the last minute.")]


def test_a_usual_share_of_denials_is_normal():
    usual = recent(70, 30, [("login", "a", 30)], usual=0.25)
    assert texts(overview(recent=usual)) == [
        (GOOD, "Normal: 30 % of calls denied", "In the last minute; not more than usual.")
    ]
    assert texts(overview(recent=recent(9_999, 9)))[0][1] == "Normal: less than 1 % of calls denied"


def test_a_worker_that_does_not_respond_is_named():
    workers = [{"id": 11, "since": SINCE, "seconds_ago": 2.5}, {"id": 12, "since": SINCE, "seconds_ago": 0.3}]
    ((level, text, meaning),) = texts(overview(workers=workers))
    assert (level, text) == (BAD, "1 of 2 workers not responding: process 11")
    assert meaning == "Calls on its connections wait until the service replaces it, within seconds."


# ---- denials ---------------------------------------------------------------------------------------------------------


def test_one_key_that_is_denied_is_named_with_its_limit():
    (finding,) = find_all(overview(recent=recent(500, 500, [("login", "203.0.113.77", 380), ("login", "b", 20)])))
    assert finding.level == BAD
    assert finding.text == "Half of all calls denied: login, 203.0.113.77 (76 %)"
    assert finding.meaning == (
        "203.0.113.77 is over 5 per minute and has 76 % of the denials in the last minute. "
        "Other keys have limits of their own."
    )
    assert (finding.since, finding.policy, finding.key) == (SINCE, "login", "203.0.113.77")


def test_many_keys_of_one_policy_are_counted():
    keys = [("login", f"key-{number}", 2) for number in range(40)]
    data = overview(recent=recent(900, 100, keys, {"login": (90, 412), "api": (10, 3)}))
    (finding,) = find_all(data)
    assert (finding.level, finding.text) == (WARNING, "10 % of all calls denied: login, 412 keys (90 %)")
    assert finding.meaning == "login has 90 % of the denials in the last minute, spread over 412 keys."
    assert (finding.policy, finding.key) == ("login", None)


def test_an_episode_that_has_just_begun_has_the_share_since_its_start():
    (finding,) = find_all(overview(recent=recent(800, 200, [("login", "a", 200)]) | {"share": 0.8}))
    assert (finding.level, finding.title) == (BAD, "80 % of all calls denied")


def test_the_share_of_the_last_minute_is_not_said_of_a_longer_time():
    data = overview(recent=recent(800, 200, [("login", "a", 200)]), at=SINCE + 3_600_000)
    (finding,) = find_all(data)
    assert finding.title + finding.since_text == "20 % of all calls denied in the last minute, more than usual since"


def test_several_policies_are_listed():
    policies = {"a": (30, 9), "b": (35, 9), "c": (20, 9), "d": (15, 9)}
    (finding,) = find_all(overview(recent=recent(0, 100, [("a", "k", 5)], policies)))
    assert finding.text == "All calls denied: b (35 %), a (30 %), c (20 %)"
    assert finding.policy is None


def test_a_denial_is_never_0_percent():
    policies = {"a": (30, 9)} | {f"p{number}": (1, 1) for number in range(200)}
    (finding,) = find_all(overview(recent=recent(0, 230, [("a", "k", 5)], policies)))
    assert finding.text == "All calls denied: a (13 %), p0 (less than 1 %), p1 (less than 1 %)"


def test_a_blocked_key_is_not_over_a_limit():
    data = recent(10, 90, [("login", "bad", 90)])
    data["keys"][0]["limits"] = ["blocked"]
    (finding,) = find_all(overview(recent=data))
    assert (
        finding.meaning
        == "bad is blocked and has 100 % of the denials in the last minute. Other keys have limits of their own."
    )


def test_the_parts_of_a_key_are_separated():
    (finding,) = find_all(overview(recent=recent(0, 50, [("login", ["tenant", "user"], 50)])))
    assert finding.text == "All calls denied: login, tenant \u203a user (100 %)"


def test_a_long_name_keeps_its_end():
    key = f"tenant-{'x' * 200}-eu-7"
    (finding,) = find_all(overview(recent=recent(0, 50, [("login", key, 50)])))
    assert finding.key == key
    assert finding.detail.startswith("login, tenant-xxx")
    assert finding.detail.endswith("xxx-eu-7 (100 %)")
    assert len(finding.detail) < 80


@pytest.mark.parametrize(("admitted", "denied"), [(100, 9), (1000, 40)])
def test_few_denials_are_no_finding(admitted, denied):
    assert texts(overview(recent=recent(admitted, denied, [("login", "a", denied)])))[0][0] == GOOD


@cases(
    ("share", "words"),
    [
        (0.1, "10 % of all calls denied"),
        (0.25, "A quarter of all calls denied"),
        (0.33, "A third of all calls denied"),
        (0.5, "Half of all calls denied"),
        (0.58, "58 % of all calls denied"),
        (0.66, "Two thirds of all calls denied"),
        (0.75, "Three quarters of all calls denied"),
        (0.99, "Nearly all calls denied"),
        (1.0, "All calls denied"),
    ],
)
def test_shares_in_words(share, words):
    assert describe_share(share) == words


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_a_lost_store_comes_first_and_says_what_each_policy_does():
    lost = {"kind": "redis", "lost": True, "lost_since": SINCE}
    policies = [
        {"name": name, "on_store_error": mode, "mode": "enforce"}
        for name, mode in zip("abcd", ("deny", "deny", "allow", "local"), strict=True)
    ]
    policies.append({"name": "trial", "on_store_error": "deny", "mode": "shadow"})  # it admits every call as always
    data = overview(store=lost, policies=policies, recent=recent(0, 100, [("a", "k", 10)], {"a": (10, 1)}))
    store, denials = find_all(data)
    assert (store.level, store.text, store.since) == (BAD, "Store unavailable: redis", SINCE)
    assert store.meaning == (
        "Until it is available again: a and b deny every call; c admits every call, without limits; d decides with a "
        "local share of each limit."
    )
    assert denials.text == "All calls denied: mostly because the store is unavailable"
    assert denials.key is None  # no key is to blame


def test_a_refused_file_says_why_and_that_the_previous_policies_stay():
    rules = {"adopted": 1, "refused": 3, "error": "/etc/tidegate/service.yaml:4: limit: expected …", "since": SINCE}
    assert texts(overview(rules=rules)) == [(
        WARNING, "Configuration file refused: service.yaml:4: limit: expected …",
        "The previous policies stay in effect until the file is corrected.",
    )]  # fmt: skip
    assert texts(overview(rules=rules | {"error": None}))[0][0] == GOOD  # only the present file counts


def test_a_bus_that_is_gone():
    (found,) = texts(overview(panels={"bus": {"connected": False, "where": "nats://host:4222", "counts": {}}}))
    assert found[:2] == (WARNING, "The bus is not connected: nats://host:4222")
    assert texts(overview(panels={"bus": {"connected": True, "where": "", "counts": {}}}))[0][0] == GOOD
    assert texts(overview(panels={"bus": {"error": "no response"}}))[0][1] == "The bus is not connected: no response"


def tier(used, quota=100, runs_out_in=None, reset_after=7200.0):
    return {"name": "day", "used": used, "quota": quota, "remaining": max(0, quota - used), "reset_after": reset_after,
            "runs_out_in": runs_out_in}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (tier(100), (BAD, "A budget is used up: tasks per day, 100 of 100",
                     "Tasks are denied until it resets in 2 h.")),
        (tier(50, runs_out_in=720.0), (
            WARNING, "A budget will run out soon: tasks per day, 50 of 100",
            "At this rate, tasks are denied in 12 min, until it resets in 2 h.")),
        (tier(95), (WARNING, "A budget is nearly used up: tasks per day, 95 of 100",
                    "The remaining quota must last until it resets in 2 h.")),
        (tier(50), (GOOD, "All calls admitted", "No call was denied in the last minute.")),
        (tier(50, runs_out_in=7300.0), (GOOD, "All calls admitted", "No call was denied in the last minute.")),
    ],
)  # fmt: skip
def test_budgets_near_their_end(row, expected):
    assert texts(overview(panels={"budgets": [{"name": "tasks", "tiers": [row]}]})) == [expected]


def test_a_provider_that_refuses():
    provider = {"name": "quotes", "frozen_for": 12.0, "capacity": 30, "limits": [{"quota": 60}]}
    found = texts(overview(panels={"sources": {"providers": [provider]}}))
    assert found == [(WARNING, "A provider refuses calls: quotes", "Calls to it wait for another 12 s.")]
    found = texts(overview(panels={"sources": {"providers": [provider | {"frozen_for": 0}]}}))
    assert found[0][:2] == (WARNING, "A provider has a reduced capacity: quotes, reduced to 30")
    assert (
        texts(overview(panels={"sources": {"providers": [provider | {"frozen_for": 0, "capacity": 60}]}}))[0][0] == GOOD
    )


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("paused", (
            "A provider refuses calls: chat, key-b",
            "Calls go to other members of the pool for another 12 s.")),
        ("key rejected", (
            "A provider rejects its key: chat, key-b",
            "Calls go to other members of the pool. Replace the key of this member.")),
    ],
)  # fmt: skip
def test_a_member_of_a_pool_that_refuses(state, expected):
    members = [{"pool": "chat", "member": "key-a", "state": "ready", "frozen_for": 0.0},
               {"pool": "chat", "member": "key-b", "state": state, "frozen_for": 12.0}]  # fmt: skip
    assert texts(overview(panels={"pools": members})) == [(WARNING, *expected)]


def test_a_frozen_swarm():
    agents = [
        {"id": name, "resources": [{"name": "openai", "frozen_for": seconds}]}
        for name, seconds in (("a", 4.0), ("b", 40.0))
    ]
    found = texts(overview(panels={"swarm": {"agents": agents}}))
    assert found == [(WARNING, "A resource of the swarm is frozen: openai", "2 agents send nothing for another 40 s.")]
    reductions = [{"resource": "openai", "at": at, "reason": reason} for at, reason in ((2, "received 429"), (1, ""))]
    found = texts(overview(panels={"swarm": {"agents": agents[:1], "reductions": reductions}}))
    assert found == [
        (WARNING, "A resource of the swarm is frozen: openai, received 429", "1 agent sends nothing for another 4 s.")
    ]


def test_panels_that_failed_are_no_finding():
    failed = {name: {"error": "no response"} for name in ("sources", "swarm", "budgets")}
    assert texts(overview(panels=failed))[0][0] == GOOD
