"""Mistakes on the command line of `tidegate start`: the message names the option, and nothing starts."""

import pytest

from tidegate._cli import main
from tidegate.service._config.settings import load_settings

FREE_PORT = ["--listen", "127.0.0.1:0"]
API = ["--policy", "api=5/1m"]


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ([*API, "--policy", "api=9/1h"], {}, "--policy: the policy 'api' is set twice"),
        ([*API, "--policy", " api = 9/1h"], {}, "--policy: the policy 'api' is set twice"),
        ([], {"TIDEGATE_POLICIES": "a=1/1m; a=2/1m"}, "TIDEGATE_POLICIES: the policy 'a' is set twice"),
        ([*API, "--no-demo-traffic"], {}, "--no-demo-traffic: only applies to the demonstration: add --demo"),
        ([*API, "--store", "foo"], {}, "--store: expected a URL such as 'memory://', not 'foo'"),
        ([*API, "--store", "foo://x"], {}, "--store: unknown scheme foo://"),
        ([*API, "--store", "sqlite:///x.db?foo=1"], {}, "--store: unknown option 'foo'"),
        (API, {"TIDEGATE_STORE": "foo"}, "TIDEGATE_STORE: expected a URL"),
    ],
)
def test_a_mistake_names_its_option(monkeypatch, capfd, arguments, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["start", *FREE_PORT, *arguments]) == 2
    errors = capfd.readouterr().err
    assert f"tidegate: {message}" in errors
    assert "serving on" not in errors


def test_a_wrong_store_in_a_file_names_its_line(tmp_path, capfd):
    path = tmp_path / "service.yaml"
    path.write_text("policies: {api: 5/1m}\nstore: foo://x\n", encoding="utf-8")
    assert main(["start", *FREE_PORT, str(path)]) == 2
    assert f"tidegate: {path}:2: store: unknown scheme foo://" in capfd.readouterr().err


@pytest.mark.parametrize("option", ["--provider", "--source"])
def test_a_service_that_does_not_start_logs_no_address(tmp_path, capfd, option):
    """A provider or source is read after the listening socket is open."""
    bad = tmp_path / "bad.yaml"
    bad.write_text("domain: x.example\n", encoding="utf-8")
    bad.chmod(0o600)
    assert main(["start", *FREE_PORT, *API, option, str(bad), "--data", str(tmp_path / "data")]) == 2
    errors = capfd.readouterr().err
    assert "bad.yaml:1: " in errors
    assert "serving on" not in errors


def test_an_option_replaces_a_policy_of_the_environment_which_replaces_one_of_the_file():
    document: dict[str, object] = {"policies": {"a": "1/1m", "b": "1/1m", "c": "1/1m"}}
    environment = {"TIDEGATE_POLICIES": "b=2/1m; c=2/1m"}
    entries = load_settings(document, policies=("c=3/1m",), environment=environment).policies.entries
    assert {name: entry.policy.limits[0].quota for name, entry in entries.items()} == {"a": 1, "b": 2, "c": 3}
