"""Both middlewares: identical responses, costs, modes, slots, nesting, options and maintenance."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tests.inbound.harness import PEER, AsgiHarness, WsgiHarness
from tidegate import ConfigError

paths = st.sampled_from(["/api/feeds", "/api/cluster", "/API//recluster/", "/login", "/health", "/x/../login"])


@given(
    requests=st.lists(
        st.tuples(
            paths,
            st.sampled_from(["GET", "HEAD", "POST", "OPTIONS"]),
            st.sampled_from(["203.0.113.9", "2001:db8::1", None, "10.0.0.1"]),
            st.sampled_from(["200", "401", "503"]),
            st.integers(0, 900),
        ),
        max_size=30,
    ),
    style=st.sampled_from(["x", "ietf", "both", "none"]),
)
def test_both_middlewares_respond_identically(requests, style):
    config = {
        "exempt": ["/health"],
        "exempt_methods": ["OPTIONS"],
        "categories": {
            "read": {"limits": ["3/1m", "9/1h"]},
            "login": {"limit": 2, "window": "5m", "endpoints": ["/login"], "count": [401], "penalty": {"503": 1}},
        },
    }
    apps = [
        kind(config, headers=style, trusted_proxies=["10.0.0.0/8"], log_burst=0) for kind in (AsgiHarness, WsgiHarness)
    ]
    for path, method, peer, status, seconds in requests:
        headers = [("X-Status", status), ("X-Forwarded-For", "198.51.100.7"), ("Accept", "application/json")]
        first, second = [app.request(path, method, headers, peer) for app in apps]
        assert (first.status, first.headers, first.body) == (
            second.status, second.headers, b"" if method == "HEAD" and second.status == 429 else second.body,
        )  # fmt: skip
        for app in apps:
            app.clock.advance(seconds / 10)
    for app in apps:
        app.close()


def test_endpoints_with_costs_and_methods(make_app):
    config = {
        "defaults": True,
        "categories": {
            "up": {"limit": 10, "endpoints": [{"path": "/up/{id}", "methods": ["POST"], "cost": 4}, "/small"]},
        },
    }
    api = make_app(config)
    assert api.request("/up/1", "POST").remaining == 6
    assert api.request("/small", "DELETE").remaining == 5
    assert api.request("/up/2", "POST").remaining == 1
    assert api.request("/up/3", "POST").status == 429
    assert api.request("/up/3", "GET")["x-ratelimit-limit"] == "60"  # another category


def test_shadow_mode_records_decisions_and_never_denies(make_app, caplog):
    api = make_app({"categories": {"read": {"limit": 2, "mode": "shadow"}}})
    assert api.statuses(5) == [200] * 5
    assert api.request()["x-ratelimit-remaining"] == "0"
    assert "retry-after" not in api.request().headers
    assert caplog.text.count("rate limit exceeded (shadow mode: allowed): read: 203.0.113.9") == 5
    assert api.statuses(6, "/api/cluster")[-1] == 429  # other categories are enforced


def test_concurrency_limits_hold_slots_until_the_response_is_complete():
    config = {"categories": {"read": {"limit": 1, "window": "30s", "algorithm": "concurrency"}}}
    api = WsgiHarness(config=config)

    def start(*args):
        return None

    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/api/feeds", "REMOTE_ADDR": PEER}
    first = api.middleware(dict(environ), start)
    assert api.request().status == 429
    first.close()
    assert api.statuses(3) == [200, 200, 200]


async def test_concurrency_limits_hold_slots_until_the_response_is_complete_in_tasks():
    config = {"categories": {"read": {"limit": 1, "window": "30s", "algorithm": "concurrency"}}}
    inner = []

    async def app(scope, receive, send):
        if not inner:
            inner.append(None)
            inner[0] = await api.request_async()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    api = AsgiHarness(config=config, app=app)
    assert (await api.request_async()).status == 200
    assert inner[0].status == 429
    assert (await api.request_async()).status == 200
    await api.middleware.close()
    api.runner.close()


def test_nested_middlewares_write_their_headers_once(make_app):
    inner = make_app({"categories": {"read": {"limit": 2}}})
    outer = make_app({"categories": {"read": {"limit": 3}}}, app=inner.middleware)
    replies = [outer.request() for _ in range(4)]
    assert [reply.status for reply in replies] == [200, 200, 429, 429]
    for reply in replies:
        assert [value for name, value in reply.fields if name.lower() == "x-ratelimit-limit"] == ["2"]
    assert [reply.headers.get("retry-after") for reply in replies] == [None, None, "60", "60"]
    assert inner.limiter.category_limiters["read"].denied_requests == 2
    outer_read = outer.limiter.category_limiters["read"]
    assert outer_read.denied_requests == 0, "what the inner one denies is not charged to the outer"


@cases(
    ("option", "message"),
    [
        ({"colour": 1}, "colour: unknown option"),
        ({"confg": "limits.yaml"}, "confg: unknown option: did you mean 'config'?"),
        ({"key": "user"}, "key: must be a function, not 'user'"),
        ({"unknown": "deny"}, "unknown: must be one of allow, limit"),
        ({"on_message": "wait"}, "on_message: "),
        ({"admin": "stats"}, "admin: must be a path such as"),
        ({"admin_token": "short"}, "admin_token: must be a string of at least 16 ASCII characters"),
        ({"log_every": -1}, "log_every: must be a non-negative integer, not -1"),
        ({"reload": 0}, "reload: must be a number of seconds above 0"),
        ({"ipv6_prefix": 0}, "ipv6_prefix: must be an integer from 1 to 128"),
        ({"count": {"nothing": print}}, "count: unknown category 'nothing': expected one of expensive"),
        ({"count": {"read": 1}}, "count: must be a mapping from category names to functions"),
        ({"lease": "long"}, "lease"),
        ({"store": "disk://"}, "unknown scheme disk://"),
        ({"config": "/nowhere.yaml"}, "cannot be read"),
    ],
)
def test_invalid_options_are_rejected_by_the_constructor(make_app, option, message):
    with pytest.raises(ConfigError) as error:
        make_app(**option)
    assert message in str(error.value)
    assert "short" not in str(error.value)


def test_the_fast_and_slow_paths_count_requests_alike(make_app):
    api = make_app({"categories": {"read": {"limit": 4}}})
    category_limiter = api.limiter.category_limiters["read"]
    for sent in range(1, 7):  # new, known (fast path), known with maintenance due, denied
        api.request()
        assert (category_limiter.allowed, category_limiter.denied_requests) == (min(sent, 4), max(0, sent - 4))
        assert category_limiter.last_decisions["203.0.113.9"].remaining == max(0, 4 - sent)
        api.clock.advance(0.6)


def test_expired_clients_are_removed_a_few_at_a_time(make_app):
    api = make_app({"cleanup_interval_minutes": 1, "categories": {"read": {"limit": 5, "window": "10s"}}})
    for host in range(300):
        api.request(peer=f"198.51.{host // 256}.{host % 256}")
    seen = api.limiter.category_limiters["read"].last_decisions
    api.clock.advance(11)
    api.request()
    assert 240 <= len(seen) <= 251  # a sixth of the interval has passed, so a sixth of them was checked
    for _ in range(7):
        api.clock.advance(10)
        api.request()
    assert list(seen) == ["203.0.113.9"]


def test_a_clock_that_steps_back_adds_no_permits(make_app):
    api = make_app({"categories": {"read": {"limit": 3}}})
    assert api.statuses(2) == [200, 200]
    api.clock.advance(-1000)
    assert api.statuses(2) == [200, 429]  # no permits are added
    api.limiter.run_maintenance(api.limiter.now())
    api.clock.advance(1061)
    assert api.request().status == 200
