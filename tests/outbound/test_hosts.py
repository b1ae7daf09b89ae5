"""Which host a URL leads to, and which provider a host belongs to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tidegate import ConfigError
from tidegate.outbound import Providers, host_of

LABELS = st.text("ab", min_size=1, max_size=2)
HOSTS = st.lists(LABELS, min_size=1, max_size=4).map(".".join)


@cases(
    ("url", "host"),
    [
        ("https://financialmodelingprep.com/api/v3/quote/AAPL", "financialmodelingprep.com"),
        ("https://API.Example.COM/x", "api.example.com"),
        ("https://example.com.:8443/x", "example.com"),
        ("https://user:p%40ss@example.com:443/", "example.com"),
        ("https://user@name:x@example.com/", "example.com"),
        ("http://[::1]:8080/", "::1"),
        ("http://[2001:DB8:0:0::1]/", "2001:db8::1"),
        ("http://[fe80::1%25eth0]/", "fe80::1"),
        ("http://[::ffff:192.0.2.1]/", "192.0.2.1"),
        ("http://127.0.0.1:5000/", "127.0.0.1"),
        ("https://bücher.example/", "xn--bcher-kva.example"),
        ("https://BÜCHER.example/", "xn--bcher-kva.example"),
        ("https://xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("https://例え。テスト/", "xn--r8jz45g.xn--zckzah"),
        ("https://faß.de", "xn--fa-hia.de"),
        ("https://ex%61mple.com/", "example.com"),
        ("https://my_host.example", "my_host.example"),
        ("https://localhost?x=1", "localhost"),
        ("wss://stream.example.com/feed#now", "stream.example.com"),
        ("  https://example.com  ", "example.com"),
    ],
)
def test_hosts_are_normalised(url, host):
    assert host_of(url) == host


@cases("url", [
     "", "example.com/path", "/path", "https://", "https:///path", "https://@/", "https://:80/", "mailto:a@example.com",
     "http://a..b/", "http://-a.example/", "http://[::1", "http://[::1]x/", "http://[1.2.3.4]/", "http://1.2.3/",
     "http://256.1.1.1/", "http://exa mple.com/", "https://good.example\\@evil.example/", "http://" + "a" * 64 + ".com",
     "https://" + "a." * 130 + "com", "https://a\u2028b/", None, 7])  # fmt: skip
def test_urls_without_a_valid_host_are_refused(url):
    with pytest.raises(ConfigError, match="host"):
        host_of(url)


def test_an_error_shows_neither_password_nor_query():
    with pytest.raises(ConfigError) as error:
        host_of("https://user:secret1@/path?key=secret2#secret3")
    assert "secret" not in str(error.value)


def providers(*domains):
    return Providers.of(*({"domain": domain, "limit": 1, "period": "1m"} for domain in domains))


@cases(
    ("url", "domain"),
    [
        ("https://example.com/", "example.com"),
        ("https://www.example.com/", "example.com"),
        ("https://a.api.example.com/", "api.example.com"),
        ("https://api.example.com:444/", "api.example.com"),
        ("https://notexample.com/", None),
        ("https://example.com.evil.test/", None),
        ("https://com/", None),
        ("https://BÜCHER.example/", "xn--bcher-kva.example"),
        ("http://[0:0::1]/", "::1"),
        ("http://10.0.0.1/", "10.0.0.1"),
        ("http://1.10.0.0.1.example.com/", "example.com"),
    ],
)
def test_the_longest_domain_on_label_boundaries_wins(url, domain):
    known = providers("example.com", "api.example.com", "bücher.example", "::1", "10.0.0.1", "0.0.1.test")
    found = known.match(url)
    assert (found.domain if found else None) == domain


@given(HOSTS, st.lists(HOSTS, min_size=1, max_size=6, unique=True))
def test_matching_agrees_with_a_linear_search(host, domains):
    fitting = [domain for domain in domains if host == domain or host.endswith("." + domain)]
    found = providers(*domains).match(f"https://{host}/")
    assert (found.domain if found else None) == max(fitting, key=len, default=None)


def test_explain_reports_a_missing_provider():
    known = providers("example.com")
    assert known.match("https://other.test/x") is None
    assert known.explain("https://other.test/x") == (
        "no provider is configured for other.test: it runs without rate limiting"
    )
    assert known.explain("https://example.com/x") == "limited by provider example.com (1/1m sliding_log)"
