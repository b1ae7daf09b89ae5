"""A flood of made-up clients from one network: it fills its share of the table, and only its own clients notice."""

import pytest

from tests.inbound.harness import AsgiDoor, WsgiDoor
from tidegate.inbound.client.address import address_group
from tidegate.inbound.client.request import by_header

MOST = 1000
SMALL = {"max_entries": MOST, "categories": {"read": {"limit": 3}}}


def networks(count, block="2001:db8:1"):
    """Give addresses of different /64s in one /48."""
    return [f"{block}:{number:x}::1" for number in range(count)]


def entries(api):
    return api.guard.store.metrics()["entries"]


@pytest.mark.parametrize("kind", [AsgiDoor, WsgiDoor], ids=["asgi", "wsgi"])
def test_a_flood_of_one_48_locks_nobody_else_out(kind):
    api = kind(SMALL, log_burst=0)
    api.flood(networks(4 * MOST))
    assert entries(api) <= MOST // 2 + 1
    elsewhere = [f"203.0.{number}.9" for number in range(200)] + [f"2001:db8:{number:x}::1" for number in range(2, 200)]
    for peer in elsewhere:
        assert api.ask(peer=peer).remaining == 2  # a count of its own
        assert api.many(3, peer=peer) == [200, 200, 429]
    assert api.ask(peer="2001:db8:1:ffff::1").status == 429  # the network's new clients share one
    api.close()


def test_clients_of_the_network_that_are_known_keep_their_counts(door):
    api = door(SMALL, log_burst=0)
    first, second, *others = networks(3 * MOST)
    api.many(3, peer=first)
    api.many(1, peer=second)
    api.flood(others)
    assert api.ask(peer=first).status == 429  # exhausted, and stays so
    assert api.ask(peer=second).remaining == 1


def test_several_floods_leave_room_as_well(door):
    api = door(SMALL, log_burst=0)
    for block in range(1, 5):
        api.flood(networks(MOST, f"2001:db8:{block}"))
    assert MOST - entries(api) >= MOST // 2**4 - 10
    assert api.ask(peer="198.51.100.7").remaining == 2


def test_when_the_windows_are_over_the_network_has_room_again(door):
    api = door(SMALL, log_burst=0)
    api.flood(networks(2 * MOST))
    api.clock.advance(120)
    api.flood(networks(MOST // 2 - 100, "2001:db8:2"))  # as many calls, so that what has ended is swept
    peers = networks(50)
    assert [api.ask(peer=peer).remaining for peer in peers] == [2] * 50


@pytest.mark.parametrize("most", [100, 256])
def test_a_24_of_ipv4_does_not_fill_a_small_table(door, most):
    api = door({**SMALL, "max_entries": most}, log_burst=0)
    api.flood(f"203.0.113.{number}" for number in range(256))
    assert entries(api) <= most // 2 + 1
    assert api.ask(peer="198.51.100.7").remaining == 2


def test_made_up_headers_are_counted_to_the_network_that_sends_them(door):
    api = door(SMALL, key=by_header("x-tenant"), log_burst=0)
    for number in range(3 * MOST):
        api.ask(headers=[("X-Tenant", f"made up {number}")], peer=f"203.0.113.{number % 256}")
    assert entries(api) <= MOST // 2 + 1
    for number in range(100):
        assert api.ask(headers=[("X-Tenant", f"tenant {number}")], peer=f"198.51.{number}.7").remaining == 2
        assert api.ask(peer=f"192.0.{number}.7").remaining == 2
    assert api.ask(headers=[("X-Tenant", "new")], peer="203.0.113.1").status == 429


def test_the_log_tells_once_whose_flood_it_is(door, caplog):
    api = door(SMALL, log_burst=0)
    api.flood(networks(2 * MOST))
    (line,) = [record.getMessage() for record in caplog.records if record.name == "tidegate.stores.memory.store"]
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
def test_the_group_of_an_address(key, prefix, group):
    assert address_group(key, prefix) == group
