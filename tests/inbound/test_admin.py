"""The operator's page: who may see it, what it tells, what it does."""

import json

import pytest

from tidegate.inbound.responses.admin import MAX_BODY_BYTES

STATS = "/api/admin/rate-limit-stats"
TOKEN = "a-long-enough-token"  # noqa: S105 - of this test
LOCAL = {"peer": "127.0.0.1"}
BEARER = ("Authorization", f"Bearer {TOKEN}")


def order(api, **what):
    return api.ask(STATS, "POST", [BEARER], body=json.dumps(what).encode(), **LOCAL)


def stats(api, query="?top=100"):
    return json.loads(api.ask(STATS + query, **LOCAL).body)


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", "testclient"])
def test_callers_on_this_machine_may_see_it(door, peer):
    assert door().ask(STATS, peer=peer).status == 200


@pytest.mark.parametrize("peer", ["203.0.113.9", "10.0.0.1", "2001:db8::1", None, "", "localhost", "testclient2"])
def test_others_may_not(door, peer):
    api = door()
    reply = api.ask(STATS, peer=peer)
    assert reply.status == 403
    assert b"by_category" not in reply.body
    assert not api.reached


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "X-Real-IP", "Via", "X-Forwarded-Host"])
def test_a_proxy_on_this_machine_does_not_make_everybody_an_operator(door, header):
    assert door().ask(STATS, headers=[(header, "127.0.0.1")], **LOCAL).status == 403


def test_behind_a_trusted_proxy_the_client_counts_not_the_proxy(door):
    api = door(trusted_proxies=["127.0.0.1"])
    assert api.ask(STATS, headers=[("X-Forwarded-For", "203.0.113.9")], **LOCAL).status == 403


def test_the_token_opens_it_from_anywhere(door):
    api = door(admin_token=TOKEN)
    assert api.ask(STATS, headers=[("Authorization", f"Bearer {TOKEN}")]).status == 200
    for wrong in (f"Bearer {TOKEN}x", TOKEN, "Bearer ", "Bearer \xff", f"Basic {TOKEN}"):
        assert api.ask(STATS, headers=[("Authorization", wrong)]).status == 403
    assert api.ask(STATS, **LOCAL).status == 200


@pytest.mark.parametrize("peer", ["127.0.0.1", "::1", "testclient", "203.0.113.9", None])
@pytest.mark.parametrize("token", [None, TOKEN])
@pytest.mark.parametrize(
    "headers",
    [[], [("Origin", "http://evil.example")], [("Authorization", "Bearer None")], [("Authorization", "Bearer wrong")]],
)
def test_orders_need_the_token_wherever_they_come_from(door, peer, token, headers):
    """A proxy on this machine that says nothing of whom it asks for would make everybody a local caller."""
    api = door(admin_token=token)
    body = json.dumps({"action": "block", "key": "1.2.3.4", "seconds": 60}).encode()
    refused = api.ask(STATS, "POST", headers, body=body, peer=peer)
    assert refused.status == 403
    assert "admin_token" in json.loads(refused.body)["error"]
    assert stats(api)["blocked"] == {}


def test_orders_with_the_token_are_obeyed_from_anywhere(door):
    api = door(admin_token=TOKEN)
    body = json.dumps({"action": "block", "key": "1.2.3.4", "seconds": 60}).encode()
    assert api.ask(STATS, "POST", [BEARER], body=body).status == 200
    assert list(stats(api)["blocked"]) == ["1.2.3.4"]


def test_a_flood_of_strangers_is_no_flood_of_lines(door, caplog):
    api = door(log_burst=5)
    api.many(50, STATS)
    assert caplog.text.count("refused the operator's page to 203.0.113.9") == 5


def test_the_list_of_networks_is_bounded(door):
    api = door(admin_token=TOKEN)
    orders = [order(api, action="block", key=f"10.{n}.0.0/16", seconds=60).status for n in range(102)]
    assert orders == [200] * 100 + [400] * 2


def test_other_methods_are_refused(door):
    assert door().ask(STATS, "DELETE", **LOCAL).status == 405


def test_elsewhere_or_not_at_all(door):
    moved = door(admin="/ops/limits")
    assert moved.ask("/ops/limits", **LOCAL).status == 200
    assert "/ops/limits" not in moved.reached
    assert moved.ask(STATS, **LOCAL).body == b"hello"
    assert door(admin=False).ask(STATS, **LOCAL).body == b"hello"


def test_limited_if_the_configuration_says_so(door):
    api = door({"categories": {"admin": {"limit": 2, "endpoints": [STATS]}}})
    assert api.many(3, STATS, **LOCAL) == [200, 200, 429]


def test_who_is_near_a_limit(door):
    api = door()
    for peer, count in (("198.51.100.1", 3), ("198.51.100.2", 50), ("198.51.100.3", 61)):
        api.many(count, peer=peer)
    api.many(1, "/api/cluster", peer="198.51.100.4")
    found = stats(api, "?top=3")
    assert [(near["key"], near["category"], near["remaining"]) for near in found["near_limit"]] == [
        ("198.51.100.3", "read", 0),
        ("198.51.100.2", "read", 10),
        ("198.51.100.4", "expensive", 4),
    ]
    assert found["near_limit"][0]["quota"] == 60
    assert found["decisions"]["read"] == {"allowed": 113, "denied": 1}
    assert found["store"]["entries"] == 4
    for odd in ("?top=x", "?top=-1", "?top=" + "9" * 5000, "?%00", "?top=1&top=2"):
        assert stats(api, odd)["total_entries"] == 4


def test_reset_of_a_key(door):
    api = door(admin_token=TOKEN)
    api.many(6, "/api/cluster")
    api.many(61, "/api/feeds")
    assert order(api, action="reset", key="203.0.113.9", category="expensive").status == 200
    assert (api.ask("/api/cluster").remaining, api.ask("/api/feeds").status) == (4, 429)
    assert order(api, action="reset", key="203.0.113.9").status == 200
    assert api.ask("/api/feeds").remaining == 59


def test_reset_of_a_key_as_the_statistics_show_it(door):
    api = door({"categories": {"read": {"limit": 1}}}, key=lambda request: request.header("x-user"), admin_token=TOKEN)
    alice = [("X-User", "alice/7")]
    assert [api.ask(headers=alice).status for _ in range(2)] == [200, 429]
    assert order(api, action="reset", key=stats(api)["near_limit"][0]["key"]).status == 200
    assert api.ask(headers=alice).status == 200


def test_a_block_and_its_end(door):
    api = door(admin_token=TOKEN)
    assert order(api, action="block", key="203.0.113.9", seconds=60).status == 200
    reply = api.ask("/api/feeds")
    assert (reply.status, reply["retry-after"], reply["x-ratelimit-remaining"]) == (429, "60", "0")
    assert api.ask(peer="203.0.113.10").status == 200
    assert list(stats(api)["blocked"]) == ["203.0.113.9"]
    api.clock.advance(60)
    assert api.ask("/api/feeds").status == 200
    assert stats(api)["blocked"] == {}


def test_a_block_of_a_network_and_its_order_to_end(door):
    api = door(admin_token=TOKEN)
    order(api, action="block", key="203.0.113.0/24", seconds=60)
    order(api, action="block", key="2001:db8::1", seconds=60)
    assert [api.ask(peer=peer).status for peer in ("203.0.113.77", "203.0.114.1", "2001:db8::2")] == [429, 200, 429]
    assert json.loads(order(api, action="unblock", key="203.0.113.0/24").body)["found"] is True
    assert json.loads(order(api, action="unblock", key="203.0.113.0/24").body)["found"] is False
    assert api.ask(peer="203.0.113.77").status == 200


def test_a_client_let_through_for_a_while(door):
    api = door({"categories": {"read": {"limit": 1}}}, admin_token=TOKEN)
    order(api, action="allow", key="203.0.113.9", seconds=60)
    order(api, action="block", key="203.0.113.0/24", seconds=600)
    assert api.many(5) == [200] * 5
    api.clock.advance(60)
    assert api.many(1) == [429]
    order(api, action="unblock", key="203.0.113.0/24")
    assert api.many(2) == [200, 429]
    order(api, action="allow", key="203.0.113.9", seconds=60)
    order(api, action="disallow", key="203.0.113.9")
    assert api.many(1) == [429]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "expected an order in JSON"),
        (b"[]", "expected an order in JSON"),
        (b"\xff\xfe", "expected an order in JSON"),
        (b"[" * 10_000, "expected an order in JSON"),
        (b'{"action": "explode", "key": "x"}', "action: must be one of reset, block"),
        (b'{"action": "reset"}', "key: must be the client's address"),
        (b'{"action": "reset", "key": 5}', "key: must be the client's address"),
        (b'{"action": "reset", "key": "x", "category": "y"}', "category: must be one of expensive"),
        (b'{"action": "reset", "key": "x", "category": []}', "category: must be one of expensive"),
        (b'{"action": "block", "key": "x"}', "seconds: must be a number"),
        (b'{"action": "block", "key": "x", "seconds": -1}', "seconds: must be a number"),
        (b'{"action": "block", "key": "x", "seconds": NaN}', "seconds: must be a number"),
        (b'{"action": "block", "key": "x", "seconds": true}', "seconds: must be a number"),
        (b'{"action": "block", "key": "0.0.0.0/0", "seconds": 9}', "'*' means everybody"),
        (b'{"action": "block", "key": "10.0.0.1/8", "seconds": 9}', "the network is 10.0.0.0/8"),
    ],
)
def test_orders_that_make_no_sense(door, body, message):
    reply = door(admin_token=TOKEN).ask(STATS, "POST", [BEARER], body=body, **LOCAL)
    assert reply.status == 400
    assert message in json.loads(reply.body)["error"]


def test_an_order_has_a_size(door):
    assert door(admin_token=TOKEN).ask(STATS, "POST", [BEARER], body=b" " * (MAX_BODY_BYTES + 1), **LOCAL).status == 413


def test_reload_by_order(door, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("rate_limiting: {}\n")
    api = door(path, admin_token=TOKEN)
    path.write_text("rate_limiting: {categories: {read: {limit: 0}}}\n")
    refused = order(api, action="reload")
    assert refused.status == 400
    assert f"{path}:1: rate_limiting.categories.read.limit" in json.loads(refused.body)["error"]
    path.write_text("rate_limiting: {categories: {read: {limit: 7}}}\n")
    assert order(api, action="reload").status == 200
    assert api.ask()["x-ratelimit-limit"] == "7"
