"""Clients that are denied too often are blocked for a while."""

import asyncio
import json

import pytest
from flask import Flask

from tests.cases import cases
from tests.inbound.harness import PEER, START, AsgiHarness, WsgiHarness, run_websocket
from tidegate import ConfigError
from tidegate.inbound import by_header, wsgi
from tidegate.inbound._rules.block_rule import read_block
from tidegate.inbound.flask import limit
from tidegate.testing import ManualClock

STATS = "/api/admin/rate-limit-stats"
TOKEN = "a-long-admin-token"  # noqa: S105 - of these tests
BLOCK = {"block_after": "3/1m", "block_for": "10m"}
ONE = {"categories": {"all": {"limit": 1, "window": "10s", "endpoints": ["/*"]}}}
END = "2024-10-04T00:10:00Z"  # START is 2024-10-04T00:00:00Z


def run_action(api, **action):
    headers = [("Authorization", f"Bearer {TOKEN}")]
    return json.loads(api.request(STATS, "POST", headers, body=json.dumps(action).encode()).body)


def stats(api):
    return json.loads(api.request(f"{STATS}?top=5", peer="127.0.0.1").body)


@pytest.mark.parametrize("place", ["config", "options"])
def test_so_many_denials_block_the_client_for_a_while(make_app, caplog, place):
    api = make_app({**ONE, **BLOCK}) if place == "config" else make_app(ONE, **BLOCK)
    assert api.statuses(3, "/") == [200, 429, 429]
    last = api.request("/")  # the third denial
    assert (last.status, last["retry-after"], last["x-ratelimit-reset"]) == (429, "600", str(START + 600))
    assert last.body == f"Rate limit exceeded too often. Blocked until {END}.".encode()
    api.clock.advance(599)
    blocked = api.request("/", headers=[("Accept", "application/json")])
    details = json.loads(blocked.body)
    assert (blocked.status, blocked["retry-after"]) == (429, "1")
    assert details["type"].endswith("#abnormal-usage-detected")
    assert details["detail"] == f"Rate limit exceeded too often. Blocked until {END}."
    assert api.request("/", peer="203.0.113.10").status == 200  # another client
    api.clock.advance(1)
    assert api.statuses(2, "/") == [200, 429]
    lines = [record.message for record in caplog.records if "denied too often" in record.message]
    assert lines == [f"client blocked because it was denied too often: {PEER}"]


def test_fewer_denials_within_the_period_do_not_block(make_app):
    api = make_app({**ONE, **BLOCK})
    for _ in range(10):
        assert api.statuses(2, "/") == [200, 429]
        api.clock.advance(31)


def test_a_block_shorter_than_the_period_does_not_return_at_the_next_denial(make_app):
    api = make_app({**ONE, "block_after": "3/1h", "block_for": "10s"})
    api.statuses(4, "/")
    api.clock.advance(10)
    assert api.statuses(2, "/") == [200, 429]
    assert api.request("/")["retry-after"] == "10"
    api.clock.advance(10)
    assert api.request("/").status == 200


def retry_times(api, count):
    replies = [api.request("/") for _ in range(count)]
    return [None if reply.status == 200 else reply["retry-after"] for reply in replies]


SEVERAL = {"block_after": {"3/1m": "2m", "5/1h": "1d"}}


@pytest.mark.parametrize("place", ["config", "options"])
def test_each_of_several_rules_counts_all_denials_and_the_longest_block_applies(make_app, place):
    api = make_app({**ONE, **SEVERAL}) if place == "config" else make_app(ONE, **SEVERAL)
    assert retry_times(api, 5) == [None, "10", "10", "120", "120"]
    api.clock.advance(120)
    # The fourth and the fifth denial within an hour.
    assert retry_times(api, 4) == [None, "10", "86400", "86400"]
    assert api.request("/", peer="203.0.113.10").status == 200  # another client
    api.clock.advance(86_400)
    assert api.statuses(3, "/") == [200, 429, 429]


def test_the_administrator_removes_the_blocks_of_all_rules(make_app):
    api = make_app({**ONE, **SEVERAL}, admin_token=TOKEN)
    api.statuses(4, "/")
    assert run_action(api, action="unblock", key=PEER)["found"] is True
    api.clock.advance(10)
    assert retry_times(api, 4) == [None, "10", "10", "120"]
    run_action(api, action="reset_all")
    assert retry_times(api, 4) == [None, "10", "10", "120"]


@pytest.mark.parametrize("kind", [AsgiHarness, WsgiHarness])
def test_processes_share_the_blocks_of_several_rules(kind, tmp_path):
    clock = ManualClock(start=START)
    url = f"sqlite:///{tmp_path}/limits.db"
    one, two = (kind({**ONE, **SEVERAL}, store=url, clock=clock) for _ in range(2))
    one.statuses(3, "/")
    two.request("/")
    assert [api.request("/")["retry-after"] for api in (one, two)] == ["120", "120"]
    for api in (one, two):
        api.close()


def test_a_single_rule_in_a_mapping_is_the_same_as_two_options():
    assert read_block({"3/1m": "10m"}, None) == read_block("3/1m", "10m")


def test_a_reload_may_add_a_rule(make_app, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"rate_limiting": {**ONE, **BLOCK}}))
    api = make_app(str(file))
    api.statuses(2, "/")
    file.write_text(json.dumps({"rate_limiting": {**ONE, **SEVERAL}}))
    api.middleware.request_limiter.reload()
    assert [api.request("/")["retry-after"] for _ in range(3)] == ["10", "10", "120"]


def test_blocks_are_listed_and_removed_by_the_administrator(make_app):
    api = make_app({**ONE, **BLOCK}, admin_token=TOKEN)
    api.statuses(4, "/")
    assert stats(api)["blocked_for_denials"] == {PEER: START + 600}
    assert run_action(api, action="unblock", key=PEER) == {"done": "unblock", "key": PEER, "found": True}
    assert run_action(api, action="unblock", key=PEER)["found"] is False
    assert stats(api)["blocked_for_denials"] == {}
    api.clock.advance(10)
    assert api.statuses(3, "/") == [200, 429, 429]  # the denials are forgotten, too


def test_custom_keys_are_blocked_and_unblocked_by_key(make_app):
    api = make_app({**ONE, **BLOCK}, key=by_header("x-tenant"), admin_token=TOKEN)
    ann, bob = {"headers": [("X-Tenant", "ann")]}, {"headers": [("X-Tenant", "bob")]}
    api.statuses(4, "/", **ann)
    assert api.request("/", **bob).status == 200  # from the same address
    (name,) = stats(api)["blocked_for_denials"]
    assert run_action(api, action="unblock", key=name)["found"] is True
    api.clock.advance(10)
    assert api.request("/", **ann).status == 200


@pytest.mark.parametrize("kind", [AsgiHarness, WsgiHarness])
def test_processes_that_share_a_store_share_blocks(kind, tmp_path):
    clock = ManualClock(start=START)
    url = f"sqlite:///{tmp_path}/limits.db"
    one, two = (kind({**ONE, **BLOCK}, store=url, clock=clock, admin_token=TOKEN) for _ in range(2))
    one.statuses(3, "/")
    two.request("/")
    assert [api.request("/")["retry-after"] for api in (one, two)] == ["600", "600"]
    assert run_action(two, action="unblock", key=PEER)["found"] is True
    clock.advance(10)
    assert one.request("/").status == 200
    for api in (one, two):
        api.close()


def test_denials_of_route_limits_count_and_blocks_apply_to_them():
    clock = ManualClock(start=START)
    app = Flask(__name__)

    @app.get("/")
    @limit("1/10s")
    def home():
        return "hello"

    config = {"defaults": False, **BLOCK}
    app.wsgi_app = wsgi.RateLimitMiddleware(app.wsgi_app, config, clock=clock)  # type: ignore[method-assign]  # as Flask documents
    client = app.test_client()
    replies = [client.get("/") for _ in range(4)]
    assert [reply.status_code for reply in replies] == [200, 429, 429, 429]
    assert [reply.headers["Retry-After"] for reply in replies[2:]] == ["10", "600"]
    clock.advance(60)
    blocked = client.get("/")
    assert (blocked.status_code, blocked.text) == (429, f"Rate limit exceeded too often. Blocked until {END}.")


def test_messages_over_the_limit_count():
    chat = {"limit": 1, "window": "1s", "endpoints": [{"path": "/ws/*", "methods": ["MESSAGE"]}]}
    received = []

    async def app(scope, receive, send):
        while (message := await receive())["type"] != "websocket.disconnect":
            received.append(message.get("text"))

    api = AsgiHarness({"categories": {"chat": chat}, **BLOCK}, app=app, on_message="drop")
    asyncio.run(run_websocket(api.middleware, "abcd"))
    api.clock.advance(2)
    asyncio.run(run_websocket(api.middleware, "ef"))
    assert [text for text in received if text] == ["a"]
    api.close()


def test_a_client_blocked_by_the_file_is_not_told_an_end(make_app):
    api = make_app({**ONE, **BLOCK, "blocked_clients": [PEER]})
    assert api.request("/").body == b"Rate limit exceeded. Try again later."


@cases(
    ("block", "message"),
    [
        ({"block_after": "3/1m"}, "block_after: requires block_for, a period such as '10m'"),
        ({"block_for": "3m"}, "block_for: requires block_after, the number of denials per period such as '20/1m'"),
        ({"block_after": "many", "block_for": "3m"}, "block_after: expected denials per period such as '20/1m'"),
        ({"block_after": "3/1m", "block_for": "long"}, "block_for: expected a period such as '10m'"),
        ({"block_after": {}}, "block_after: expected a mapping such as {'20/1m': '10m'}, not an empty one"),
        ({"block_after": {"many": "3m"}}, "block_after: expected denials per period such as '20/1m'"),
        ({"block_after": {"3/1m": "long"}}, "block_after: expected a period such as '10m'"),
        ({"block_after": {"3/1m": "1m", "9/60s": "1h"}}, "block_after: expected rules with different periods"),
        ({"block_after": {"3/1m": "1m"}, "block_for": "1m"}, "block_for: cannot be combined with a mapping"),
    ],
)
def test_mistakes_name_the_field(make_app, block, message):
    with pytest.raises(ConfigError, match=message):
        make_app({**ONE, **block})
    with pytest.raises(ConfigError, match=message):
        make_app(ONE, **block)


def test_options_of_another_type(make_app):
    with pytest.raises(
        ConfigError, match=r"block_after: expected denials per period such as '20/1m', or a mapping such as .*, not 20"
    ):
        make_app(ONE, block_after=20, block_for="1m")
    with pytest.raises(ConfigError, match="block_for: expected a period"):
        make_app(ONE, block_after="20/1m", block_for=[])
