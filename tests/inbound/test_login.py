"""Login-style protection: only failures count; refunds and penalties after the response."""

import asyncio

import pytest

from tests.inbound.harness import AsgiHarness, WsgiHarness
from tidegate import ConfigError
from tidegate.inbound._rules.config import load_rules

LOGIN = {"limit": 3, "window": "15m", "endpoints": ["/login"]}


def config(**more):
    return {"categories": {"login": {**LOGIN, **more}}}


def login(api, status, **more):
    return api.request("/login", "POST", headers=[("X-Status", str(status))], **more)


def test_only_failed_responses_count(make_app):
    api = make_app(config(count=[401, 403]))
    assert [login(api, 200).status for _ in range(10)] == [200] * 10
    assert [login(api, status).remaining for status in (401, 200, 403, 302)] == [2, 2, 1, 1]
    assert login(api, 401).remaining == 0
    denied = login(api, 200)
    assert (denied.status, denied["retry-after"]) == (429, "900")
    assert api.reached.count("/login") == 15


def test_a_refund_applies_to_the_time_of_its_request(make_app):
    """A refund after a failure must not remove the failure, or the window would end at the wrong time."""
    api = make_app(config(count=[401]))
    login(api, 401)
    api.clock.advance(60)
    login(api, 200)
    login(api, 401)
    login(api, 401)
    assert login(api, 401)["retry-after"] == str(900 - 60)


def test_a_function_decides_which_responses_count(make_app):
    seen = []

    def failed(request, status):
        seen.append((request.path, status))
        return status != 200

    api = make_app(config(), count={"login": failed})
    assert [login(api, status).remaining for status in (200, 204, 200, 500)] == [3, 2, 2, 1]
    assert seen[:2] == [("/login", 200), ("/login", 204)]


def test_refund_and_penalty_by_status(make_app):
    api = make_app(config(limit=10, refund=["5xx", 304], penalty={"404": 4}))
    assert [login(api, status).remaining for status in (200, 503, 304, 404, 200)] == [9, 9, 9, 4, 3]
    assert login(api, 404).remaining == 0  # a penalty may exceed what is left
    assert login(api, 200).status == 429


def test_a_missing_response_counts_as_status_500():
    def broken(environ, start_response):
        raise RuntimeError("broken")

    api = WsgiHarness(config(count=["5xx"]), app=broken)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="broken"):
            api.request("/login")
    assert api.request("/login").status == 429


def test_a_missing_response_counts_as_status_500_in_tasks():
    async def broken(scope, receive, send):
        raise RuntimeError("broken")

    api = AsgiHarness(config(count=[401]), app=broken)
    for _ in range(5):  # not counted: the password was never wrong
        with pytest.raises(RuntimeError, match="broken"):
            api.request("/login")
    api.close()


async def test_a_thousand_concurrent_attempts_get_exactly_the_limit():
    """Attempts are charged before they are allowed, so they cannot share the last permit."""
    inside = []
    released = asyncio.Event()

    async def slow(scope, receive, send):
        inside.append(scope)
        await released.wait()
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    api = AsgiHarness(config(count=[401]), app=slow)
    attempts = [asyncio.create_task(api.request_async("/login")) for _ in range(1000)]
    while len(inside) < 3:
        await asyncio.sleep(0)
    released.set()
    statuses = [(await attempt).status for attempt in attempts]
    assert (statuses.count(401), statuses.count(429), len(inside)) == (3, 997, 3)
    await api.middleware.close()
    api.runner.close()


@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_only_failures_count_on_memory_and_sqlite(make_app, tmp_path, store):
    url = "memory://" if store == "memory" else f"sqlite:///{tmp_path / 'limits.db'}"
    api = make_app(config(count=[401]), store=url)
    assert [login(api, status).status for status in (401, 200, 401, 401, 200)] == [401, 200, 401, 401, 429]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"count": []}, "expected statuses such as [401, 403]"),
        ({"count": [999]}, "expected a status such as 401 or 5xx, not 999"),
        ({"count": ["7xx"]}, "expected a status such as 401 or 5xx, not 7xx"),
        ({"count": [401], "refund": [500]}, "cannot be combined with count"),
        ({"penalty": {"404": 0}}, "expected an integer of at least 1"),
        ({"penalty": {"x": 1}}, "expected a status"),
        (
            {"count": [401], "limits": ["1/1m", "1/1m unit=tokens"], "cost": {"tokens": 1}},
            "needs a cost that is an integer",
        ),
    ],
)
def test_invalid_charging_rules_are_rejected(more, message):
    category = {**LOGIN, **more}
    if "limits" in more:
        del category["limit"], category["window"]
    with pytest.raises(ConfigError) as error:
        load_rules({"categories": {"login": category}})
    assert message in str(error.value)
