"""IPv4 networks as clients, and which default categories apply."""

import json
import logging

import pytest

from tests.cases import cases
from tidegate import ConfigError
from tidegate.inbound import address_key
from tidegate.inbound._client.address import address_group
from tidegate.inbound._rules.config import load_rules

STATS = "/api/admin/rate-limit-stats"
TOKEN = "a-long-admin-token"  # noqa: S105 - of these tests
TWO = {"categories": {"all": {"limit": 2, "window": "1m", "endpoints": ["/*"]}}}


@pytest.mark.parametrize(
    ("address", "prefix", "key"),
    [
        ("203.0.113.77", 24, "203.0.113.0/24"),
        ("203.0.113.77", 32, "203.0.113.77"),
        ("::ffff:203.0.113.77", 24, "203.0.113.0/24"),
        ("203.0.113.77", 1, "128.0.0.0/1"),
        ("2001:db8::1", 24, "2001:db8::/64"),
        ("testclient", 24, "testclient"),
    ],
)
def test_the_key_of_an_ipv4_address_is_its_network(address, prefix, key):
    assert address_key(address, ipv4_prefix=prefix) == key


@cases("bits", [0, 33, True, "24", None])
def test_invalid_prefixes(make_app, bits):
    with pytest.raises(ConfigError, match="ipv4_prefix: must be an integer from 1 to 32"):
        address_key("203.0.113.7", ipv4_prefix=bits)
    with pytest.raises(ConfigError, match="ipv4_prefix: must be an integer from 1 to 32"):
        make_app(TWO, ipv4_prefix=bits)
    with pytest.raises(ConfigError, match="ipv4_prefix: expected an integer"):
        make_app({**TWO, "ipv4_prefix": bits})


def test_groups_contain_many_networks():
    assert address_group("203.0.113.0/24", ipv4_prefix=24) == "203.0.0.0/16"
    assert address_group("203.0.113.7") == "203.0.113.0/24"
    assert address_group("128.0.0.0/1", ipv4_prefix=1) == "128.0.0.0/1"


def test_a_network_shares_its_limit(make_app):
    for api in (make_app(TWO, ipv4_prefix=24), make_app({**TWO, "ipv4_prefix": 24})):
        assert [api.request("/", peer=f"203.0.113.{host}").status for host in (1, 2, 3)] == [200, 200, 429]
        assert api.request("/", peer="203.0.114.1").status == 200


def test_an_option_takes_precedence_over_the_file(make_app):
    api = make_app({**TWO, "ipv4_prefix": 8, "ipv6_prefix": 32}, ipv4_prefix=24)
    assert api.statuses(3, "/", peer="203.0.113.1") == [200, 200, 429]
    assert api.request("/", peer="203.0.114.1").status == 200
    assert [api.request("/", peer=f"2001:db8:{net}::1").status for net in (1, 2, 3)] == [200, 200, 429]


def test_the_administrator_names_an_address_of_the_network(make_app):
    api = make_app(TWO, ipv4_prefix=24, admin_token=TOKEN)

    def act(**action):
        headers = [("Authorization", f"Bearer {TOKEN}")]
        return json.loads(api.request(STATS, "POST", headers, body=json.dumps(action).encode()).body)

    api.statuses(3, "/", peer="203.0.113.1")
    assert act(action="reset", key="203.0.113.200")["key"] == "203.0.113.0/24"
    assert api.request("/", peer="203.0.113.1").status == 200
    assert act(action="block", key="203.0.113.200", seconds=60)["key"] == "203.0.113.0/24"
    assert api.request("/", peer="203.0.113.2").status == 429
    assert act(action="unblock", key="203.0.113.3")["found"] is True
    assert api.request("/", peer="203.0.113.2").status == 200


# ---- default categories ----------------------------------------------------------------------------------------------

OWN = {"limit": 2, "endpoints": ["/own"]}
DEFAULTS = "expensive, moderately, read, very_expensive"
DESCRIBED = "expensive (5/1h), moderately (10/1h), read (60/1m), very_expensive (3/1h)"
ALL = set(DEFAULTS.split(", "))


@cases(
    ("config", "names", "unmatched"),
    [
        (None, ALL, "read"),
        ({}, ALL, "read"),
        ({"exempt": ["/health"]}, ALL, "read"),
        ({"categories": {}}, ALL, "read"),
        ({"categories": {"read": {"limit": 7}}}, ALL, "read"),  # the form of the spec: the others keep their defaults
        ({"categories": {"own": OWN}}, {"own"}, None),
        ({"categories": {"read": OWN}}, {"read"}, "read"),
        ({"categories": {"own": OWN, "read": {"limit": 7}}}, {"own", "read"}, "read"),
        ({"categories": {"own": OWN, "expensive": {"limit": 7}}}, {"own", "expensive"}, None),
        ({"categories": {"own": OWN}, "defaults": True}, ALL | {"own"}, "read"),
        ({"categories": {"own": OWN}, "defaults": False}, {"own"}, None),
        ({"defaults": False}, set(), None),
        ({"categories": {"own": OWN}, "unmatched": "own"}, {"own"}, "own"),
    ],
)
def test_own_categories_are_the_only_ones(config, names, unmatched):
    rules = load_rules(config)
    assert {category.name for category in rules.categories} == names
    assert (rules.unmatched.name if rules.unmatched else None) == unmatched


def test_requests_that_no_own_category_matches_are_not_limited(make_app):
    api = make_app({"categories": {"own": OWN}})
    assert api.statuses(100, "/elsewhere") == [200] * 100
    assert "x-ratelimit-limit" not in api.request("/api/cluster").headers
    assert api.statuses(3, "/own") == [200, 200, 429]


def test_a_default_category_that_is_named_keeps_its_endpoints(make_app):
    api = make_app({"categories": {"own": OWN, "expensive": {"limit": 7}}})
    assert api.request("/api/cluster")["x-ratelimit-limit"] == "7"
    assert "x-ratelimit-limit" not in api.request("/api/refresh").headers


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"categories": {"own": OWN}}, "rate limiter initialized: categories own (2/1h)"),
        (
            {"exempt": ["/health"]},
            f"rate limiter initialized: categories {DESCRIBED}; with their default limits: {DEFAULTS}",
        ),
    ],
)
def test_the_start_names_the_default_categories(make_app, caplog, config, line):
    caplog.set_level(logging.INFO)
    make_app(config)
    assert [record.message for record in caplog.records if "initialized" in record.message] == [line]
