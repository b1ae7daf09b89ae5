"""The API limiting spec: its scenarios, its defaults and its checklist, each against both middlewares."""

import json
import threading
from pathlib import Path

from tests.cases import cases
from tests.inbound.harness import START, WsgiHarness

ROOT = Path(__file__).parents[2]
STATS = "/api/admin/rate-limit-stats"

CATEGORIES = {
    "expensive": (5, 3600, ["/api/cluster", "/api/recluster"]),
    "moderately": (10, 3600, ["/api/refresh", "/api/clear-cache"]),
    "read": (
        60,
        60,
        ["/api/feeds", "/api/clusters", "/api/timeline", "/api/timeline/today", "/api/status", "/api/feed/7"],
    ),
    "very_expensive": (3, 3600, ["/api/cleanup-orphaned"]),
}


# ---- scenarios -------------------------------------------------------------------------------------------------------


def test_scenario_normal_read_usage(make_app):
    api = make_app()
    assert api.statuses(60, "/api/feeds") == [200] * 60
    reply = api.request("/api/feeds")
    assert reply.status == 429
    assert "retry-after" in reply.headers


def test_scenario_clustering_operation_limit(make_app):
    api = make_app()
    assert api.statuses(5, "/api/recluster") == [200] * 5
    reply = api.request("/api/recluster")
    assert reply.status == 429
    assert reply["x-ratelimit-remaining"] == "0"


def test_scenario_window_reset_allows_new_requests(make_app):
    api = make_app()
    assert api.statuses(6, "/api/cluster") == [200] * 5 + [429]
    api.clock.advance(3600)
    reply = api.request("/api/cluster")
    assert (reply.status, reply["x-ratelimit-remaining"]) == (200, "4")


def test_scenario_different_ips_tracked_separately(make_app):
    api = make_app()
    for left in range(59, 3, -1):
        assert api.request("/api/feeds", peer="198.51.100.1").remaining == left  # client A has 4 requests remaining
    assert api.request("/api/feeds", peer="198.51.100.2").remaining == 59


# ---- categories and responses ----------------------------------------------------------------------------------------


@cases("name", CATEGORIES)
def test_each_category_has_its_limit_and_window(make_app, name):
    limit, window, paths = CATEGORIES[name]
    api = make_app()
    statuses = [api.request(paths[i % len(paths)]).status for i in range(limit)]  # its endpoints share the limit
    assert statuses == [200] * limit
    reply = api.request(paths[0])
    assert reply.status == 429
    assert reply["x-ratelimit-limit"] == str(limit)
    assert reply["retry-after"] == str(window)
    assert reply["x-ratelimit-reset"] == str(START + window)
    assert len(api.reached) == limit
    api.clock.advance(window - 0.000001)
    assert api.request(paths[0]).status == 429
    api.clock.advance(0.000001)
    assert api.request(paths[0]).status == 200


def test_hitting_one_limit_does_not_affect_others(make_app):
    api = make_app()
    assert api.statuses(4, "/api/cleanup-orphaned")[-1] == 429
    assert api.request("/api/cluster")["x-ratelimit-remaining"] == "4"
    assert api.request("/api/refresh")["x-ratelimit-remaining"] == "9"
    assert api.request("/api/feeds")["x-ratelimit-remaining"] == "59"


def test_all_responses_have_the_headers(make_app):
    api = make_app()
    for status in ("200", "302", "404", "500"):
        reply = api.request("/api/feeds", headers=[("X-Status", status)])
        assert reply.status == int(status)
        assert {"x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"} <= reply.headers.keys()
        assert "retry-after" not in reply.headers
        assert reply.body == b"hello"
        assert reply["x-app"] == "yes"


def test_the_429_response(make_app):
    api = make_app()
    api.statuses(5, "/api/cluster")
    reply = api.request("/api/cluster")
    assert reply.headers == {
        "content-type": "text/plain",
        "content-length": "37",
        "cache-control": "no-store",
        "retry-after": "3600",
        "x-ratelimit-limit": "5",
        "x-ratelimit-remaining": "0",
        "x-ratelimit-reset": str(START + 3600),
    }
    assert reply.body == b"Rate limit exceeded. Try again later."


def test_missing_address_is_allowed_under_a_default_key_with_one_warning(make_app, caplog):
    api = make_app()
    assert api.statuses(8, "/api/cluster", peer=None) == [200] * 8
    warnings = [record.message for record in caplog.records if "without a client address" in record.message]
    assert len(warnings) == 1
    assert "key 'unknown'" in warnings[0]
    near = json.loads(api.request(f"{STATS}?top=1", peer="127.0.0.1").body)["near_limit"]
    assert (near[0]["key"], near[0]["remaining"]) == ("unknown", 0)


def test_missing_address_can_be_limited_together(make_app):
    assert make_app(unknown="limit").statuses(6, "/api/cluster", peer=None) == [200] * 5 + [429]


def test_statistics(make_app):
    api = make_app()
    for host in range(3):
        api.request("/api/feeds", peer=f"198.51.100.{host}")
    api.request("/api/cluster")
    reply = api.request(STATS, peer="127.0.0.1")
    assert reply.status == 200
    assert reply["content-type"] == "application/json"
    by_category = {"expensive": 1, "moderately": 0, "read": 3, "very_expensive": 0}
    assert json.loads(reply.body) == {"total_entries": 4, "by_category": by_category}
    api.clock.advance(61)
    assert json.loads(api.request(STATS, peer="127.0.0.1").body)["total_entries"] == 1


def test_statistics_are_not_limited(make_app):
    api = make_app({"categories": {"read": {"limit": 1}}})
    assert api.statuses(20, STATS, peer="::1") == [200] * 20
    assert "x-ratelimit-limit" not in api.request(STATS, peer="::1").headers


# ---- the checklist ---------------------------------------------------------------------------------------------------


def test_checklist_thread_safety():
    api = WsgiHarness(config={"categories": {"read": {"limit": 500}}})
    statuses: list[int] = []
    threads = [threading.Thread(target=lambda: statuses.extend(api.statuses(100))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (statuses.count(200), statuses.count(429)) == (500, 300)


def test_checklist_sensitive_endpoints_are_protected_by_every_method(make_app):
    api = make_app()
    assert [api.request("/api/cleanup-orphaned", method).status for method in ("GET", "POST", "DELETE", "PUT")] == [
        200, 200, 200, 429,
    ]  # fmt: skip


def test_checklist_configuration_via_config_yaml(make_app, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("rate_limiting:\n  categories:\n    expensive:\n      limit: 2\n      window_minutes: 1\n")
    api = make_app(path)
    assert api.statuses(3, "/api/cluster") == [200, 200, 429]
    api.clock.advance(60)
    assert api.request("/api/cluster").status == 200


def test_checklist_disabled_by_config_yaml(make_app, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("rate_limiting:\n  enabled: false\n")
    reply = [make_app(str(path)).request("/api/cleanup-orphaned") for _ in range(5)][-1]
    assert (reply.status, "x-ratelimit-limit" in reply.headers) == (200, False)


def test_checklist_expired_entries_are_removed(make_app):
    api = make_app()
    for host in range(200):
        api.request("/api/feeds", peer=f"198.51.{host // 100}.{host % 100}")
    assert api.limiter.store.metrics()["entries"] == 200
    api.clock.advance(300)  # cleanup_interval_minutes: 5
    api.statuses(10, "/api/feeds")
    assert api.limiter.store.metrics()["entries"] == 1
    assert api.limiter.category_limiters["read"].recent_clients.remove_expired(api.limiter.now()) == 1


def test_checklist_max_entries(make_app):
    api = make_app({"max_entries": 10})
    assert api.limiter.store.metrics()["max_entries"] == 10
    for host in range(100):
        api.request("/api/feeds", peer=f"198.51.{host}.1")  # each of a network of its own
    assert api.limiter.store.metrics()["entries"] == 10
    assert json.loads(api.request(STATS, peer="127.0.0.1").body)["total_entries"] <= 10


def test_checklist_documentation():
    assert "rate-limit-stats" in (ROOT / "docs" / "howto" / "inbound.md").read_text(encoding="utf-8")
