"""The admin endpoint: access, statistics and actions."""

import json

from tests.cases import cases
from tidegate.inbound._responses.admin import MAX_BODY_BYTES

STATS = "/api/admin/rate-limit-stats"
TOKEN = "a-long-enough-token"  # noqa: S105 - of this test
LOCAL = {"peer": "127.0.0.1"}
BEARER = ("Authorization", f"Bearer {TOKEN}")


def run_action(api, **what):
    return api.request(STATS, "POST", [BEARER], body=json.dumps(what).encode(), **LOCAL)


def stats(api, query="?top=100"):
    return json.loads(api.request(STATS + query, **LOCAL).body)


@cases("peer", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", "testclient"])
def test_local_callers_can_read_it(make_app, peer):
    assert make_app().request(STATS, peer=peer).status == 200


@cases("peer", ["203.0.113.9", "10.0.0.1", "2001:db8::1", None, "", "localhost", "testclient2"])
def test_remote_callers_cannot_read_it(make_app, peer):
    api = make_app()
    reply = api.request(STATS, peer=peer)
    assert reply.status == 403
    assert b"by_category" not in reply.body
    assert not api.reached


@cases("header", ["X-Forwarded-For", "Forwarded", "X-Real-IP", "Via", "X-Forwarded-Host"])
def test_requests_forwarded_by_a_local_proxy_are_not_local(make_app, header):
    assert make_app().request(STATS, headers=[(header, "127.0.0.1")], **LOCAL).status == 403


def test_a_client_behind_a_trusted_local_proxy_is_not_local(make_app):
    api = make_app(trusted_proxies=["127.0.0.1"])
    assert api.request(STATS, headers=[("X-Forwarded-For", "203.0.113.9")], **LOCAL).status == 403


def test_the_token_gives_access_from_any_address(make_app):
    api = make_app(admin_token=TOKEN)
    assert api.request(STATS, headers=[("Authorization", f"Bearer {TOKEN}")]).status == 200
    for wrong in (f"Bearer {TOKEN}x", TOKEN, "Bearer ", "Bearer \xff", f"Basic {TOKEN}"):
        assert api.request(STATS, headers=[("Authorization", wrong)]).status == 403
    assert api.request(STATS, **LOCAL).status == 200


@cases("peer", ["127.0.0.1", "::1", "testclient", "203.0.113.9", None])
@cases("token", [None, TOKEN])
@cases(
    "headers",
    [[], [("Origin", "http://evil.example")], [("Authorization", "Bearer None")], [("Authorization", "Bearer wrong")]],
)
def test_actions_require_the_token_from_any_address(make_app, peer, token, headers):
    """Behind a local proxy that adds no header, every client would look like a local caller."""
    api = make_app(admin_token=token)
    body = json.dumps({"action": "block", "key": "1.2.3.4", "seconds": 60}).encode()
    refused = api.request(STATS, "POST", headers, body=body, peer=peer)
    assert refused.status == 403
    assert "admin_token" in json.loads(refused.body)["error"]
    assert stats(api)["blocked"] == {}


def test_actions_with_the_token_work_from_any_address(make_app):
    api = make_app(admin_token=TOKEN)
    body = json.dumps({"action": "block", "key": "1.2.3.4", "seconds": 60}).encode()
    assert api.request(STATS, "POST", [BEARER], body=body).status == 200
    assert list(stats(api)["blocked"]) == ["1.2.3.4"]


def test_denied_requests_are_logged_at_a_limited_rate(make_app, caplog):
    api = make_app(log_burst=5)
    api.statuses(50, STATS)
    assert caplog.text.count("admin request denied for 203.0.113.9") == 5


def test_the_list_of_networks_is_bounded(make_app):
    api = make_app(admin_token=TOKEN)
    statuses = [run_action(api, action="block", key=f"10.{n}.0.0/16", seconds=60).status for n in range(102)]
    assert statuses == [200] * 100 + [400] * 2


def test_other_methods_get_405(make_app):
    assert make_app().request(STATS, "DELETE", **LOCAL).status == 405


def test_the_path_can_be_changed_or_disabled(make_app):
    moved = make_app(admin="/ops/limits")
    assert moved.request("/ops/limits", **LOCAL).status == 200
    assert "/ops/limits" not in moved.reached
    assert moved.request(STATS, **LOCAL).body == b"hello"
    assert make_app(admin=False).request(STATS, **LOCAL).body == b"hello"


def test_it_is_limited_if_a_category_names_it(make_app):
    api = make_app({"categories": {"admin": {"limit": 2, "endpoints": [STATS]}}})
    assert api.statuses(3, STATS, **LOCAL) == [200, 200, 429]


def test_statistics_list_clients_near_a_limit(make_app):
    api = make_app()
    for peer, count in (("198.51.100.1", 3), ("198.51.100.2", 50), ("198.51.100.3", 61)):
        api.statuses(count, peer=peer)
    api.statuses(1, "/api/cluster", peer="198.51.100.4")
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


def test_reset_restores_the_limits_of_a_client(make_app):
    api = make_app(admin_token=TOKEN)
    api.statuses(6, "/api/cluster")
    api.statuses(61, "/api/feeds")
    assert run_action(api, action="reset", key="203.0.113.9", category="expensive").status == 200
    assert (api.request("/api/cluster").remaining, api.request("/api/feeds").status) == (4, 429)
    assert run_action(api, action="reset", key="203.0.113.9").status == 200
    assert api.request("/api/feeds").remaining == 59


def test_reset_accepts_a_key_from_the_statistics(make_app):
    api = make_app(
        {"categories": {"read": {"limit": 1}}}, key=lambda request: request.header("x-user"), admin_token=TOKEN
    )
    alice = [("X-User", "alice/7")]
    assert [api.request(headers=alice).status for _ in range(2)] == [200, 429]
    assert run_action(api, action="reset", key=stats(api)["near_limit"][0]["key"]).status == 200
    assert api.request(headers=alice).status == 200


def test_a_blocked_client_is_denied_until_the_block_expires(make_app):
    api = make_app(admin_token=TOKEN)
    assert run_action(api, action="block", key="203.0.113.9", seconds=60).status == 200
    reply = api.request("/api/feeds")
    assert (reply.status, reply["retry-after"], reply["x-ratelimit-remaining"]) == (429, "60", "0")
    assert api.request(peer="203.0.113.10").status == 200
    assert list(stats(api)["blocked"]) == ["203.0.113.9"]
    api.clock.advance(60)
    assert api.request("/api/feeds").status == 200
    assert stats(api)["blocked"] == {}


def test_a_network_can_be_blocked_and_unblocked(make_app):
    api = make_app(admin_token=TOKEN)
    run_action(api, action="block", key="203.0.113.0/24", seconds=60)
    run_action(api, action="block", key="2001:db8::1", seconds=60)
    assert [api.request(peer=peer).status for peer in ("203.0.113.77", "203.0.114.1", "2001:db8::2")] == [429, 200, 429]
    assert json.loads(run_action(api, action="unblock", key="203.0.113.0/24").body)["found"] is True
    assert json.loads(run_action(api, action="unblock", key="203.0.113.0/24").body)["found"] is False
    assert api.request(peer="203.0.113.77").status == 200


def test_an_allowed_client_is_not_limited_until_the_entry_expires(make_app):
    api = make_app({"categories": {"read": {"limit": 1}}}, admin_token=TOKEN)
    run_action(api, action="allow", key="203.0.113.9", seconds=60)
    run_action(api, action="block", key="203.0.113.0/24", seconds=600)
    assert api.statuses(5) == [200] * 5
    api.clock.advance(60)
    assert api.statuses(1) == [429]
    run_action(api, action="unblock", key="203.0.113.0/24")
    assert api.statuses(2) == [200, 429]
    run_action(api, action="allow", key="203.0.113.9", seconds=60)
    run_action(api, action="disallow", key="203.0.113.9")
    assert api.statuses(1) == [429]


@cases(
    ("body", "message"),
    [
        (b"", "expected a JSON object"),
        (b"[]", "expected a JSON object"),
        (b"\xff\xfe", "expected a JSON object"),
        (b"[" * 10_000, "expected a JSON object"),
        (b'{"action": "explode", "key": "x"}', "action: must be one of reset, reset_all, block"),
        (b'{"action": "reset"}', "key: must be a client address"),
        (b'{"action": "reset", "key": 5}', "key: must be a client address"),
        (b'{"action": "reset", "key": "x", "category": "y"}', "category: must be one of expensive"),
        (b'{"action": "reset", "key": "x", "category": []}', "read, very_expensive, not an array"),
        (b'{"action": "block", "key": "x"}', "seconds: must be a number"),
        (b'{"action": "block", "key": "x", "seconds": -1}', "seconds: must be a number"),
        (b'{"action": "block", "key": "x", "seconds": NaN}', "seconds: must be a number"),
        (b'{"action": "block", "key": "x", "seconds": true}', "seconds: must be a number"),
        (b'{"action": "block", "key": "0.0.0.0/0", "seconds": 9}', "'*' matches every address"),
        (b'{"action": "block", "key": "10.0.0.1/8", "seconds": 9}', "did you mean '10.0.0.0/8'?"),
    ],
)
def test_invalid_actions_get_400(make_app, body, message):
    reply = make_app(admin_token=TOKEN).request(STATS, "POST", [BEARER], body=body, **LOCAL)
    assert reply.status == 400
    assert message in json.loads(reply.body)["error"]


def test_a_body_over_the_maximum_size_gets_413(make_app):
    assert (
        make_app(admin_token=TOKEN).request(STATS, "POST", [BEARER], body=b" " * (MAX_BODY_BYTES + 1), **LOCAL).status
        == 413
    )


def test_reload_reads_the_file_and_reports_its_error(make_app, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("rate_limiting: {}\n")
    api = make_app(path, admin_token=TOKEN)
    path.write_text("rate_limiting: {categories: {read: {limit: -1}}}\n")
    refused = run_action(api, action="reload")
    assert refused.status == 400
    assert f"{path}:1: rate_limiting.categories.read.limit" in json.loads(refused.body)["error"]
    path.write_text("rate_limiting: {categories: {read: {limit: 7}}}\n")
    assert run_action(api, action="reload").status == 200
    assert api.request()["x-ratelimit-limit"] == "7"


def test_the_number_of_live_clients_is_exact_at_the_maximum(make_app):
    """As many clients as `max_entries`, and more: the statistics never say fewer than there are."""
    api = make_app({"max_entries": 64})

    def total():
        return json.loads(api.request("/api/admin/rate-limit-stats", peer="127.0.0.1").body)["total_entries"]

    for number in range(64):
        api.request(peer=f"203.0.113.{number}")
        assert total() == number + 1
    for number in range(64, 90):
        api.request(peer=f"203.0.113.{number}")
        assert total() == 64


def test_clients_whose_windows_have_ended_make_room_for_live_ones(make_app):
    api = make_app({"max_entries": 64})
    api.request(peer="203.0.113.1")  # the first one seen stays active
    for number in range(40):
        api.request(peer=f"198.51.100.{number}")
    api.clock.advance(59)
    api.request(peer="203.0.113.1")
    api.clock.advance(2)
    for number in range(60):
        api.request(peer=f"192.0.2.{number}")
    stats = json.loads(api.request("/api/admin/rate-limit-stats", peer="127.0.0.1").body)
    assert stats["total_entries"] == 61


def test_denials_are_counted_by_limit(make_app):
    api = make_app({"categories": {"read": {"limits": ["2/1m"], "endpoints": ["/items/*"]}}})
    for _ in range(5):
        api.request("/items/1")
    found = stats(api)
    assert found["decisions"]["read"] == {"allowed": 2, "denied": 3}
    assert found["denied_by_limit"] == {"read": 3}
