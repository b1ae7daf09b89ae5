"""Each server of the table has a sample response, which yields the limits and the wait that the server means."""

from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tests.headers.server_samples import NOW, SAMPLES
from tidegate.headers import LimitAdvice, read
from tidegate.headers._dialects import DIALECTS
from tidegate.headers._servers import SERVERS
from tidegate.outbound._quota.exchange import has_rate_limit_headers

MALFORMED = ["", "-1", "abc", "1e9", "0x1", "NaN", "/", "1/", "/2", "1/2/3", ";", ";;w=", "20;w=", "20;w=abc", "\x00",
             "9" * 400, "2023-13-40T99:99Z", "2023-11-14T22:18", "true", "a;1,b", ",", "é;1"]  # fmt: skip


def test_each_server_has_a_sample_and_a_source():
    assert SAMPLES.keys() == SERVERS.keys()
    for name, server in SERVERS.items():
        assert server.source.startswith("https://"), name
        assert all(dialect in DIALECTS.values() for dialect in server.dialects), name


@cases("name", SERVERS)
def test_a_sample_is_read(name):
    sample = SAMPLES[name]
    advice = read(sample.headers, NOW)
    assert advice.limits == sample.limits
    assert advice.retry_after == sample.retry_after
    assert (sample.retry_after is not None) == SERVERS[name].retry_after
    assert bool(sample.limits) == bool(SERVERS[name].dialects or SERVERS[name].own)


@cases("name", [name for name in SERVERS if name != "stripe"])
def test_clients_notice_the_headers_of_a_server(name):
    assert has_rate_limit_headers([*SAMPLES[name].headers.items()])
    assert has_rate_limit_headers([(field.encode(), b"") for field in SAMPLES[name].headers])


@cases("value", MALFORMED)
@cases("name", SERVERS)
def test_a_malformed_value_never_raises_and_announces_nothing_absurd(name, value):
    for field in SAMPLES[name].headers:
        advice = read(SAMPLES[name].headers | {field: value}, NOW)
        assert all((limit.remaining or 0) >= 0 and (limit.reset_after or 0) >= 0 for limit in advice.limits)


@given(name=st.sampled_from(sorted(SERVERS)), value=st.text(max_size=30))
def test_no_value_raises(name, value):
    read(dict.fromkeys(SAMPLES[name].headers, value), NOW)


def test_the_level_of_a_bucket_above_its_size_leaves_nothing():
    assert read({"X-Shopify-Shop-Api-Call-Limit": "41/40"}, NOW).limits == (LimitAdvice("default", 40, 0),)


def test_a_global_limit_of_discord_has_that_name():
    fields = {"X-RateLimit-Limit": "50", "X-RateLimit-Remaining": "0", "X-RateLimit-Bucket": "abcd1234"}
    assert read(fields | {"X-RateLimit-Global": "true"}, NOW).limits == (LimitAdvice("global", 50, 0),)
    assert read(fields | {"X-RateLimit-Global": "false"}, NOW).limits == (LimitAdvice("abcd1234", 50, 0),)


def test_a_malformed_list_of_azure_is_ignored_as_a_whole():
    fields = {"x-ms-ratelimit-remaining-resource": "Microsoft.Compute/HighCostGet3Min;107,nonsense"}
    assert read(fields, NOW).limits == ()
