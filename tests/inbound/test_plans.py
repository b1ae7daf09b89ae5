"""Limits chosen by the plan of a request."""

import asyncio
import json

import pytest

from tests.cases import cases
from tests.inbound.harness import AsgiHarness, run_websocket
from tidegate import ConfigError
from tidegate.inbound._rules.config import load_rules

STATS = "/api/admin/rate-limit-stats"
PLANS = {
    "categories": {
        "api": {
            "limit": 1,
            "window": "1m",
            "endpoints": ["/api/*"],
            "plans": {"free": "2/1m", "pro": ["4/1m", "100/1d"], "big": {"limit": 5, "window": "1m"}},
        },
        "other": {"limit": 7, "window": "1m", "endpoints": ["/other"]},
    }
}


def plan_of(request):
    return request.header("x-plan")


def plan(name):
    return {"headers": [("X-Plan", name)]}


def test_the_plan_chooses_the_limits(make_app):
    api = make_app(PLANS, plan=plan_of)
    assert api.statuses(2, "/api/x", peer="203.0.113.1") == [200, 429]
    for peer, (name, quota) in enumerate({"free": 2, "pro": 4, "big": 5}.items(), start=2):
        asked = {"peer": f"203.0.113.{peer}", **plan(name)}
        assert api.request("/api/x", **asked)["x-ratelimit-limit"] == str(quota)
        assert api.statuses(quota, "/api/x", **asked) == [200] * (quota - 1) + [429]
    assert api.request("/other", **plan("pro"))["x-ratelimit-limit"] == "7"  # it has no plans


def test_a_changed_plan_keeps_the_usage(make_app):
    api = make_app(PLANS, plan=plan_of)
    api.statuses(2, "/api/x", **plan("free"))
    assert api.request("/api/x", **plan("big")).remaining == 2


def test_an_unknown_plan_gets_the_limits_of_the_category_and_is_logged_once(make_app, caplog):
    api = make_app(PLANS, plan=plan_of)
    assert api.statuses(2, "/api/x", **plan("gold\n")) == [200, 429]
    warnings = [record.message for record in caplog.records if "no plan" in record.message]
    assert warnings == ["category api has no plan gold\\n: its own limits apply"]
    for number in range(300):
        api.request("/api/x", **plan(f"p{number}"))
    assert sum("no plan" in record.message for record in caplog.records) == 100


def test_charges_by_response_and_statistics_include_plans(make_app):
    config = {"categories": {"login": {"limit": 1, "endpoints": ["/login"], "count": [401], "plans": {"pro": "3/1h"}}}}
    api = make_app(config, plan=plan_of, admin_token="x" * 16)
    assert api.statuses(5, "/login", **plan("pro")) == [200] * 5
    failing = {"headers": [("X-Plan", "pro"), ("X-Status", "401")]}
    assert api.statuses(4, "/login", **failing) == [401, 401, 401, 429]
    stats = json.loads(api.request(f"{STATS}?top=1", peer="127.0.0.1").body)
    assert stats["decisions"]["login"] == {"allowed": 8, "denied": 1}
    assert stats["by_category"] == {"login": 1}
    body = json.dumps({"action": "reset", "key": "203.0.113.9"}).encode()
    assert api.request(STATS, "POST", [("Authorization", "Bearer " + "x" * 16)], body=body).status == 200
    assert api.statuses(1, "/login", **failing) == [401]


def test_websocket_messages_use_the_plan():
    config = {
        "categories": {
            "chat": {"limit": 1, "endpoints": [{"path": "/ws/*", "methods": ["MESSAGE"]}], "plans": {"pro": "3/1h"}}
        }
    }
    received = []

    async def app(scope, receive, send):
        while (message := await receive())["type"] != "websocket.disconnect":
            received.append(message.get("text"))

    for header, expected in (((b"x-plan", b"pro"), ["a", "b", "c"]), ((b"x-no", b"pro"), ["a"])):
        received.clear()
        api = AsgiHarness(config, app=app, plan=plan_of, on_message="drop")
        asyncio.run(run_websocket(api.middleware, "abcd", headers=[header]))
        assert [text for text in received if text] == expected
        api.close()


def test_a_reload_changes_plans_and_keeps_usage(make_app):
    api = make_app(PLANS, plan=plan_of)
    api.statuses(2, "/api/x", **plan("free"))
    changed = json.loads(json.dumps(PLANS))
    changed["categories"]["api"]["plans"] = {"free": "9/1m"}
    api.limiter.update_rules(load_rules(changed))
    assert api.request("/api/x", **plan("free")).remaining == 6


@cases(
    ("plans", "message"),
    [
        ({"pro": "x"}, r"categories\.api\.plans\.pro: expected a limit such as '60/1m'"),
        ({"pro": {"limt": 5}}, r"categories\.api\.plans\.pro\.limt: unknown setting: did you mean 'limit'\?"),
        ({"pro": {}}, r"categories\.api\.plans\.pro: needs a limit"),
        ({"pro": []}, r"categories\.api\.plans\.pro: "),
        (["pro"], r"categories\.api\.plans: expected a mapping, not a list"),
    ],
)
def test_mistakes_in_plans(make_app, plans, message):
    with pytest.raises(ConfigError, match=message):
        make_app({"categories": {"api": {"limit": 1, "endpoints": ["/"], "plans": plans}}}, plan=plan_of)


def test_plans_need_a_function(make_app):
    with pytest.raises(ConfigError, match="plan: category 'api' has plans: expected a function that returns the plan"):
        make_app(PLANS)
    with pytest.raises(ConfigError, match="plan: must be a function, not 'pro'"):
        make_app(PLANS, plan="pro")
