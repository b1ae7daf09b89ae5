"""Where a provider's key comes from: its file, the environment, or a file of its own; and a key that is never sent."""

import logging

import pytest

from tidegate import ConfigError
from tidegate.outbound import Providers
from tidegate.outbound._providers.file import read_provider

BASE = "domain: fmp.example\nlimit: 300\nperiod: 1m\n"
SENT = "key: {header: X-Api-Key}\n"


@pytest.fixture
def provider(tmp_path):
    def write(text, mode=0o600):
        path = tmp_path / "fmp.yaml"
        path.write_text(BASE + text)
        path.chmod(mode)
        return path

    return write


def key_of(known):
    return known.match("https://fmp.example").api_key.reveal()


def test_a_key_in_the_environment(provider, monkeypatch, caplog):
    path = provider("api_key: ${FMP_API_KEY}\n" + SENT, mode=0o644)
    monkeypatch.setenv("FMP_API_KEY", "hunter2")
    assert key_of(Providers.load([path], permissions="refuse")) == "hunter2"  # the file itself contains no key
    assert caplog.text == ""


@pytest.mark.parametrize("value", [None, ""])
def test_an_unset_variable_is_named(provider, monkeypatch, value):
    if value is None:
        monkeypatch.delenv("FMP_API_KEY", raising=False)
    else:
        monkeypatch.setenv("FMP_API_KEY", value)
    with pytest.raises(ConfigError, match=r"fmp\.yaml:4: api_key: the environment variable FMP_API_KEY is not set"):
        Providers.load([provider("api_key: ${FMP_API_KEY}\n")])


def test_a_key_in_a_file_of_its_own_is_rotated(provider, tmp_path):
    secret = tmp_path / "secrets" / "fmp"
    secret.parent.mkdir()
    secret.write_text("first\n")
    secret.chmod(0o444)  # as Docker and Kubernetes mount them
    known = Providers.load([provider("api_key_file: secrets/fmp\n" + SENT)], permissions="refuse")
    assert key_of(known) == "first"
    assert known.reload() == ()
    new = tmp_path / "new"
    new.write_text("second")
    new.replace(secret)
    assert known.reload() == ("fmp.example",)
    assert key_of(known) == "second"
    secret.unlink()
    assert known.reload() == ()
    assert (key_of(known), "cannot read" in known.problems[0]) == ("second", True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("api_key_file: nowhere\n", "api_key_file: cannot read .*nowhere: No such file or directory"),
        ("api_key_file: empty\n", "api_key_file: .*empty is empty"),
        ("api_key_file: empty\napi_key: x\n", "api_key_file: cannot be combined with 'api_key'"),
        ("api_key_file: control\n" + SENT, "api_key_file: contains a character that is not allowed in a header"),
    ],
)
def test_wrong_key_files_are_refused(provider, tmp_path, text, message):
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "control").write_text("a\nb")
    with pytest.raises(ConfigError, match=message):
        Providers.load([provider(text)])


def test_a_literal_key_may_contain_a_dollar():
    found = read_provider({"domain": "a.example", "limit": 1, "period": "1m", "api_key": "a${b}"})
    assert found.api_key.reveal() == "a${b}"


def test_a_key_that_is_never_sent_is_reported_once(provider, caplog):
    caplog.set_level(logging.WARNING)
    path = provider("api_key: hunter2\n")
    known = Providers.load([path])
    (record,) = caplog.records
    assert "provider fmp has an api_key that is never sent" in record.getMessage()
    assert "'key: bearer', 'key: header X-Api-Key' or 'key: query apikey'" in record.getMessage()
    assert "hunter2" not in caplog.text
    provider("api_key: hunter3\n")
    assert known.reload() == ("fmp.example",)
    assert len(caplog.records) == 1
    caplog.clear()
    Providers.load([provider("api_key: hunter2\n" + SENT)])
    assert caplog.records == []


@pytest.mark.parametrize(
    ("short", "location"),
    [
        ("bearer", ("header", "Authorization", "Bearer ", False)),
        ("header X-Api-Key", ("header", "X-Api-Key", "", False)),
        ("query apikey", ("query", "apikey", "", False)),
    ],
)
def test_a_key_location_has_a_short_form(provider, short, location):
    (found,) = Providers.load([provider(f"api_key: hunter2\nkey: {short}\n")])
    assert found.key_location == location


@pytest.mark.parametrize("wrong", ["Bearer", "apikey", "cookie sid", "query a b", "5"])
def test_an_unknown_short_form_is_refused(provider, wrong):
    with pytest.raises(ConfigError, match="key: expected bearer, 'header NAME' or 'query NAME', such as query apikey"):
        Providers.load([provider(f"api_key: hunter2\nkey: {wrong}\n")])


@pytest.mark.parametrize("domain", ["financialmodelingprep.com", "alphavantage.co"])
def test_the_warning_about_a_key_of_a_known_provider_says_what_to_add(tmp_path, caplog, domain):
    file = tmp_path / "p.yaml"
    file.write_text(f"domain: {domain}\nlimit: 5\nperiod: 1m\napi_key: hunter2\n")
    file.chmod(0o600)
    Providers.load([file])
    (message,) = caplog.messages
    assert message == "provider p has an api_key that is never sent: add 'key: query apikey', or remove the api_key"
    file.write_text(f"{file.read_text()}key: query apikey\n")
    caplog.clear()
    (found,) = Providers.load([file])
    assert (found.key_location.kind, found.key_location.name, caplog.messages) == ("query", "apikey", [])
