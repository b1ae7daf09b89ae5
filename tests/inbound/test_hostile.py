"""Whatever a client sends: no exception, no way around a category, nothing raw in an answer."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.inbound.harness import AsgiDoor, WsgiDoor

DODGES = [
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


@pytest.fixture(scope="module", params=[AsgiDoor, WsgiDoor], ids=["asgi", "wsgi"])
def guarded(request):
    """A door behind a trusted proxy, whose `read` category never ends; one for all examples."""
    api = request.param({"categories": {"read": {"limit": 10**6}}}, trusted_proxies=["10.0.0.0/8"], log_burst=0)
    yield api
    api.close()


@pytest.mark.parametrize("path", DODGES)
def test_no_way_around_a_category(door, path):
    api = door()
    api.many(5, "/api/cluster")
    assert api.ask(path).status == 429
    assert len(api.reached) == 5


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: f"{header[0]} {header[1][:9]!r}")
@pytest.mark.parametrize("peer", ["10.0.0.1", "203.0.113.9"])
def test_hostile_headers_are_survived(guarded, header, peer):
    reply = guarded.ask(headers=[header], peer=peer)
    assert reply.status == 200
    assert reply["x-ratelimit-limit"] == "1000000"


def test_a_flood_of_headers(guarded):
    headers = [("X-Forwarded-For", f"1.1.{n // 256}.{n % 256}") for n in range(5000)] + [("X-Junk", "j" * 1000)] * 1000
    assert guarded.ask(headers=headers, peer="10.0.0.1").status == 200


text = st.text(st.characters(max_codepoint=255), max_size=60)


@given(
    path=st.text(max_size=40).map(lambda rest: "/" + rest),
    method=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=10),
    peer=st.none() | st.ip_addresses().map(str) | text,
    headers=st.lists(st.tuples(st.sampled_from(["X-Forwarded-For", "Forwarded", "Accept", "Authorization"]), text)),
)
@example(path="/\ud800", method="GET", peer="::1%\udcff", headers=[])
@example(path="/", method="GET", peer="1.2.3.4", headers=[("Forwarded", 'for="'), ("Forwarded", "for=1.2.3.4")])
def test_whatever_is_sent_is_answered(guarded, path, method, peer, headers):
    path = path.replace("?", "")
    reply = guarded.ask(path, method, headers, peer)
    assert reply.status in (200, 403, 405, 429)
    if reply.status == 200:
        assert 0 <= reply.remaining <= 10**6


@given(st.lists(st.tuples(st.sampled_from([*DODGES, "/api/cluster"]), st.sampled_from(["GET", "POST", "get", "BREW"]))))
def test_however_it_is_written_five_are_let_in(requests):
    api = WsgiDoor(log_burst=0)
    statuses = [api.ask(path, method).status for path, method in requests]
    assert statuses == [200] * min(5, len(requests)) + [429] * max(0, len(requests) - 5)


@given(hops=st.lists(text, max_size=5), client=st.ip_addresses(v=4).filter(lambda ip: not ip.is_private).map(str))
def test_nobody_can_choose_another_address(guarded, hops, client):
    """Whatever stands left of what the proxy saw, the client is who the proxy saw."""
    header = ("X-Forwarded-For", ",".join([*hops, client]))
    assert guarded.guard.clients.find("10.0.0.1", [header]).address == client


def test_what_is_remembered_is_bounded(guarded):
    for number in range(6000):
        guarded.ask(f"/{number}")
        guarded.guard.clients.find(f"198.18.{number // 256}.{number % 256}", [])
    assert len(guarded.guard.targets) <= 4096
    assert len(guarded.guard.clients.cache) <= 4096
    guarded.ask("/" + "x" * 10_000)
    assert all(len(place[1]) <= 256 for place in guarded.guard.targets)
