"""A flood of fake clients from one network fills its share of the table and affects only clients of that network."""

import pytest

from tests.inbound.harness import AsgiHarness, WsgiHarness
from tidegate.inbound._client.address import address_group
from tidegate.inbound._client.request import by_header

MAX_ENTRIES = 1000
SMALL = {"max_entries": MAX_ENTRIES, "categories": {"read": {"limit": 3}}}


def networks(count, block="2001:db8:1"):
    """Return addresses of different /64 networks in one /48."""
    return [f"{block}:{number:x}::1" for number in range(count)]


def entries(api):
    return api.limiter.store.metrics()["entries"]


@pytest.mark.parametrize("kind", [AsgiHarness, WsgiHarness], ids=["asgi", "wsgi"])
def test_a_flood_from_one_48_does_not_affect_other_networks(kind):
    api = kind(SMALL, log_burst=0)
    api.flood(networks(4 * MAX_ENTRIES))
    assert entries(api) <= MAX_ENTRIES // 2 + 1
    elsewhere = [f"203.0.{number}.9" for number in range(200)] + [f"2001:db8:{number:x}::1" for number in range(2, 200)]
    for peer in elsewhere:
        assert api.request(peer=peer).remaining == 2  # a separate count
        assert api.statuses(3, peer=peer) == [200, 200, 429]
    assert api.request(peer="2001:db8:1:ffff::1").status == 429  # new clients of the network share a count
    api.close()


def test_known_clients_of_the_network_keep_their_counts(make_app):
    api = make_app(SMALL, log_burst=0)
    first, second, *others = networks(3 * MAX_ENTRIES)
    api.statuses(3, peer=first)
    api.statuses(1, peer=second)
    api.flood(others)
    assert api.request(peer=first).status == 429  # still exhausted
    assert api.request(peer=second).remaining == 1


def test_several_floods_leave_free_entries(make_app):
    api = make_app(SMALL, log_burst=0)
    for block in range(1, 5):
        api.flood(networks(MAX_ENTRIES, f"2001:db8:{block}"))
    assert MAX_ENTRIES - entries(api) >= MAX_ENTRIES // 2**4 - 10
    assert api.request(peer="198.51.100.7").remaining == 2


def test_the_network_can_add_clients_again_when_windows_end(make_app):
    api = make_app(SMALL, log_burst=0)
    api.flood(networks(2 * MAX_ENTRIES))
    api.clock.advance(120)
    api.flood(networks(MAX_ENTRIES // 2 - 100, "2001:db8:2"))  # enough calls to remove the expired entries
    peers = networks(50)
    assert [api.request(peer=peer).remaining for peer in peers] == [2] * 50


@pytest.mark.parametrize("most", [100, 256])
def test_an_ipv4_24_does_not_fill_a_small_table(make_app, most):
    api = make_app({**SMALL, "max_entries": most}, log_burst=0)
    api.flood(f"203.0.113.{number}" for number in range(256))
    assert entries(api) <= most // 2 + 1
    assert api.request(peer="198.51.100.7").remaining == 2


def test_keys_from_headers_belong_to_the_network_of_the_sender(make_app):
    api = make_app(SMALL, key=by_header("x-tenant"), log_burst=0)
    for number in range(3 * MAX_ENTRIES):
        api.request(headers=[("X-Tenant", f"made up {number}")], peer=f"203.0.113.{number % 256}")
    assert entries(api) <= MAX_ENTRIES // 2 + 1
    for number in range(100):
        assert api.request(headers=[("X-Tenant", f"tenant {number}")], peer=f"198.51.{number}.7").remaining == 2
        assert api.request(peer=f"192.0.{number}.7").remaining == 2
    assert api.request(headers=[("X-Tenant", "new")], peer="203.0.113.1").status == 429


def test_the_log_names_the_flooding_network_once(make_app, caplog):
    api = make_app(SMALL, log_burst=0)
    api.flood(networks(2 * MAX_ENTRIES))
    (line,) = [record.getMessage() for record in caplog.records if record.name == "tidegate.stores"]
    assert line == (
        "memory store: 501 live keys; group 2001:db8:1::/48 is over its share of max_entries, its new keys share one "
        "bucket until some expire"
    )


@pytest.mark.parametrize(
    ("key", "prefix", "group"),
    [
        ("203.0.113.9", 64, "203.0.113.0/24"),
        ("2001:db8:1:2::/64", 64, "2001:db8:1::/48"),
        ("2001:db8:1:2::5", 128, "2001:db8:1::/48"),
        ("2001:db8:1:200::/56", 56, "2001:db8::/40"),
        ("2001:db8:1::/48", 48, "2001:db8::/32"),
        ("testclient", 64, None),
        ("unknown", 64, None),
    ],
)
def test_address_groups(key, prefix, group):
    assert address_group(key, prefix) == group
