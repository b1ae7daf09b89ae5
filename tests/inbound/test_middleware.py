"""What a middleware does with a request: clients, categories, headers and answers; both kinds."""

import json
from urllib.parse import quote_from_bytes

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.routing import Mount

from tests.inbound.harness import PEER, START, AsgiDoor, WsgiDoor
from tidegate import ConfigError, Decision
from tidegate.errors import StoreUnavailable
from tidegate.headers import write
from tidegate.inbound.client.request import by_api_key, by_header
from tidegate.inbound.responses.response import Response, ResponseWriter, prefers_json
from tidegate.stores import MemoryStore

ONE = {"categories": {"read": {"limit": 1}}}


# ---- clients ---------------------------------------------------------------------------------------------------------


def test_headers_are_not_believed_unless_a_trusted_proxy_sends_them(door):
    api = door(ONE)
    assert api.ask(headers=[("X-Forwarded-For", "1.1.1.1")]).status == 200
    assert api.ask(headers=[("X-Forwarded-For", "2.2.2.2")]).status == 429


def test_behind_a_trusted_proxy_the_client_is_who_the_proxy_saw(door):
    api = door(ONE, trusted_proxies=["10.0.0.0/8"])
    via = {"peer": "10.0.0.1"}
    assert api.ask(headers=[("X-Forwarded-For", "9.9.9.9, 1.1.1.1")], **via).status == 200
    assert api.ask(headers=[("X-Forwarded-For", "8.8.8.8, 1.1.1.1, 10.0.0.2")], **via).status == 429
    assert api.ask(headers=[("X-Forwarded-For", "2.2.2.2")], **via).status == 200
    assert api.ask(headers=[("Forwarded", "for=1.1.1.1")], **via).status == 429
    assert api.ask(headers=[("X-Forwarded-For", "3.3.3.3")], peer="1.1.1.1").status == 429  # not a proxy


def test_everybody_as_trusted_proxy_is_refused_unless_asked_for_twice(door):
    with pytest.raises(ConfigError, match="any client could pretend to be any other"):
        door(trusted_proxies=["*"])
    assert door(trusted_proxies=["*", "*"]).ask(headers=[("X-Forwarded-For", "1.1.1.1")]).status == 200


def test_ipv6_clients_are_their_network(door):
    api = door(ONE)
    assert api.ask(peer="2001:db8::1").status == 200
    assert api.ask(peer="2001:db8::ffff:1").status == 429
    assert api.ask(peer="2001:db8:0:1::1").status == 200
    whole = door(ONE, ipv6_prefix=128)
    assert [whole.ask(peer=f"2001:db8::{host}").status for host in (1, 2, 1)] == [200, 200, 429]


def test_mapped_ipv4_is_ipv4(door):
    api = door(ONE)
    assert [api.ask(peer=peer).status for peer in ("::ffff:1.2.3.4", "1.2.3.4")] == [200, 429]


def test_unix_sockets_of_a_trusted_proxy(door):
    api = door(ONE, trusted_proxies=["unix"])
    statuses = [
        api.ask(peer=None, headers=[("X-Forwarded-For", ip)]).status for ip in ("1.1.1.1", "2.2.2.2", "1.1.1.1")
    ]
    assert statuses == [200, 200, 429]


def test_exempt_clients_and_paths_and_methods(door):
    api = door({**ONE, "exempt": ["/health"], "exempt_methods": ["OPTIONS"], "exempt_clients": ["192.0.2.0/24"]})
    assert api.many(3, peer="192.0.2.7") == [200] * 3
    assert api.many(3, "/health") == [200] * 3
    assert api.many(3, method="OPTIONS") == [200] * 3
    assert "x-ratelimit-limit" not in api.ask("/health").headers
    assert api.many(2) == [200, 429]


def test_clients_blocked_by_the_file(door):
    api = door({"blocked_clients": ["192.0.2.0/24"]})
    reply = api.ask(peer="192.0.2.7", headers=[("Accept", "application/json")])
    assert reply.status == 429
    assert json.loads(reply.body)["type"].endswith("#abnormal-usage-detected")
    assert int(reply["retry-after"]) == 300
    assert not api.reached
    assert api.ask(peer="192.0.3.7").status == 200


def test_a_key_of_ones_own_and_those_without_it_by_address(door):
    api = door(ONE, key=by_header("X-Tenant"))
    ann, bob = [("X-Tenant", "ann")], [("X-Tenant", "bob")]
    assert [api.ask(headers=who).status for who in (ann, bob, ann, bob)] == [200, 200, 429, 429]
    assert api.ask(headers=ann, peer="198.51.100.1").status == 429
    assert [api.ask(peer=f"198.51.100.{host}").status for host in (1, 2, 1)] == [
        200,
        200,
        429,
    ]  # not one bucket for all


def test_keys_never_collide(door):
    """A tenant called like an address is not that address, and parts do not run together."""
    api = door(ONE, key=lambda request: request.header("x-key") and tuple(request.header("x-key").split("|")))
    assert api.ask(headers=[("X-Key", PEER)]).status == 200
    assert api.ask().status == 200
    assert api.ask(headers=[("X-Key", "a/b|c")]).status == 200
    assert api.ask(headers=[("X-Key", "a|b/c")]).status == 200
    assert api.ask(headers=[("X-Key", "a|b/c")]).status == 429


@pytest.mark.parametrize(
    "values", [("\xff", "\xfe"), ("\xff", "\xc3\xbf"), ("\ufffd".encode().decode("latin-1"), "\xff")]
)
@pytest.mark.parametrize("chosen", [by_header("x-tenant"), by_api_key("x-tenant")])
def test_headers_that_are_no_utf_8_do_not_share_a_count(door, values, chosen):
    """Each character stands for a byte, as servers hand headers over."""
    api = door(ONE, key=chosen)
    for value in values:
        assert [api.ask(headers=[("X-Tenant", value)]).status for _ in range(2)] == [200, 429]


@pytest.mark.parametrize("last", [b"\xff", b"\xfe", b"\xc3\xbf", b"\xef\xbf\xbd", b"\xff\xfe"])
def test_paths_that_are_no_utf_8_do_not_share_a_count(door, last):
    api = door(ONE, key=lambda request: request.path)
    for path in (b"/\xfd", b"/\xfc", b"/" + last):
        assert [ask_bytes(api, path).status for _ in range(2)] == [200, 429]
    assert [key[1] for key in api.guard.gates["read"].seen][:2] == ["/\udcfd", "/\udcfc"]


def ask_bytes(api, path):
    """Ask for a path of any bytes, as a server hands it over."""
    if isinstance(api, WsgiDoor):
        return api.ask("/", PATH_INFO=path.decode("latin-1"))
    return api.ask(path.decode("utf-8", "replace"), raw_path=quote_from_bytes(path).encode())


@pytest.mark.parametrize("raw", [None, b"", b"/elsewhere", b"/%FF?q"])
def test_a_raw_path_that_is_another_is_not_believed(raw):
    api = AsgiDoor(ONE, key=lambda request: request.path)
    api.ask("/a\ufffd", raw_path=raw)
    assert list(api.guard.gates["read"].seen) == [("key", "/a\ufffd")]
    api.close()


def test_api_keys_are_kept_as_hashes(door):
    api = door(ONE, key=by_api_key())
    api.ask(headers=[("X-API-Key", "s3cret-key")])
    near = api.ask("/api/admin/rate-limit-stats?top=5", peer="127.0.0.1").body
    assert b"s3cret" not in near
    assert b"x-api-key/" in near


# ---- headers and bodies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["x", "ietf", "both", "none"])
def test_header_styles(door, style):
    api = door({"categories": {"read": {"limits": ["2/1m", "100/1h"]}}}, headers=style)
    reply = api.ask()
    names = {name.lower() for name, _ in reply.fields} - {"x-app"}
    x, ietf = {"x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"}, {"ratelimit", "ratelimit-policy"}
    assert names == {"x": x, "ietf": ietf, "both": x | ietf, "none": set()}[style]
    api.ask()
    denied = api.ask()
    assert denied.status == 429
    assert denied["retry-after"] == "60"
    if style in ("x", "both"):
        assert denied["x-ratelimit-limit"] == "2"  # the tightest
    if style in ("ietf", "both"):
        assert denied["ratelimit"] == '"read-1m";r=0;t=60, "read-1h";r=98;t=3600'


def test_an_unknown_style_is_refused(door):
    with pytest.raises(ConfigError, match="headers: must be one of x, ietf, both, none"):
        door(headers="y")


def test_the_tightest_of_several_limits_is_told(door):
    api = door({"categories": {"read": {"limits": ["3/1m", "5/1h"]}}})
    assert [(api.ask()["x-ratelimit-limit"], api.clock.advance(30))[0] for _ in range(5)] == ["3", "3", "3", "5", "5"]
    denied = api.ask()
    assert (denied.status, denied["x-ratelimit-limit"], denied["retry-after"]) == (429, "5", str(3600 - 150))


def test_a_limit_that_said_no_charges_no_other(door):
    api = door({"categories": {"read": {"limits": ["1/1m", "5/1h"]}}}, headers="ietf")
    api.many(10)
    assert api.ask()["ratelimit"] == '"read-1m";r=0;t=60, "read-1h";r=4;t=3600'


@pytest.mark.parametrize("wait", [0.000001, 0.3, 0.999999, 1.0, 59.0])
def test_retry_after_is_whole_seconds_never_0_never_too_early(door, wait):
    api = door({"categories": {"read": {"limit": 1, "window": "1m"}}})
    api.ask()
    api.clock.advance(60 - wait)
    retry = api.ask()["retry-after"]
    assert retry.isdecimal()
    assert int(retry) >= 1
    assert 0 <= int(retry) - wait < 1 or int(retry) == 1
    api.clock.advance(int(retry))
    assert api.ask().status == 200


def test_a_cost_that_no_longer_fits_has_no_retry_after(door):
    api = door({"categories": {"read": {"limit": 5, "cost": 5}}})
    gate = api.guard.gates["read"]
    decision = gate.limiter.peek("x", 6)
    answer = api.guard.answers.denial(fake_request(), decision, gate.category.policy)
    assert answer.status == 429
    assert "retry-after" not in dict(api.guard.answers.raw_fields(decision))


def fake_request(accept=None):
    from tidegate.inbound.client.request import Request  # noqa: PLC0415 - one test's

    return Request("GET", "/", PEER, {}, lambda name: accept if name == "accept" else None)


@pytest.mark.parametrize(
    ("accept", "json_wanted"),
    [
        (None, False),
        ("", False),
        ("*/*", False),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", False),
        ("application/json", True),
        ("application/problem+json", True),
        ("APPLICATION/JSON ; Q=1", True),
        ("application/json, text/plain, */*", True),
        ("text/plain, application/json", False),
        ("text/plain;q=0.5, application/json", True),
        ("application/json;q=0.4, text/plain;q=0.5", False),
        ("application/json;q=0", False),
        ("application/json;q=", False),
        ("application/json;q=nan", False),
        ("application/json;q=7", False),
        ("json" * 20_000, False),
        ("," * 60_000 + "application/json", False),
        ("application/json;;;q", False),
        ("application/json;;v=1", True),
    ],
)
def test_bodies_by_accept(accept, json_wanted):
    assert prefers_json(accept) is json_wanted


def test_problem_details(door):
    api = door(ONE)
    api.ask()
    reply = api.ask(headers=[("Accept", "application/json")])
    assert reply["content-type"] == "application/problem+json"
    assert json.loads(reply.body) == {
        "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
        "title": "Request cannot be satisfied as assigned quota has been exceeded",
        "status": 429,
        "detail": "Rate limit exceeded. Try again in 60 seconds.",
        "violated-policies": ["read"],
    }


@pytest.mark.parametrize(
    ("made", "status", "kind", "body"),
    [
        ("slow down", 429, "text/plain; charset=utf-8", b"slow down"),
        ({"error": "slow"}, 429, "application/json", b'{"error": "slow"}'),
        (Response(418, b"teapot", (("Content-Type", "x/y"),)), 418, "x/y", b"teapot"),
        (None, 429, "text/plain", b"Rate limit exceeded. Try again later."),
    ],
)
def test_answers_of_ones_own(door, made, status, kind, body):
    asked = []
    api = door(ONE, denied=lambda request, decision: asked.append((request, decision)) or made)
    api.ask()
    reply = api.ask()
    assert (reply.status, reply["content-type"], reply.body) == (status, kind, body)
    assert reply["cache-control"] == "no-store"
    assert reply["retry-after"] == "60"
    ((request, decision),) = asked
    assert (request.method, request.path, request.address) == ("GET", "/api/feeds", PEER)
    assert isinstance(decision, Decision)


def test_head_is_answered_without_a_body(door):
    api = door(ONE)
    api.ask()
    reply = api.ask(method="HEAD")
    assert (reply.status, reply.body, reply["content-length"]) == (429, b"", "37")


def test_fields_can_be_exposed_to_scripts_of_other_origins(door):
    api = door(ONE, expose=True)
    names = "X-RateLimit-Limit, X-RateLimit-Remaining, X-RateLimit-Reset, Retry-After"
    assert [api.ask()["access-control-expose-headers"] for _ in range(2)] == [names, names]
    assert "access-control-expose-headers" not in door(ONE).ask().headers


def test_the_short_way_to_the_fields_writes_what_the_long_one_writes(door):
    """For every algorithm, allowed and denied, one limit and several."""
    for algorithm in ("sliding_log", "token_bucket", "fixed_window", "sliding_window", "calendar_window"):
        window = {"window": "minute"} if algorithm == "calendar_window" else {"window": "90s"}
        for extra in ([], [{"limit": 4, "window": "1h"}]):
            limits = [{"limit": 3, "algorithm": algorithm, "name": "one", **window}, *extra]
            api = door({"categories": {"read": {"limits": limits}}})
            limiter = api.guard.gates["read"].limiter
            for _ in range(6):
                decision = limiter.try_acquire("x", 1)
                long_way = [(name.lower().encode(), value.encode()) for name, value in write(decision, "x")]
                assert ResponseWriter().raw_fields(decision) == long_way
                api.clock.advance(7)


@given(
    moves=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40_000_000)), max_size=25),
    algorithm=st.sampled_from(["sliding_log", "token_bucket", "fixed_window"]),
)
@example(moves=[(0, 0), (1, 0), (0, 61_000_000), (0, 0)], algorithm="sliding_log")
def test_what_a_gate_writes_is_what_the_decision_says(moves, algorithm):
    """The shortest way of all, that of a gate with a single log; costs of 0 and clocks that step back included."""
    api = WsgiDoor({"categories": {"read": {"limit": 4, "window": "1m", "algorithm": algorithm}}})
    gate = api.guard.gates["read"]
    for cost, microseconds in moves:
        decision = gate.decide("x", cost)
        expected = [(name.lower().encode(), value.encode()) for name, value in write(decision, "x")]
        assert gate.fields(decision) == api.guard.answers.raw_fields(decision) == expected
        api.clock.advance((microseconds - 5_000_000) / 1_000_000)


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
def test_both_middlewares_say_the_same(requests, style):
    config = {
        "exempt": ["/health"],
        "exempt_methods": ["OPTIONS"],
        "categories": {
            "read": {"limits": ["3/1m", "9/1h"]},
            "login": {"limit": 2, "window": "5m", "endpoints": ["/login"], "count": [401], "penalty": {"503": 1}},
        },
    }
    doors = [kind(config, headers=style, trusted_proxies=["10.0.0.0/8"], log_burst=0) for kind in (AsgiDoor, WsgiDoor)]
    for path, method, peer, status, seconds in requests:
        headers = [("X-Status", status), ("X-Forwarded-For", "198.51.100.7"), ("Accept", "application/json")]
        first, second = [door.ask(path, method, headers, peer) for door in doors]
        assert (first.status, first.headers, first.body) == (
            second.status, second.headers, b"" if method == "HEAD" and second.status == 429 else second.body,
        )  # fmt: skip
        for door in doors:
            door.clock.advance(seconds / 10)
    for door in doors:
        door.close()


# ---- categories ------------------------------------------------------------------------------------------------------


def test_costs_and_methods(door):
    config = {
        "categories": {
            "up": {"limit": 10, "endpoints": [{"path": "/up/{id}", "methods": ["POST"], "cost": 4}, "/small"]},
        }
    }
    api = door(config)
    assert api.ask("/up/1", "POST").remaining == 6
    assert api.ask("/small", "DELETE").remaining == 5
    assert api.ask("/up/2", "POST").remaining == 1
    assert api.ask("/up/3", "POST").status == 429
    assert api.ask("/up/3", "GET")["x-ratelimit-limit"] == "60"  # another category


def test_shadow_mode_decides_and_records_and_never_denies(door, caplog):
    api = door({"categories": {"read": {"limit": 2, "mode": "shadow"}}})
    assert api.many(5) == [200] * 5
    assert api.ask()["x-ratelimit-remaining"] == "0"
    assert "retry-after" not in api.ask().headers
    assert caplog.text.count("rate limit exceeded (shadow mode: allowed): read: 203.0.113.9") == 5
    assert api.many(6, "/api/cluster")[-1] == 429  # other categories are as they were


def test_concurrency_limits_hold_slots_until_the_response_is_complete():
    config = {"categories": {"read": {"limit": 1, "window": "30s", "algorithm": "concurrency"}}}
    api = WsgiDoor(config=config)

    def start(*args):
        return None

    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/api/feeds", "REMOTE_ADDR": PEER}
    first = api.middleware(dict(environ), start)
    assert api.ask().status == 429
    first.close()
    assert api.many(3) == [200, 200, 200]


async def test_concurrency_limits_hold_slots_in_tasks():
    config = {"categories": {"read": {"limit": 1, "window": "30s", "algorithm": "concurrency"}}}
    inner = []

    async def app(scope, receive, send):
        if not inner:
            inner.append(None)
            inner[0] = await api.asked()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    api = AsgiDoor(config=config, app=app)
    assert (await api.asked()).status == 200
    assert inner[0].status == 429
    assert (await api.asked()).status == 200
    await api.middleware.close()
    api.runner.close()


# ---- mounted applications --------------------------------------------------------------------------------------------


def test_a_server_that_mounts_the_application_changes_nothing():
    api = AsgiDoor()
    for _ in range(5):
        assert api.ask("/v1/api/cluster", root_path="/v1")["x-ratelimit-limit"] == "5"
    assert api.ask("/v1/api/cluster", root_path="/v1").status == 429
    assert api.ask("/v1/api/feeds", root_path="/v1").status == 200
    api.close()
    wsgi = WsgiDoor()
    assert wsgi.many(6, "/api/cluster", SCRIPT_NAME="/v1") == [200] * 5 + [429]


def test_inside_a_mounted_application_endpoints_are_written_as_a_whole():
    api = AsgiDoor()
    assert api.ask("/api/cluster", root_path="/api")["x-ratelimit-limit"] == "5"
    api.close()
    assert WsgiDoor().ask("/cluster", SCRIPT_NAME="/api")["x-ratelimit-limit"] == "5"


@pytest.mark.parametrize("path", ["/api/cluster", "api/cluster", "//api/cluster"])
def test_a_missing_or_doubled_slash_behind_the_mount_point_is_no_way_around(path):
    """gunicorn under SCRIPT_NAME=/pre makes `api/cluster` of GET /preapi/cluster; Flask serves /api/cluster."""
    wsgi = WsgiDoor()
    assert wsgi.many(5, "/api/cluster", SCRIPT_NAME="/pre") == [200] * 5
    assert wsgi.ask(path, SCRIPT_NAME="/pre").status == 429
    api = AsgiDoor()
    assert api.many(5, "/pre/api/cluster", root_path="/pre") == [200] * 5
    assert api.ask(f"/pre{path}", root_path="/pre").status == 429
    api.close()


def test_endpoints_in_a_mounted_application_are_written_from_any_mount_point():
    limits = {"strict": {"limit": 1, "endpoints": ["/outer/inner/a", "/inner/b", "/c"]}}
    api = AsgiDoor({"categories": limits})
    root = {"root_path": "/outer/inner", "app_root_path": "/outer"}
    for path in "abc":
        assert api.ask(f"/outer/inner/{path}", **root, peer=f"203.0.113.{ord(path)}")["x-ratelimit-limit"] == "1"
    api.close()


def test_the_most_specific_endpoint_wins_with_and_without_the_prefix(door):
    """`/*` is less specific than an endpoint of a route, in whichever form that is written."""
    categories = {
        "all": {"limit": 7, "endpoints": ["/*"]},
        "some": {"limit": 9, "endpoints": ["/items/*"]},
        "one": {"limit": 8, "endpoints": ["/v1/items/7"]},
    }
    api = door({"categories": categories})
    for path, limit in (("/items/1", "9"), ("/items/7", "8"), ("/other", "7")):
        assert mounted(api, path)["x-ratelimit-limit"] == limit


def mounted(api, path, root="/v1", **more):
    """Ask an application that is mounted under a root."""
    if isinstance(api, AsgiDoor):
        return api.ask(root + path, root_path=root, **more)
    return api.ask(path, SCRIPT_NAME=root, **more)


# ---- paths with several readings -------------------------------------------------------------------------------------

# Which route serves /jobs/../login depends on the router: both categories are charged.
BOTH = "/jobs/../login"


def both(**login):
    jobs = {"limit": 3, "window": "1h", "endpoints": ["/jobs/*"]}
    return {"categories": {"jobs": jobs, "login": {"limit": 5, "window": "1h", "endpoints": ["/login"], **login}}}


def test_a_path_with_two_readings_is_charged_to_both(door):
    api = door(both())
    assert [api.ask(path).remaining for path in (BOTH, "/jobs/1", "/login", BOTH)] == [2, 1, 3, 0]
    assert api.ask(BOTH).status == 429
    assert api.ask("/login").remaining == 1  # what one of them denies, the other is not charged for
    assert api.guard.gates["login"].allowed == 4


def test_neither_a_shadow_nor_a_charge_by_status_makes_way_for_a_path_with_two_readings(door):
    shadow = door(both(mode="shadow", limit=1))
    assert shadow.many(4, BOTH) == [200, 200, 200, 429]
    failures = door(both(count=[401], limit=1))
    assert [failures.ask(BOTH, headers=[("X-Status", "200")]).status for _ in range(4)] == [200, 200, 200, 429]
    assert [failures.ask("/login", headers=[("X-Status", "401")]).status for _ in range(2)] == [401, 429]


def test_a_charge_by_status_of_one_reading_is_corrected(door):
    api = door(both(count=[401]))
    ok, failed = [("X-Status", "200")], [("X-Status", "401")]
    assert [api.ask(BOTH, headers=headers).remaining for headers in (ok, failed)] == [2, 1]
    assert api.ask("/login", headers=failed).remaining == 3


def test_slots_of_one_reading_are_given_back(door):
    api = door(both(algorithm="concurrency", limit=1))
    assert api.many(4, BOTH) == [200, 200, 200, 429]
    assert api.ask("/login").status == 200


@pytest.mark.parametrize("header", ["X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override"])
def test_a_method_that_the_application_is_asked_to_take_it_for(door, header):
    items = {"limit": 2, "endpoints": [{"path": "/items", "methods": ["DELETE"]}]}
    api = door({"categories": {"remove": items}, "exempt_methods": ["OPTIONS"]})
    for method in ("POST", "OPTIONS"):
        assert api.ask("/items", method, [(header, "delete")]).status == 200
    assert api.ask("/items", "DELETE").status == 429
    assert api.ask("/items", "POST", [(header, "DELETE")]).status == 429
    assert api.ask("/items", "POST").status == 200


# ---- a middleware in front of another --------------------------------------------------------------------------------


def test_two_middlewares_write_their_fields_once(door):
    inner = door({"categories": {"read": {"limit": 2}}})
    outer = door({"categories": {"read": {"limit": 3}}}, app=inner.middleware)
    replies = [outer.ask() for _ in range(4)]
    assert [reply.status for reply in replies] == [200, 200, 429, 429]
    for reply, limit in zip(replies, ["2", "2", "2", "3"], strict=True):
        assert [value for name, value in reply.fields if name.lower() == "x-ratelimit-limit"] == [limit]
    assert [reply.headers.get("retry-after") for reply in replies] == [None, None, "60", "60"]
    assert inner.guard.gates["read"].denied == outer.guard.gates["read"].denied == 1


# ---- a route that is known already -----------------------------------------------------------------------------------


class Found:
    """A route, as routers leave it in the scope."""

    def __init__(self, path):
        self.path = path
        self.endpoint = None


def test_a_route_that_the_framework_has_found():
    config = {"categories": {"heavy": {"limit": 2, "endpoints": ["/feed/{name}/cluster"]}}}
    api = AsgiDoor(config)
    route = Found("/feed/{id}/cluster")
    assert [api.ask(f"/elsewhere/{i}", route=route).status for i in range(3)] == [200, 200, 429]
    assert api.ask("/feed/9/cluster")["x-ratelimit-limit"] == "2"
    api.close()


def test_a_mount_is_no_route():
    """Starlette leaves the mount there while the route is still open: its path says nothing of the category."""
    api = AsgiDoor({"categories": {"lax": {"limit": 10**6, "endpoints": ["/sub"]}}})
    mount = Mount("/sub", AsgiDoor().app)
    for path, limit in (("/sub/api/cluster", "5"), ("/sub", "1000000")):
        assert api.ask(path, route=mount, root_path="/sub")["x-ratelimit-limit"] == limit
    api.close()


# ---- trouble ---------------------------------------------------------------------------------------------------------


class BrokenStore(MemoryStore):
    """A store of somebody else's that cannot be reached."""

    def apply_one(self, *args, **kwargs):
        raise StoreUnavailable("no route to host")

    def apply(self, *args, **kwargs):
        raise StoreUnavailable("no route to host")

    def shortcut(self, policy, otherwise, live):
        return otherwise


@pytest.mark.parametrize("extra", [{}, {"count": [401]}])
def test_a_store_that_cannot_decide_is_no_outage(door, caplog, extra):
    api = door({"categories": {"read": {"limit": 1, **extra}}}, store=BrokenStore())
    assert api.many(3) == [200] * 3
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 3
    assert "read: the store could not decide: no route to host" in caplog.text


@pytest.mark.parametrize("extra", [{}, {"count": [401]}])
def test_a_store_that_cannot_decide_denies_where_that_was_asked_for(door, extra):
    api = door({"categories": {"read": {"limit": 1, "on_store_error": "deny", **extra}}}, store=BrokenStore())
    reply = api.ask(headers=[("Accept", "application/json")])
    assert (reply.status, reply["retry-after"]) == (503, "1")
    assert json.loads(reply.body)["type"].endswith("#temporary-reduced-capacity")
    assert not api.reached


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"colour": 1}, "colour: unknown option"),
        ({"key": "user"}, "key: must be a function, not 'user'"),
        ({"unknown": "deny"}, "unknown: must be one of allow, limit"),
        ({"on_message": "wait"}, "on_message: must be one of close, drop"),
        ({"admin": "stats"}, "admin: must be a path such as"),
        ({"admin_token": "short"}, "admin_token: must be a secret of at least 16 ASCII characters"),
        ({"log_every": -1}, "log_every: must be a whole number from 0, not -1"),
        ({"reload": 0}, "reload: must be a number of seconds above 0"),
        ({"ipv6_prefix": 0}, "ipv6_prefix: must be a number of bits"),
        ({"count": {"nothing": print}}, "count: there is no category 'nothing'"),
        ({"count": {"read": 1}}, "count: must be a mapping of categories to functions"),
        ({"lease": "long"}, "lease"),
        ({"store": "disk://"}, "no store for disk://"),
        ({"config": "/nowhere.yaml"}, "cannot be read"),
    ],
)
def test_what_is_wrong_is_refused_in_the_constructor(door, option, message):
    with pytest.raises(ConfigError) as error:
        door(**option)
    assert message in str(error.value)
    assert "short" not in str(error.value)


def test_reset_is_an_instant(door):
    api = door()
    assert int(api.ask()["x-ratelimit-reset"]) == START + 60
    api.clock.advance(0.5)
    assert int(api.ask()["x-ratelimit-reset"]) == START + 61  # rounded up


def test_requests_are_counted_and_noted_whichever_way_they_take(door):
    api = door({"categories": {"read": {"limit": 4}}})
    gate = api.guard.gates["read"]
    for asked in range(1, 7):  # new, known (the short way), known when chores are due, denied
        api.ask()
        assert (gate.allowed, gate.denied) == (min(asked, 4), max(0, asked - 4))
        assert gate.seen["203.0.113.9"].remaining == max(0, 4 - asked)
        api.clock.advance(0.6)


def test_clients_are_forgotten_a_few_at_a_time(door):
    api = door({"cleanup_interval_minutes": 1, "categories": {"read": {"limit": 5, "window": "10s"}}})
    for host in range(300):
        api.ask(peer=f"198.51.{host // 256}.{host % 256}")
    seen = api.guard.gates["read"].seen
    api.clock.advance(11)
    api.ask()
    assert 240 <= len(seen) <= 251  # a sixth of the interval has passed, so a sixth of them was looked at
    for _ in range(7):
        api.clock.advance(10)
        api.ask()
    assert list(seen) == ["203.0.113.9"]


def test_a_clock_that_steps_back_is_survived(door):
    api = door({"categories": {"read": {"limit": 3}}})
    assert api.many(2) == [200, 200]
    api.clock.advance(-1000)
    assert api.many(2) == [200, 429]  # nothing is credited twice
    api.guard.chores(api.guard.now())
    api.clock.advance(1061)
    assert api.ask().status == 200
