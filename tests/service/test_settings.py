"""The settings: the file, options and environment, and a collection of bad files."""

import json
import socket
from pathlib import Path

import pytest
import yaml

from tests.cases import cases
from tidegate import ConfigError
from tidegate._cli.start import add_options as add_start_options
from tidegate.service._config import settings as module
from tidegate.service._config.envoy_files import convert
from tidegate.service._config.schema import schema
from tidegate.service._config.settings import OPTIONS, load_settings
from tidegate.service._runtime import server

BAD_SETTINGS = sorted((Path(__file__).parent / "bad_settings").glob("*.yaml"))
TOKEN = "a-token-of-some-length"  # noqa: S105 - of a test

ADVICE = "set decision_token, or open: true if the network is trusted"


@pytest.fixture
def load(tmp_path):
    def write(text, **more):
        path = tmp_path / "service.yaml"
        path.write_text(text, encoding="utf-8")
        return load_settings(path, **more)

    return write


@cases("path", BAD_SETTINGS)
def test_bad_files_are_refused(path):
    """The first line of each file is the expected error message."""
    expected = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
    with pytest.raises(ConfigError) as error:
        load_settings(path)
    assert str(error.value) == f"{path}:{expected}".replace("BAD_SETTINGS", str(path.parent))
    assert error.value.file == str(path)
    assert error.value.line is not None


def test_there_are_enough_bad_files():
    assert len(BAD_SETTINGS) > 45


def test_the_defaults_are_safe():
    settings = load_settings()
    assert (str(settings.listen), settings.grpc, settings.store) == ("127.0.0.1:8080", None, "memory://")
    assert not settings.open
    assert settings.policies.entries == {}
    assert load_settings({}) == settings


def test_the_example_in_the_docstring_is_valid():
    example = module.__doc__.partition("\n\n")[2].partition("\n\n")[0]
    settings = load_settings(yaml.safe_load("\n".join(line[4:] for line in example.splitlines())))
    assert set(settings.policies.entries) == {"api", "login"}
    assert settings.policies.entries["login"].rollout == 25
    assert set(settings.policies.domains) == {"edge"}


def test_options_override_the_environment_which_overrides_the_file(load):
    text = "listen: 127.0.0.1:1\nmax_wait: 1s\nworkers: 1\n"
    environment = {"TIDEGATE_LISTEN": "127.0.0.1:2", "TIDEGATE_MAX_WAIT": "2s"}
    settings = load(text, environment=environment, flags={"listen": "127.0.0.1:3"})
    assert (settings.listen.port, settings.max_wait, settings.workers) == (3, 2.0, 1)


def test_policies_from_options_and_environment(load):
    settings = load(
        "policies: {api: 1/1m, other: 1/1h}\n",
        environment={"TIDEGATE_POLICIES": "api=2/1m, 20/1h; mail = 5/1d"},
        policies=("mail=6/1d",),
    )
    limits = {name: [str(limit) for limit in entry.policy.limits] for name, entry in settings.policies.entries.items()}
    assert limits == {"api": ["2/1m", "20/1h"], "other": ["1/1h"], "mail": ["6/1d"]}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"flags": {"workers": "none"}}, "--workers: expected an integer from 1 to 256, not 'none'"),
        (
            {"environment": {"TIDEGATE_LISTEN": "x"}},
            "TIDEGATE_LISTEN: expected an address such as 127.0.0.1:8080, not 'x'",
        ),
        ({"policies": ("api",)}, "--policy: expected NAME=LIMITS such as 'api=100/1m, 1000/1h', not 'api'"),
        (
            {"environment": {"TIDEGATE_POLICIES": "a=b"}},
            "TIDEGATE_POLICIES: expected a limit such as '60/1m' or '5 per 30s' (at column 1 of 'b')",
        ),
        (
            {"flags": {"workers": "[1"}},
            "--workers: is not valid YAML: expected ',' or ']', but got '<stream end>'",
        ),
        (
            {"flags": {"listen": "0.0.0.0:80"}},
            f"--listen: 0.0.0.0:80 is reachable from other machines: {ADVICE}",
        ),
    ],
)
def test_errors_name_the_option_or_variable(given, message):
    with pytest.raises(ConfigError) as error:
        load_settings(**given)
    assert str(error.value) == message


def test_a_token_is_never_shown():
    with pytest.raises(ConfigError) as error:
        load_settings({"decision_token": "hush hush"})
    assert "hush" not in str(error.value)
    assert TOKEN not in repr(load_settings({"decision_token": TOKEN}))


def test_tokens_from_files_and_environment(tmp_path, load):
    (tmp_path / "token").write_text(f"{TOKEN}\n", encoding="utf-8")
    assert load("admin_token_file: token\n").admin_token == TOKEN  # beside the file that names it
    assert load_settings(environment={"TIDEGATE_DECISION_TOKEN": TOKEN}).decision_token == TOKEN
    assert load_settings(flags={"decision_token_file": str(tmp_path / "token")}).decision_token == TOKEN
    with pytest.raises(ConfigError, match="cannot be combined with decision_token"):
        load(f"decision_token: {TOKEN}\ndecision_token_file: token\n")


def test_variables_in_the_file(tmp_path, load, monkeypatch):
    environment = {"REDIS_PASSWORD": "pa/ss", "A": TOKEN, "B": TOKEN[::-1], "WORKERS": "3"}
    text = (
        "store: redis://:${REDIS_PASSWORD}@db:6379/1\n"
        "decision_token: ${A}\nreservation_secret: ['${B}', plain-plain-plain-1]\nworkers: ${WORKERS}\n"
    )
    (tmp_path / "service.yaml").write_text(text, encoding="utf-8")
    settings = load_settings(tmp_path / "service.yaml", environment=environment)
    assert settings.store == "redis://:pa/ss@db:6379/1"
    assert (settings.decision_token, settings.workers) == (TOKEN, 3)
    assert settings.reservation_secret == (TOKEN[::-1], "plain-plain-plain-1")
    del environment["REDIS_PASSWORD"]
    with pytest.raises(
        ConfigError, match=r"service\.yaml:1: store: the environment variable REDIS_PASSWORD is not set"
    ):
        load_settings(tmp_path / "service.yaml", environment=environment)


def test_urls_from_files(tmp_path, load):
    (tmp_path / "url").write_text("redis://:secret@db:6379/1\n", encoding="utf-8")
    settings = load("store_file: url\nbus_file: url\nswarm_file: url\n")
    assert {settings.store, settings.bus, settings.swarm} == {"redis://:secret@db:6379/1"}
    assert load_settings(environment={"TIDEGATE_STORE_FILE": str(tmp_path / "url")}).store == settings.store
    with pytest.raises(ConfigError, match="store_file: cannot be combined with store"):
        load("store: memory://\nstore_file: url\n")
    (tmp_path / "url").write_text("\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="store_file: expected one line in"):
        load("store_file: url\n")


@pytest.mark.parametrize("given", [{"decision_token": TOKEN}, {"open": True}])
def test_other_addresses_need_a_token_or_open(given):
    assert not load_settings({"listen": "0.0.0.0:8080", **given}).listen.loopback


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.8.8.8:1", "[::1]:1", "localhost:1", "8080"])
def test_loopback_needs_no_token(address):
    settings = load_settings({"listen": address})
    assert settings.listen.loopback
    for name in ("listen", "grpc", "resp"):
        for text in (address, str(settings.listen)):
            for given in (
                load_settings({name: text}),
                load_settings(flags={name: text}),
                load_settings(environment={f"TIDEGATE_{name.upper()}": text}),
            ):
                assert getattr(given, name) == settings.listen


def test_every_setting_has_an_option_and_a_schema(capsys):
    import argparse  # noqa: PLC0415 - only here

    parser = argparse.ArgumentParser()
    add_start_options(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}  # noqa: SLF001 - no other way to list them
    described = schema()["properties"]
    for option in OPTIONS:
        assert option.name in described
        if option.secret:
            assert option.flag not in flags
        else:
            assert option.flag in flags


def known_to(part, whole):
    """Return the names of all settings in a part of the schema."""
    if "$ref" in part:
        return known_to(whole["$defs"][part["$ref"].rpartition("/")[2]], {**whole, "$defs": whole["$defs"]})
    return set(part.get("properties", {}))


def test_the_schema_has_the_same_names_as_the_reader():
    from tidegate.service._config import policy_file  # noqa: PLC0415 - the lists that it reads by

    whole = schema()
    json.dumps(whole)
    assert known_to({"$ref": "#/$defs/limit"}, whole) == set(policy_file.LIMIT_FIELDS)
    assert known_to({"$ref": "#/$defs/domain"}, whole) == set(policy_file.DOMAIN_FIELDS)
    assert known_to({"$ref": "#/$defs/descriptor"}, whole) == set(policy_file.DESCRIPTOR_FIELDS)
    descriptor = whole["$defs"]["descriptor"]["properties"]
    assert set(descriptor["rate_limit"]["properties"]) == set(policy_file.RATE_LIMIT_FIELDS)
    policy = whole["properties"]["policies"]["additionalProperties"]["anyOf"][1]
    assert set(policy["properties"]) == set(policy_file.POLICY_FIELDS)
    assert set(policy["properties"]["overrides"]["items"]["properties"]) == set(policy_file.OVERRIDE_FIELDS)


# ---- from Envoy's own service ----------------------------------------------------------------------------------------

ENVOYS = """\
domain: mongo_cps
descriptors:
  - key: database
    value: users
    rate_limit: {unit: second, requests_per_unit: 500}
  - key: database
    value: default*
    shadow_mode: true
    detailed_metric: true
    rate_limit: {unit: MINUTE, requests_per_unit: 50, name: wild}
  - key: user
    descriptors:
      - {key: plan, value: free, rate_limit: {unit: day, requests_per_unit: 3}}
      - {key: plan, value: paid, rate_limit: {unlimited: true}}
"""


def test_an_envoy_file_is_converted(tmp_path):
    path = tmp_path / "envoy.yaml"
    path.write_text(ENVOYS, encoding="utf-8")
    text, remarks = convert([path])
    settings = load_settings(yaml.safe_load(text))
    domain = settings.policies.domains["mongo_cps"]
    limits = {variant.policy.name: str(variant.policy.limits[0]) for variant in domain.variants()}
    assert limits == {
        "mongo_cps/database=users": "500/1s fixed_window name=per-second",
        "mongo_cps/database=default*": "50/1m fixed_window name=wild",
        "mongo_cps/user/plan=free": "3/1d fixed_window name=per-day",
    }
    assert domain.match([("user", "bob"), ("plan", "paid")]) is None
    assert len(remarks) == 1
    assert remarks[0].startswith(f"{path}:9: descriptors[1].detailed_metric: ignored")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{key: a, rate_limit: {unit: second, requests_per_unit: 0}}", "0 would block everything"),
        ("{key: a, quota_mode: true, rate_limit: {unit: second, requests_per_unit: 1}}", "is not supported"),
    ],
)
def test_unsupported_envoy_settings_are_refused(tmp_path, text, message):
    path = tmp_path / "envoy.yaml"
    path.write_text(f"domain: a\ndescriptors:\n  - {text}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as error:
        convert([path])
    assert error.value.line == 3


def test_the_name_of_a_service():
    assert server.service_name(load_settings({"name": "limits"})) == "limits"
    assert server.service_name(load_settings({"listen": "127.0.0.1:1234"})) == f"{socket.gethostname()}:1234"
