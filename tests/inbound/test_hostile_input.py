"""Hostile input: no exceptions, and no spelling of a path avoids its category."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.cases import cases
from tests.inbound.harness import AsgiHarness, WsgiHarness

SPELLINGS = [
    "/api//cluster", "//api/cluster", "/API/cluster", "/api/cluster/", "/api/./cluster", "/api/x/../cluster",
    "/api/%2e/cluster", "/api/%252e/cluster", "/api%2fcluster", "/%61pi/cluster", "/api/cluster;x=1",
    "/api;v=2/cluster", "/api/feeds/..;/cluster", "\\api\\cluster", "/api/cluster%00", "/api/cluster\0",
    "/api/cluster%20", "/api/cluster%3Fx=1", "/api/cluster#x", "/api/timeline/../cluster", "/api/feed/%2e%2e/cluster",
]  # fmt: skip

HEADERS = [
    ("X-Forwarded-For", "1.1.1.1" + ", 2.2.2.2" * 10_000),
    ("X-Forwarded-For", "x" * 65_536),
    ("X-Forwarded-For", "\x00\x01\xff"),
    ("X-Forwarded-For", "," * 65_536),
    ("Forwarded", 'for="' * 10_000),
    ("Forwarded", "for=" + "[" * 65_536),
    ("Forwarded", 'for="\\"' + "\\" * 60_000),
    ("Forwarded", ";" * 65_536),
    ("Accept", "application/json;q=" + "9" * 65_536),
    ("Accept", ",;" * 30_000),
    ("Authorization", "Bearer " + "\xff" * 60_000),
    ("Host", "\r\nSet-Cookie: a=b"),
    ("Origin", "null"),
]


@pytest.fixture(scope="module", params=[AsgiHarness, WsgiHarness], ids=["asgi", "wsgi"])
def proxied(request):
    """Build an application behind a trusted proxy with a very high limit, once for all examples."""
    api = request.param({"categories": {"read": {"limit": 10**6}}}, trusted_proxies=["10.0.0.0/8"], log_burst=0)
    yield api
    api.close()


@cases("path", SPELLINGS)
def test_other_spellings_of_a_path_do_not_avoid_its_category(make_app, path):
    api = make_app()
    api.statuses(5, "/api/cluster")
    assert api.request(path).status == 429
    assert len(api.reached) == 5


def misread(path):
    """Return a path whose characters are the bytes of another one: that path, encoded twice."""
    return path.encode().decode("latin-1")


@pytest.mark.parametrize("path", ["/é/login", "/ключ/login", misread("/é/login")])
def test_a_path_that_is_encoded_twice_does_not_replace_the_limit_of_another(make_app, path):
    categories = {"login": {"limit": 2, "window": "1m", "endpoints": [path]}, "read": {"limit": 1000, "window": "1m"}}
    api = make_app({"defaults": False, "unmatched": "read", "categories": categories})
    for other in (misread(path), misread(misread(path))):
        assert [api.request(other, peer="198.51.100.7")["x-ratelimit-limit"] for _ in range(2)] == ["1000"] * 2
    assert api.statuses(4, path) == [200, 200, 429, 429]
    for other in (misread(path), misread(misread(path))):
        assert api.request(other)["x-ratelimit-limit"] == "1000"


@cases("header", HEADERS)
@cases("peer", ["10.0.0.1", "203.0.113.9"])
def test_hostile_headers_do_not_raise(proxied, header, peer):
    reply = proxied.request(headers=[header], peer=peer)
    assert reply.status == 200
    assert reply["x-ratelimit-limit"] == "1000000"


def test_thousands_of_headers_do_not_raise(proxied):
    headers = [("X-Forwarded-For", f"1.1.{n // 256}.{n % 256}") for n in range(5000)] + [("X-Junk", "j" * 1000)] * 1000
    assert proxied.request(headers=headers, peer="10.0.0.1").status == 200


text = st.text(st.characters(max_codepoint=255), max_size=60)


@given(
    path=st.text(max_size=40).map(lambda rest: "/" + rest),
    method=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=10),
    peer=st.none() | st.ip_addresses().map(str) | text,
    headers=st.lists(st.tuples(st.sampled_from(["X-Forwarded-For", "Forwarded", "Accept", "Authorization"]), text)),
)
@example(path="/\ud800", method="GET", peer="::1%\udcff", headers=[])
@example(path="/", method="GET", peer="1.2.3.4", headers=[("Forwarded", 'for="'), ("Forwarded", "for=1.2.3.4")])
def test_arbitrary_requests_get_a_response(proxied, path, method, peer, headers):
    path = path.replace("?", "")
    reply = proxied.request(path, method, headers, peer)
    assert reply.status in (200, 403, 405, 429)
    if reply.status == 200:
        assert 0 <= reply.remaining <= 10**6


@given(
    st.lists(st.tuples(st.sampled_from([*SPELLINGS, "/api/cluster"]), st.sampled_from(["GET", "POST", "get", "BREW"])))
)
def test_all_spellings_of_a_path_share_the_limit_of_five(requests):
    api = WsgiHarness(log_burst=0)
    statuses = [api.request(path, method).status for path, method in requests]
    assert statuses == [200] * min(5, len(requests)) + [429] * max(0, len(requests) - 5)


@given(hops=st.lists(text, max_size=5), client=st.ip_addresses(v=4).filter(lambda ip: not ip.is_private).map(str))
def test_a_client_cannot_choose_its_address(proxied, hops, client):
    """The address that the proxy added is the client, whatever is left of it."""
    header = ("X-Forwarded-For", ",".join([*hops, client]))
    assert proxied.limiter.client_identifier.find("10.0.0.1", [header]).address == client


def test_caches_are_bounded(proxied):
    for number in range(6000):
        proxied.request(f"/{number}")
        proxied.limiter.client_identifier.find(f"198.18.{number // 256}.{number % 256}", [])
    assert len(proxied.limiter.targets.cached) <= 4096
    assert len(proxied.limiter.client_identifier.cache) <= 4096
    proxied.request("/" + "x" * 10_000)
    assert all(len(cache_key[1]) <= 256 for cache_key in proxied.limiter.targets.cached)
