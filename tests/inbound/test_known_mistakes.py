"""Known mistakes of other inbound limiters, one test each, numbered as in our list.

Mistakes 3, 7, 8, 9 and 15 concern the engine: tests/core, tests/engine and tests/stores cover them.
"""

import gc
import threading

import pytest

from tests.inbound.harness import PEER, AsgiHarness, WsgiHarness
from tests.servers.valkey import ValkeyServer
from tidegate._runtime.clock import SystemClock


def test_01_denials_are_not_charged(make_app):
    api = make_app()
    api.statuses(5, "/api/cluster")
    for _ in range(50):
        api.clock.advance(60)
        assert api.request("/api/cluster").status == 429
    api.clock.advance(3600 - 50 * 60)
    assert api.request("/api/cluster").remaining == 4


def test_02_a_denial_by_one_limit_does_not_charge_another(make_app):
    api = make_app({"categories": {"read": {"limits": ["1/1m", "5/1h"]}}})
    assert [api.statuses(10).count(200) for _ in range(5) if api.clock.advance(60) is None] == [1] * 5


def test_05_other_clients_do_not_evict_an_exhausted_client(make_app):
    api = make_app({"max_entries": 50})
    api.statuses(6, "/api/cluster")
    for number in range(1100):
        api.request("/api/cluster", peer=f"198.18.{number // 256}.{number % 256}")
    assert api.request("/api/cluster").status == 429


def test_06_windows_are_not_rounded_to_seconds(make_app):
    api = make_app({"categories": {"read": {"limit": 90, "window": "1m"}}}, log_burst=0)
    admitted = 0
    for _ in range(902):
        admitted += api.request().status == 200
        api.clock.advance(600 / 902)
    assert 890 <= admitted <= 900  # one of each window comes too early


def test_10_entries_of_inactive_clients_are_removed(make_app):
    api = make_app()
    for number in range(300):
        api.request(peer=f"198.18.{number // 256}.{number % 256}")
    api.clock.advance(400)
    api.statuses(20)
    assert api.limiter.store.metrics()["entries"] == 1
    assert len(api.limiter.category_limiters["read"].last_decisions) == 1


def test_11_an_unavailable_store_causes_neither_an_outage_nor_a_quota_per_process():
    """Two limiters that the store sees as two processes: during the outage, both together admit one limit at most."""
    with ValkeyServer() as server:
        url = f"{server.url}?deadline=2s&processes=2"
        rules = {"categories": {"read": {"limit": 10, "window": "1h"}}}
        apps = [WsgiHarness(rules, store=url, clock=SystemClock(), log_burst=0) for _ in range(2)]
        assert [api.statuses(2) for api in apps] == [[200, 200], [200, 200]]
        server.kill()
        statuses = [status for api in apps for status in api.statuses(20)]
        for api in apps:
            api.close()
    assert set(statuses) <= {200, 429, 503}  # 503: denied because the store is lost, not because of the limit
    assert 1 <= statuses.count(200) <= 10


def test_12_keys_never_collide_and_a_missing_header_is_not_a_key(make_app):
    api = make_app(
        {"categories": {"read": {"limit": 1}}}, key=lambda request: tuple((request.header("x-k") or "").split()) or None
    )
    keys = ["a/b c", "a b/c", "a b c", "a%2Fb c", PEER, "unknown"]
    assert [api.request(headers=[("X-K", key)]).status for key in keys] == [200] * len(keys)
    assert [api.request(peer=f"198.51.100.{host}").status for host in range(3)] == [200] * 3


@pytest.mark.parametrize("first", [0, 1, 3])
def test_13_a_stream_is_passed_through_unchanged(first):
    """Every message once, in order, the start first; other message types are not changed."""
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")] * first, "trailers": True})
        for part in (b"1", b"", b"2"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        await send({"type": "http.response.trailers", "headers": [(b"t", b"u")]})

    api = AsgiHarness(app=app)

    async def record(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/api/feeds", "headers": [], "client": (PEER, 1)}
    api.runner.run(api.middleware(scope, None, record))
    api.close()
    assert [message["type"].rpartition(".")[2] for message in sent] == ["start", *["body"] * 4, "trailers"]
    assert sent[0]["headers"][:first] == [(b"a", b"b")] * first
    assert len(sent[0]["headers"]) == first + 3
    assert sent[0]["trailers"] is True
    assert sent[-1] == {"type": "http.response.trailers", "headers": [(b"t", b"u")]}


def test_13_a_reused_message_of_the_application_is_not_mutated():
    start = {"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]}

    async def app(scope, receive, send):
        await send(start)
        await send({"type": "http.response.body", "body": b""})

    api = AsgiHarness(app=app)
    assert [len(api.request().fields) for _ in range(3)] == [4] * 3
    assert start["headers"] == [(b"a", b"b")]
    api.close()


def test_13_probes_are_limited_by_category_not_by_url(make_app):
    api = make_app(log_burst=0)
    assert [api.request(f"/wp-{number}.php", headers=[("X-Status", "404")]).status for number in range(61)] == [
        404
    ] * 60 + [429]


def test_14_retry_after_is_only_on_denials_and_decreases(make_app):
    api = make_app({"categories": {"read": {"limit": 2, "window": "1m"}}})
    assert "retry-after" not in api.request().headers
    api.clock.advance(20.4)
    api.request()
    seen = []
    for _ in range(3):
        seen.append(api.request()["retry-after"])
        api.clock.advance(10)
    assert seen == ["40", "30", "20"]


def test_requests_leave_no_reference_cycles():
    """A reference cycle per request would cost a server more than the decision."""

    class Cycle:
        """Like a server's object: its `send` and `start_response` refer to the request, which refers to our state."""

        def __init__(self):
            self.scope = {"type": "http", "method": "GET", "path": "/api/feeds", "headers": [], "client": (PEER, 1)}
            self.environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/api/feeds", "REMOTE_ADDR": PEER}

        async def send(self, message):
            pass

        def start(self, *args):
            pass

    asgi, wsgi = AsgiHarness(), WsgiHarness()

    async def ask():
        for _ in range(20):
            cycle = Cycle()
            await asgi.middleware(cycle.scope, None, cycle.send)

    asgi.runner.run(ask())
    gc.collect()
    gc.disable()
    try:
        asgi.runner.run(ask())
        for _ in range(20):
            cycle = Cycle()
            list(wsgi.middleware(cycle.environ, cycle.start))
        del cycle
        alive = sum(type(one) is Cycle for one in gc.get_objects())  # isinstance would run lazy objects
    finally:
        gc.enable()
    asgi.close()
    assert alive == 0


def test_14_threads_on_sqlite_get_exactly_the_limit(tmp_path):
    api = WsgiHarness({"categories": {"read": {"limit": 50}}}, store=f"sqlite:///{tmp_path / 'l.db'}?deadline=60s")
    statuses: list[int] = []
    threads = [threading.Thread(target=lambda: statuses.extend(api.statuses(20))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    api.close()
    assert (statuses.count(200), statuses.count(429)) == (50, 30)
