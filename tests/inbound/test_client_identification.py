"""The client of a request in both middlewares: proxies, exempt and blocked clients, custom keys."""

import json
from urllib.parse import quote_from_bytes

import pytest

from tests.cases import cases
from tests.inbound.harness import PEER, AsgiHarness, WsgiHarness
from tidegate import ConfigError
from tidegate.inbound._client.request import by_api_key, by_header

ONE = {"categories": {"read": {"limit": 1}}}


def test_forwarding_headers_of_untrusted_peers_are_ignored(make_app):
    api = make_app(ONE)
    assert api.request(headers=[("X-Forwarded-For", "1.1.1.1")]).status == 200
    assert api.request(headers=[("X-Forwarded-For", "2.2.2.2")]).status == 429


def test_behind_a_trusted_proxy_the_client_is_the_address_that_the_proxy_added(make_app):
    api = make_app(ONE, trusted_proxies=["10.0.0.0/8"])
    via = {"peer": "10.0.0.1"}
    assert api.request(headers=[("X-Forwarded-For", "9.9.9.9, 1.1.1.1")], **via).status == 200
    assert api.request(headers=[("X-Forwarded-For", "8.8.8.8, 1.1.1.1, 10.0.0.2")], **via).status == 429
    assert api.request(headers=[("X-Forwarded-For", "2.2.2.2")], **via).status == 200
    assert api.request(headers=[("Forwarded", "for=1.1.1.1")], **via).status == 429
    assert api.request(headers=[("X-Forwarded-For", "3.3.3.3")], peer="1.1.1.1").status == 429  # not a proxy


def test_a_wildcard_as_trusted_proxy_is_rejected_unless_written_twice(make_app):
    with pytest.raises(ConfigError, match="any client could impersonate any other"):
        make_app(trusted_proxies=["*"])
    assert make_app(trusted_proxies=["*", "*"]).request(headers=[("X-Forwarded-For", "1.1.1.1")]).status == 200


def test_ipv6_clients_are_limited_by_network(make_app):
    api = make_app(ONE)
    assert api.request(peer="2001:db8::1").status == 200
    assert api.request(peer="2001:db8::ffff:1").status == 429
    assert api.request(peer="2001:db8:0:1::1").status == 200
    whole = make_app(ONE, ipv6_prefix=128)
    assert [whole.request(peer=f"2001:db8::{host}").status for host in (1, 2, 1)] == [200, 200, 429]


def test_an_ipv4_mapped_address_is_the_ipv4_client(make_app):
    api = make_app(ONE)
    assert [api.request(peer=peer).status for peer in ("::ffff:1.2.3.4", "1.2.3.4")] == [200, 429]


def test_a_trusted_proxy_on_a_unix_socket(make_app):
    api = make_app(ONE, trusted_proxies=["unix"])
    statuses = [
        api.request(peer=None, headers=[("X-Forwarded-For", ip)]).status for ip in ("1.1.1.1", "2.2.2.2", "1.1.1.1")
    ]
    assert statuses == [200, 200, 429]


def test_exempt_clients_paths_and_methods_are_not_limited(make_app):
    api = make_app({**ONE, "exempt": ["/health"], "exempt_methods": ["OPTIONS"], "exempt_clients": ["192.0.2.0/24"]})
    assert api.statuses(3, peer="192.0.2.7") == [200] * 3
    assert api.statuses(3, "/health") == [200] * 3
    assert api.statuses(3, method="OPTIONS") == [200] * 3
    assert "x-ratelimit-limit" not in api.request("/health").headers
    assert api.statuses(2) == [200, 429]


def test_clients_blocked_by_the_configuration_are_denied(make_app):
    api = make_app({"blocked_clients": ["192.0.2.0/24"]})
    reply = api.request(peer="192.0.2.7", headers=[("Accept", "application/json")])
    assert reply.status == 429
    assert json.loads(reply.body)["type"].endswith("#abnormal-usage-detected")
    assert int(reply["retry-after"]) == 300
    assert not api.reached
    assert api.request(peer="192.0.3.7").status == 200


def test_requests_without_the_custom_key_are_limited_by_address(make_app):
    api = make_app(ONE, key=by_header("X-Tenant"))
    ann, bob = [("X-Tenant", "ann")], [("X-Tenant", "bob")]
    assert [api.request(headers=who).status for who in (ann, bob, ann, bob)] == [200, 200, 429, 429]
    assert api.request(headers=ann, peer="198.51.100.1").status == 429
    assert [api.request(peer=f"198.51.100.{host}").status for host in (1, 2, 1)] == [
        200,
        200,
        429,
    ]  # not one bucket for all


def test_custom_keys_never_collide(make_app):
    """A tenant named like an address is not that address, and key parts are kept separate."""
    api = make_app(ONE, key=lambda request: request.header("x-key") and tuple(request.header("x-key").split("|")))
    assert api.request(headers=[("X-Key", PEER)]).status == 200
    assert api.request().status == 200
    assert api.request(headers=[("X-Key", "a/b|c")]).status == 200
    assert api.request(headers=[("X-Key", "a|b/c")]).status == 200
    assert api.request(headers=[("X-Key", "a|b/c")]).status == 429


@cases("values", [("\xff", "\xfe"), ("\xff", "\xc3\xbf"), ("\ufffd".encode().decode("latin-1"), "\xff")])
@cases("chosen", [by_header("x-tenant"), by_api_key("x-tenant")])
def test_header_values_that_are_not_utf_8_do_not_share_a_count(make_app, values, chosen):
    """Each character is one byte, as in headers from servers."""
    api = make_app(ONE, key=chosen)
    for value in values:
        assert [api.request(headers=[("X-Tenant", value)]).status for _ in range(2)] == [200, 429]


@cases("last", [b"\xff", b"\xfe", b"\xc3\xbf", b"\xef\xbf\xbd", b"\xff\xfe"])
def test_paths_that_are_not_utf_8_do_not_share_a_count(make_app, last):
    api = make_app(ONE, key=lambda request: request.path)
    for path in (b"/\xfd", b"/\xfc", b"/" + last):
        assert [ask_bytes(api, path).status for _ in range(2)] == [200, 429]
    assert [key[1] for key in api.limiter.category_limiters["read"].last_decisions][:2] == ["/\udcfd", "/\udcfc"]


def ask_bytes(api, path):
    """Request a path of arbitrary bytes, encoded as servers encode it."""
    if isinstance(api, WsgiHarness):
        return api.request("/", PATH_INFO=path.decode("latin-1"))
    return api.request(path.decode("utf-8", "replace"), raw_path=quote_from_bytes(path).encode())


@pytest.mark.parametrize("raw", [None, b"", b"/elsewhere", b"/%FF?q"])
def test_a_raw_path_that_differs_from_the_path_is_ignored(raw):
    api = AsgiHarness(ONE, key=lambda request: request.path)
    api.request("/a\ufffd", raw_path=raw)
    assert list(api.limiter.category_limiters["read"].last_decisions) == [("key", "/a\ufffd")]
    api.close()


def test_api_keys_are_stored_as_hashes(make_app):
    api = make_app(ONE, key=by_api_key())
    api.request(headers=[("X-API-Key", "s3cret-key")])
    near = api.request("/api/admin/rate-limit-stats?top=5", peer="127.0.0.1").body
    assert b"s3cret" not in near
    assert b"x-api-key/" in near
