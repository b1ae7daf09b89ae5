"""client_address, address_key and TrustedProxies: trusted and untrusted proxies, and hostile headers."""

import ipaddress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.cases import cases
from tidegate import ConfigError
from tidegate.inbound import AddressSet, TrustedProxies, address_key, client_address

TRUSTED = TrustedProxies(["10.0.0.0/8", "192.168.0.1", "2001:db8:1::/48", "fe80::/10"])
PROXY = "10.0.0.1"


def xff(*values):
    return [("X-Forwarded-For", value) for value in values]


def forwarded(*values):
    return [("Forwarded", value) for value in values]


# ---- the peer --------------------------------------------------------------------------------------------------------


@cases(
    ("peer", "address"),
    [
        ("203.0.113.9", "203.0.113.9"),
        ("2001:DB8::0001", "2001:db8::1"),
        ("::ffff:203.0.113.9", "203.0.113.9"),
        ("fe80::1%eth0", "fe80::1"),
        ("testclient", "testclient"),
        (None, None),
        ("", None),
        ("/run/app.sock", None),
        ("unix:", None),
        ("203.0.113.9%eth0", None),
        ("x" * 300, None),
        ("a\nb", None),
    ],
)
def test_without_proxies_the_peer_is_the_client(peer, address):
    headers = xff("1.1.1.1") + forwarded("for=1.1.1.1")
    assert client_address(peer, headers, []) == address
    assert client_address(peer, headers, ["198.51.100.1"]) == address
    assert client_address(peer, headers, TrustedProxies()) == address


# ---- X-Forwarded-For -------------------------------------------------------------------------------------------------


@cases(
    ("value", "address"),
    [
        ("5.6.7.8", "5.6.7.8"),
        ("1.1.1.1, 5.6.7.8", "5.6.7.8"),  # the client wrote what is left of it
        ("5.6.7.8, 10.9.9.9", "5.6.7.8"),  # two trusted proxies
        ("1.1.1.1,5.6.7.8 ,\t10.9.9.9,192.168.0.1", "5.6.7.8"),
        ("10.2.2.2, 10.3.3.3", "10.2.2.2"),  # all trusted: the first
        ("5.6.7.8:4711", "5.6.7.8"),
        ("[2001:db8::1]:4711", "2001:db8::1"),
        ("[2001:db8::1]", "2001:db8::1"),
        ("2001:db8::1", "2001:db8::1"),
        ("2001:DB8:0:0::1%eth0", "2001:db8::1"),
        ('"5.6.7.8"', "5.6.7.8"),
        ('"[2001:db8::1]:80"', "2001:db8::1"),
        ("::ffff:5.6.7.8", "5.6.7.8"),
        ("5.6.7.8, ::ffff:10.1.1.1", "5.6.7.8"),  # an IPv4-mapped proxy
        ("5.6.7.8, 2001:db8:1::7", "5.6.7.8"),
        ("5.6.7.8, fe80::1%eth0", "5.6.7.8"),
        # an unreadable hop ends the search at the last address that a trusted proxy wrote
        ("1.1.1.1, garbage", PROXY),
        ("1.1.1.1, garbage, 10.2.2.2", "10.2.2.2"),
        ("garbage, 5.6.7.8", "5.6.7.8"),
        ("1.1.1.1, unknown", PROXY),
        ("1.1.1.1, _hidden", PROXY),
        ("1.1.1.1, ", PROXY),
        ("1.1.1.1,,10.2.2.2", "10.2.2.2"),
        (",", PROXY),
        ("1.1.1.1, 5.6.7.8:", PROXY),
        ("1.1.1.1, 5.6.7.8:x", PROXY),
        ("1.1.1.1, 5.6.7.8:123456", PROXY),
        ("1.1.1.1, 5.6.7", PROXY),
        ("1.1.1.1, 5.6.7.08", PROXY),
        ("1.1.1.1, 5.6.7.256", PROXY),
        ("1.1.1.1, 5.6.7.8 9.9.9.9", PROXY),
        ("1.1.1.1, 0x05060708", PROXY),
        ("1.1.1.1, 84281096", PROXY),
        ("1.1.1.1, [5.6.7.8]", PROXY),
        ("1.1.1.1, [2001:db8::1", PROXY),
        ("1.1.1.1, [2001:db8::1]x", PROXY),
        ("1.1.1.1, 2001:db8::g", PROXY),
        ("1.1.1.1, \u0661.1.1.1", PROXY),
        ("1.1.1.1, 5.6.7.8\0", PROXY),
        ("1.1.1.1, " + "9" * 65_536, PROXY),
        ("", PROXY),
    ],
)
def test_x_forwarded_for_is_read_from_right_to_left(value, address):
    assert client_address(PROXY, xff(value), TRUSTED) == address


def test_repeated_header_fields_are_one_list():
    assert client_address(PROXY, xff("1.1.1.1", "5.6.7.8", "10.2.2.2"), TRUSTED) == "5.6.7.8"
    assert client_address(PROXY, xff("5.6.7.8", ""), TRUSTED) == PROXY
    assert client_address(PROXY, xff("", "5.6.7.8"), TRUSTED) == "5.6.7.8"


def test_header_names_and_values_may_be_bytes_in_any_case():
    headers = [
        (b"host", b"x"),
        (b"X-FORWARDED-for", b"5.6.7.8"),
        (b"x-forwarded-for", "10.2.2.2"),
        (b"x-forwarded-foo", b"9"),
    ]
    assert client_address(PROXY, headers, TRUSTED) == "5.6.7.8"
    assert client_address(PROXY, iter(headers), TRUSTED) == "5.6.7.8"
    assert client_address(PROXY, {"x-forwarded-for": "5.6.7.8"}, TRUSTED) == "5.6.7.8"
    assert client_address(PROXY, [(b"x-forwarded-for", b"\xff\xfe")], TRUSTED) == PROXY


def test_hops_beyond_the_maximum_are_ignored():
    assert client_address(PROXY, xff("5.6.7.8" + ", 10.2.2.2" * 31), TRUSTED) == "5.6.7.8"
    assert client_address(PROXY, xff("5.6.7.8" + ", 10.2.2.2" * 32), TRUSTED) == "10.2.2.2"


# ---- Forwarded (RFC 7239) --------------------------------------------------------------------------------------------


@cases(
    ("value", "address"),
    [
        ("for=5.6.7.8", "5.6.7.8"),
        ("For=5.6.7.8;proto=https;by=10.0.0.1", "5.6.7.8"),
        ("proto=https;FOR=5.6.7.8", "5.6.7.8"),
        ('for="5.6.7.8:4711"', "5.6.7.8"),
        ('for="[2001:db8:cafe::17]:4711"', "2001:db8:cafe::17"),
        ('for="[2001:db8::1]:_port"', "2001:db8::1"),
        (r'for="5\.6.7.8"', "5.6.7.8"),
        ("for=[2001:db8::1]", "2001:db8::1"),  # invalid, but common and unambiguous
        ("for=5.6.7.8:80", "5.6.7.8"),
        ('for=1.1.1.1, for=5.6.7.8, for="10.2.2.2";host="a, b;c"', "5.6.7.8"),
        ("for=5.6.7.8;;proto=http;", "5.6.7.8"),
        ("for=5.6.7.8; proto=http ; by=10.0.0.1", "5.6.7.8"),
        ("garbage, for=5.6.7.8", "5.6.7.8"),
        ("for=1.1.1.1, for=unknown", PROXY),
        ("for=1.1.1.1, for=_gazonk", PROXY),
        ('for=1.1.1.1, for="_gazonk:80"', PROXY),
        ("for=1.1.1.1, proto=https", PROXY),
        ("for=1.1.1.1, ", PROXY),
        ("for=1.1.1.1, for", PROXY),
        ("for=1.1.1.1, for=", PROXY),
        ("for=1.1.1.1, for =5.6.7.8", PROXY),
        ("for=1.1.1.1, for=5.6.7.8;for=2.2.2.2", PROXY),
        ("for=1.1.1.1, for=5.6.7.8;x", PROXY),
        ("for=1.1.1.1, for=5.6.7.8 for=2.2.2.2", PROXY),
        ('for=1.1.1.1, for="5.6.7.8', PROXY),
        ('for=1.1.1.1, for="5.6.7.8"x', PROXY),
        ('for=1.1.1.1, for="5.6.7.8\\', PROXY),
        ('for=1.1.1.1, for=5.6.7.8"', PROXY),
        ("for=1.1.1.1, for=" + "[" * 65_536, PROXY),
    ],
)
def test_forwarded_is_read_from_right_to_left(value, address):
    assert client_address(PROXY, forwarded(value), TRUSTED) == address


@cases("opened", ['"', 'for="', 'for=1.1.1.1;x="', 'for="\\', '"\\"', 'x="a";y="'])
@cases("appended", ["for=5.6.7.8", 'for="[2001:db8::5]:80"', r'for=5.6.7.8;host="a\"b"'])
def test_an_unclosed_quote_does_not_hide_the_address_that_the_proxy_added(opened, appended):
    """In the same field line nothing can be parsed, so the result is the proxy; other lines are parsed separately."""
    seen = "2001:db8::5" if "[" in appended else "5.6.7.8"
    assert client_address(PROXY, forwarded(f"{opened}, {appended}"), TRUSTED) in (PROXY, seen)
    assert client_address(PROXY, forwarded(opened, appended), TRUSTED) == seen


# ---- both headers ----------------------------------------------------------------------------------------------------


def test_both_headers_are_used_if_they_agree():
    assert client_address(PROXY, xff("1.1.1.1, 5.6.7.8") + forwarded("for=5.6.7.8"), TRUSTED) == "5.6.7.8"


def test_headers_that_disagree_are_ignored():
    headers = xff("5.6.7.8") + forwarded("for=1.1.1.1")
    assert client_address(PROXY, headers, TRUSTED) == PROXY
    assert client_address(PROXY, [("Forwarded", "x"), *xff("5.6.7.8")], TRUSTED) == PROXY


def test_a_named_header_is_the_only_one_read():
    headers = xff("5.6.7.8") + forwarded("for=1.1.1.1")
    assert client_address(PROXY, headers, TrustedProxies(["10.0.0.0/8"], header="x-forwarded-for")) == "5.6.7.8"
    assert client_address(PROXY, headers, TrustedProxies(["10.0.0.0/8"], header="forwarded")) == "1.1.1.1"
    assert client_address(PROXY, forwarded("for=1.1.1.1"), TrustedProxies([PROXY], header="x-forwarded-for")) == PROXY
    with pytest.raises(ConfigError, match=r"header: must be both, x-forwarded-for, forwarded, or .*, not 'X Real IP'"):
        TrustedProxies(header="X Real IP")


def test_another_header_that_the_proxies_set_can_be_named():
    trusted = TrustedProxies(["10.0.0.0/8"], header="X-Real-IP")
    headers = [*xff("5.6.7.8"), ("x-real-ip", "7.7.7.7")]
    assert client_address(PROXY, headers, trusted) == "7.7.7.7"
    assert client_address("9.9.9.9", headers, trusted) == "9.9.9.9"  # not a trusted proxy
    assert client_address(PROXY, xff("5.6.7.8"), trusted) == PROXY
    # A client has sent the header, too: the proxy's own field line, or its own entry, is the last one.
    assert client_address(PROXY, [("X-Real-IP", "1.1.1.1"), ("X-Real-IP", "7.7.7.7")], trusted) == "7.7.7.7"
    assert client_address(PROXY, [("X-Real-IP", "1.1.1.1, 7.7.7.7")], trusted) == "7.7.7.7"
    assert client_address(PROXY, [("X-Real-IP", "nobody")], trusted) == PROXY


def test_every_framework_reads_the_named_header(make_app):
    api = make_app({}, trusted_proxies=TrustedProxies(["10.0.0.0/8"], header="x-real-ip"))
    for _ in range(5):
        assert api.request("/api/cluster", peer=PROXY, headers=[("X-Real-IP", "7.7.7.7")]).status == 200
    assert api.request("/api/cluster", peer=PROXY, headers=[("X-Real-IP", "7.7.7.7")]).status == 429
    assert api.request("/api/cluster", peer=PROXY, headers=[("X-Real-IP", "7.7.7.8")]).status == 200


# ---- TrustedProxies --------------------------------------------------------------------------------------------------


def test_unix_sockets_are_trusted_by_name():
    for peer in (None, "", "unix:", "/run/x.sock"):
        assert client_address(peer, xff("5.6.7.8"), ["unix"]) == "5.6.7.8"
        assert client_address(peer, xff("5.6.7.8"), ["unix:"]) == "5.6.7.8"
        assert client_address(peer, xff("5.6.7.8"), ["10.0.0.0/8"]) is None
        assert client_address(peer, [], ["unix"]) is None
    assert client_address("9.9.9.9", xff("5.6.7.8"), ["unix"]) == "9.9.9.9"


@pytest.mark.parametrize("wildcard", ["*", "0.0.0.0/0", "::/0"])
def test_a_wildcard_is_rejected_unless_written_twice(wildcard):
    with pytest.raises(
        ConfigError, match=r"trusted_proxies: '\*' matches every address, so .*write \['\*', '\*'\] to confirm"
    ):
        TrustedProxies([wildcard])
    with pytest.raises(ConfigError, match="any client could impersonate any other"):
        client_address("9.9.9.9", [], ["10.0.0.1", wildcard])
    assert client_address("9.9.9.9", xff("1.1.1.1, 5.6.7.8"), [wildcard, wildcard]) == "1.1.1.1"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("10.0.0.1/8", "'10.0.0.1/8' is not an address or network: did you mean '10.0.0.0/8'?"),
        ("proxy.example", "'proxy.example' is not an address or network: use addresses and networks such as"),
        ("10.0.0.0/33", "is not an address or network"),
        ("", "'' is not an address or network"),
        ("10.0.0", "is not an address or network"),
    ],
)
def test_invalid_addresses_are_rejected(entry, message):
    with pytest.raises(ConfigError) as error:
        TrustedProxies([entry])
    assert message in str(error.value)
    assert error.value.field == "trusted_proxies"


def test_address_set_membership_and_equality():
    addresses = AddressSet("10.0.0.0/8, ::1 ,::ffff:192.0.2.0/120")
    assert "10.255.0.1" in addresses
    assert "::ffff:10.0.0.1" in addresses
    assert "::1" in addresses
    assert "192.0.2.77" in addresses
    assert "192.0.3.1" not in addresses
    assert "::2" not in addresses
    assert None not in addresses
    assert "name" not in addresses
    assert repr(addresses) == "AddressSet(['10.0.0.0/8', '::1', '::ffff:192.0.2.0/120'])"
    assert not AddressSet()
    assert AddressSet("::1") == AddressSet(["::1"]) != AddressSet()
    assert len({AddressSet("::1"), AddressSet(["::1"]), TrustedProxies("::1")}) == 2
    assert TrustedProxies("::1") != TrustedProxies("::1", header="forwarded")


# ---- keys ------------------------------------------------------------------------------------------------------------


@cases(
    ("address", "prefix", "key"),
    [
        ("203.0.113.9", 64, "203.0.113.9"),
        ("::ffff:203.0.113.9", 64, "203.0.113.9"),
        ("2001:db8:1:2:3:4:5:6", 64, "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::", 64, "2001:db8:1:2::/64"),
        ("2001:db8:1:2:3:4:5:6", 48, "2001:db8:1::/48"),
        ("2001:db8:1:2:3:4:5:6", 128, "2001:db8:1:2:3:4:5:6"),
        ("fe80::1%eth0", 64, "fe80::/64"),
        ("testclient", 64, "testclient"),
        (None, 64, "unknown"),
        ("", 64, "unknown"),
        ("a b\n", 64, "unknown"),
        ("9" * 1000, 64, "unknown"),
    ],
)
def test_address_keys(address, prefix, key):
    assert address_key(address, prefix) == key


@pytest.mark.parametrize("prefix", [0, 129, -1, True, 64.0, "64"])
def test_invalid_prefixes_are_rejected(prefix):
    with pytest.raises(ConfigError, match="ipv6_prefix: must be an integer from 1 to 128"):
        address_key("::1", prefix)


# ---- arbitrary input -------------------------------------------------------------------------------------------------

addresses = st.one_of(
    st.ip_addresses().map(str), st.sampled_from(["10.1.1.1", "192.168.0.1", "2001:db8:1::5", "unknown"])
)
hostile = st.one_of(
    st.text(max_size=200),
    st.text(st.sampled_from('for=;,"\\[]:.% 0123456789abf_\t\0'), max_size=80),
    st.lists(addresses, max_size=6).map(", ".join),
    st.lists(addresses.map('for="{}"'.format), max_size=6).map(", ".join),
)
names = st.sampled_from(["X-Forwarded-For", "forwarded", "FORWARDED", "x-forwarded-for", "x-real-ip", "host"])


@given(st.one_of(st.none(), addresses, st.text(max_size=50)), st.lists(st.tuples(names, hostile), max_size=6))
def test_never_raises_and_returns_an_address_or_the_peer(peer, headers):
    found = client_address(peer, headers, TRUSTED)
    encoded = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers]
    client_address(peer, encoded, TRUSTED)
    if found is not None and found != peer:
        assert str(ipaddress.ip_address(found)) == found
    assert address_key(found)


@given(st.lists(hostile, max_size=3), st.ip_addresses(), st.booleans())
@example(written=['for="'], client=ipaddress.ip_address("5.6.7.8"), same_line=True)
def test_a_client_is_always_identified_as_itself_or_its_proxy(written, client, same_line):
    """The proxy appends the client's address to arbitrary client input, in the same field line or in another."""
    if str(client) in TRUSTED:
        return
    itself = client_address(str(client), [], [])
    for name, form in (("X-Forwarded-For", "{}"), ("Forwarded", 'for="[{}]"' if client.version == 6 else "for={}")):
        seen = form.format(client)
        lines = [*written[:-1], f"{written[-1]}, {seen}"] if written and same_line else [*written, seen]
        found = client_address(PROXY, [(name, line) for line in lines], TRUSTED)
        assert found == itself or (found == PROXY and name == "Forwarded" and same_line)


@given(hostile, hostile, st.ip_addresses())
def test_a_header_that_the_proxy_does_not_write_cannot_change_the_client(passed, written, client):
    if str(client) in TRUSTED:
        return
    itself = client_address(str(client), [], [])
    headers = [("Forwarded", passed), ("X-Forwarded-For", f"{written}, {client}")]
    assert client_address(PROXY, headers, TRUSTED) in (itself, PROXY)
