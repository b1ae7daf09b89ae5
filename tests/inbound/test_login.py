"""Login-style protection: only failures count; refunds and penalties after the response."""

import asyncio

import pytest

from tests.inbound.harness import AsgiDoor, WsgiDoor
from tidegate import ConfigError
from tidegate.inbound.rules.config import load_rules

LOGIN = {"limit": 3, "window": "15m", "endpoints": ["/login"]}


def config(**more):
    return {"categories": {"login": {**LOGIN, **more}}}


def login(api, status, **more):
    return api.ask("/login", "POST", headers=[("X-Status", str(status))], **more)


def test_only_failed_responses_count(door):
    api = door(config(count=[401, 403]))
    assert [login(api, 200).status for _ in range(10)] == [200] * 10
    assert [login(api, status).remaining for status in (401, 200, 403, 302)] == [2, 2, 1, 1]
    assert login(api, 401).remaining == 0
    denied = login(api, 200)
    assert (denied.status, denied["retry-after"]) == (429, "900")
    assert api.reached.count("/login") == 15


def test_a_success_is_given_back_to_its_own_instant(door):
    """The success after a failure must not free the failure: else the window would end early or late."""
    api = door(config(count=[401]))
    login(api, 401)
    api.clock.advance(60)
    login(api, 200)
    login(api, 401)
    login(api, 401)
    assert login(api, 401)["retry-after"] == str(900 - 60)


def test_by_a_function(door):
    seen = []

    def failed(request, status):
        seen.append((request.path, status))
        return status != 200

    api = door(config(), count={"login": failed})
    assert [login(api, status).remaining for status in (200, 204, 200, 500)] == [3, 2, 2, 1]
    assert seen[:2] == [("/login", 200), ("/login", 204)]


def test_refund_and_penalty_by_status(door):
    api = door(config(limit=10, refund=["5xx", 304], penalty={"404": 4}))
    assert [login(api, status).remaining for status in (200, 503, 304, 404, 200)] == [9, 9, 9, 4, 3]
    assert login(api, 404).remaining == 0  # a penalty may exceed what is left
    assert login(api, 200).status == 429


def test_a_response_that_never_comes_counts_as_a_failure():
    def broken(environ, start_response):
        raise RuntimeError("broken")

    api = WsgiDoor(config(count=["5xx"]), app=broken)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="broken"):
            api.ask("/login")
    assert api.ask("/login").status == 429


def test_a_response_that_never_comes_counts_as_a_failure_in_tasks():
    async def broken(scope, receive, send):
        raise RuntimeError("broken")

    api = AsgiDoor(config(count=[401]), app=broken)
    for _ in range(5):  # not counted: the password was never wrong
        with pytest.raises(RuntimeError, match="broken"):
            api.ask("/login")
    api.close()


async def test_a_thousand_attempts_at_once_get_the_limit_and_no_more():
    """Attempts are charged before they are let in: all of them look at the same last permit."""
    inside = []
    gate = asyncio.Event()

    async def slow(scope, receive, send):
        inside.append(scope)
        await gate.wait()
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    api = AsgiDoor(config(count=[401]), app=slow)
    attempts = [asyncio.create_task(api.asked("/login")) for _ in range(1000)]
    while len(inside) < 3:
        await asyncio.sleep(0)
    gate.set()
    statuses = [(await attempt).status for attempt in attempts]
    assert (statuses.count(401), statuses.count(429), len(inside)) == (3, 997, 3)
    await api.middleware.close()
    api.runner.close()


@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_on_other_stores(door, tmp_path, store):
    url = "memory://" if store == "memory" else f"sqlite:///{tmp_path / 'limits.db'}"
    api = door(config(count=[401]), store=url)
    assert [login(api, status).status for status in (401, 200, 401, 401, 200)] == [401, 200, 401, 401, 429]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"count": []}, "expected statuses such as [401, 403]"),
        ({"count": [999]}, "expected a status such as 401 or 5xx, not 999"),
        ({"count": ["7xx"]}, "expected a status such as 401 or 5xx, not 7xx"),
        ({"count": [401], "refund": [500]}, "stands beside count"),
        ({"penalty": {"404": 0}}, "expected an integer from 1"),
        ({"penalty": {"x": 1}}, "expected a status"),
        (
            {"count": [401], "limits": ["1/1m", "1/1m unit=tokens"], "cost": {"tokens": 1}},
            "needs a cost that is a plain",
        ),
    ],
)
def test_mistakes(more, message):
    category = {**LOGIN, **more}
    if "limits" in more:
        del category["limit"], category["window"]
    with pytest.raises(ConfigError) as error:
        load_rules({"categories": {"login": category}})
    assert message in str(error.value)
