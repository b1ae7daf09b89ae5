"""A provider's file: its fields, and the message for each mistake."""

from pathlib import Path

import pytest

from tests.cases import cases
from tidegate import ConfigError, Limit
from tidegate.outbound import EndpointCost, KeyLocation, Providers, Retries
from tidegate.outbound._providers.file import read_provider

BAD_PROVIDERS = sorted((Path(__file__).parent / "bad_providers").glob("*.yaml"))


def test_the_provider_files_of_the_specification(tmp_path):
    (tmp_path / "fmp.yaml").write_text(
        "# fmp.yaml\ndomain: financialmodelingprep.com\nlimit: 300\nperiod: 1m\napi_key: your_fmp_api_key_here\n"
    )
    (tmp_path / "alphavantage.yaml").write_text(
        "domain: alphavantage.co\nlimit: 5\nperiod: 1m\napi_key: your_alphavantage_key_here\n"
    )
    (tmp_path / "yahoo.yaml").write_text("domain: finance.yahoo.com\nlimit: 2000\nperiod: 1h\n# api_key is optional\n")
    known = Providers.load(directories=[tmp_path])
    found = known.match("https://financialmodelingprep.com/api/v3/quote/AAPL")
    assert (found.name, found.domain, found.limits) == (
        "fmp", "financialmodelingprep.com", (Limit(300, "1m", "sliding_log"),)
    )  # fmt: skip
    assert found.api_key.reveal() == "your_fmp_api_key_here"
    assert found.file == str(tmp_path / "fmp.yaml")
    assert known.match("https://query1.finance.yahoo.com/v8").api_key is None
    assert [each.name for each in known] == ["alphavantage", "fmp", "yahoo"]


@pytest.mark.parametrize(("period", "seconds"), [("30s", 30), ("5m", 300), ("6h", 21_600), ("1d", 86_400)])
def test_the_periods_of_the_specification(period, seconds):
    provider = read_provider({"domain": "a.test", "limit": 1, "period": period})
    assert provider.limits[0].length == seconds * 1_000_000


def test_all_fields_of_a_provider():
    provider = read_provider(
        {
            "domain": "API.OpenAI.com",
            "name": "openai",
            "limits": [
                "60/1m",
                "90_000/1m unit=tokens name=tpm",
                {"limit": 10_000, "period": "day", "timezone": "America/New_York", "reset_hour": 9},
                {"limit": 7500, "period": "month"},
            ],
            "concurrency": {"limit": 5, "lease": "10m"},
            "endpoints": [{"path": "/v1/batch/*", "methods": ["post"], "cost": 5}, {"path": "/v1/*/free", "cost": 0}],
            "per": ["credential", "path"],
            "api_key": "sk-1",
            "key": {"header": "Authorization", "prefix": "Bearer"},
            "learn": "off",
            "retries": {"max": 3, "within": "30s"},
            "estimate": {"tokens": 800},
            "on_store_error": "local",
        }
    )
    assert provider.domain == "api.openai.com"
    assert provider.limits == (
        Limit(60, "1m", "sliding_log"),
        Limit(90_000, "1m", "sliding_log", unit="tokens", name="tpm"),
        Limit(10_000, "day", "calendar_window", timezone="America/New_York", reset_hour=9),
        Limit(7500, "month", "calendar_window"),
        Limit(5, "10m", "concurrency", unit="concurrent-requests", name="concurrency"),
    )
    assert provider.key_location == KeyLocation("header", "Authorization", "Bearer ")
    assert (provider.per, provider.learn, provider.retries) == (("credential", "path"), "off", Retries(3, 30.0))
    assert provider.policy.on_store_error == "local"
    batch = provider.endpoint("/v1/batch/7/items", "POST")
    assert batch == EndpointCost("/v1/batch/*", ("POST",), 5)
    assert provider.endpoint("/v1/batch", "POST") is batch
    assert provider.endpoint("/v1/batches", "POST") is None
    assert provider.endpoint("/v1/batch/7", "GET") is None
    assert provider.endpoint("/v1/x/free").cost == 0
    assert provider.cost(batch) == {"requests": 5, "concurrent-requests": 1, "tokens": 800}
    assert provider.cost(None) == {"requests": 1, "concurrent-requests": 1, "tokens": 800}


@cases(
    ("limits", "algorithm"),
    [
        ({"limit": 5, "period": "1m"}, "sliding_log"),
        ({"limit": 5, "period": "1m", "algorithm": "fixed_window"}, "fixed_window"),
        ({"limit": 5, "period": "1m", "burst": 10}, "token_bucket"),
        ({"limit": 5, "period": "1d", "timezone": "Europe/Berlin"}, "calendar_window"),
        ({"limits": ["5/1m"], "algorithm": "fixed_window"}, "fixed_window"),
        ({"limits": ["5/1m token_bucket"]}, "token_bucket"),
        ({"limits": "5/month"}, "calendar_window"),
        ({"concurrency": 5}, "concurrency"),
    ],
)
def test_the_algorithm_of_a_limit(limits, algorithm):
    assert read_provider({"domain": "a.test", **limits}).limits[0].algorithm == algorithm


def test_the_key_may_go_into_the_query():
    provider = read_provider(
        {"domain": "a.test", "limit": 1, "period": "1m", "api_key": "k", "key": {"query": "apikey"}}
    )
    assert provider.key_location == KeyLocation("query", "apikey")


@cases("path", BAD_PROVIDERS)
def test_each_bad_file_is_refused_with_line_and_message(path):
    """The first line of a file says which message its mistake must give: `# LINE: the message`."""
    line, _, message = path.read_text().splitlines()[0].removeprefix("# ").partition(": ")
    with pytest.raises(ConfigError) as error:
        read_provider(path)
    assert str(error.value) == f"{path}:{line}: {message}"


def test_the_bad_files_are_found():
    assert len(BAD_PROVIDERS) >= 15


def test_no_message_repeats_a_key(tmp_path):
    """Whatever is wrong near a key, and even if its beginning means something to YAML."""
    for number, line in enumerate(
        ["api_key: *hunter2", "api_key: !hunter2", "api_key: [hunter2]", "api_key: {hunter2: x}", "api_key: 'hunter2",
         "api_key: &x hunter2\nkey: {header: 'X Y'}", "api_key: hunter2\napi_key: hunter2", "api_key: @hunter2",
         'api_key: "hunter2\\e[1m"\nkey: {header: X}', "api_key: hunter2\n key: x", "apikey: hunter2"]
    ):  # fmt: skip
        path = tmp_path / f"{number}.yaml"
        path.write_text(f"domain: a.test\nlimit: 1\nperiod: 1m\n{line}\n")
        with pytest.raises(ConfigError) as error:
            read_provider(path)
        assert "hunter2" not in str(error.value)
        assert str(path) in str(error.value)


def test_only_errors_of_the_yaml_parser_hide_quoted_text_and_never_the_name_of_the_file(tmp_path):
    folder = tmp_path / "'is not valid YAML'"
    folder.mkdir()
    with pytest.raises(ConfigError) as error:
        read_provider(folder / "missing.yaml")
    assert str(error.value) == f"{folder / 'missing.yaml'}: cannot be read: No such file or directory"
    (folder / "bad.yaml").write_text("domain: 'hunter2\napi_key: *hunter2")
    with pytest.raises(ConfigError) as error:
        read_provider(folder / "bad.yaml")
    assert str(folder / "bad.yaml") in str(error.value)
    assert "hunter2" not in str(error.value)
