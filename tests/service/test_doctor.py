"""`tidegate doctor` finds problems of a deployment, says how to fix them, and changes nothing without --fix."""

import json
import socket

import pytest

from tests.servers.nats import NatsServer
from tests.servers.process import free_port, until
from tests.servers.valkey import ValkeyServer
from tests.service.harness import ADMIN, DECISION
from tidegate import Limit, Policy
from tidegate._cli import main
from tidegate.service import _doctor as doctor
from tidegate.service._config.settings import load_settings
from tidegate.service._doctor import EXTRAS, Finding, examine, judge_store
from tidegate.stores._postgres import PostgresStore

RULES = "policies: {api: 3/1h}\n"


@pytest.fixture
def check(tmp_path):
    """Check a settings file. Returns only the findings that are not `ok`, unless `everything` is set."""

    def check_file(text, *, mode=0o600, everything=False, trusted=(), environment=None, **flags):
        path = tmp_path / "service.yaml"
        path.write_text(text, encoding="utf-8")
        path.chmod(mode)
        flags = {"listen": f"127.0.0.1:{free_port()}", **flags}
        found = examine(load_settings(path, flags=flags), trusted, environment or {})
        return found if everything else [finding for finding in found if finding.level != "ok"]

    return check_file


def store_of(tmp_path):
    return f"store: sqlite:///{tmp_path / 'limits.db'}\n"


def test_a_correct_deployment(check, tmp_path):
    found = check(store_of(tmp_path) + RULES, everything=True)
    assert {finding.level for finding in found} == {"ok"}
    text = "\n".join(finding.what for finding in found)
    for part in (
        "on Python 3",
        "httptools",
        "policies: 1",
        "responds within",
        "clocks",
        "only this machine",
        "permissions of",
    ):
        assert part in text


def test_every_problem_says_how_to_fix_it(check, tmp_path):
    text = f"{RULES}open: true\nswarm: nats://127.0.0.1:{free_port()}\n"
    found = check(text, mode=0o666, trusted=["*"], environment={"FORWARDED_ALLOW_IPS": "*"}, listen="0.0.0.0:0")
    assert len(found) >= 6
    assert all(finding.to_do for finding in found)


def test_functions_of_an_older_version_are_named_and_dropped_by_fix_only(postgres_url, capsys):
    url = f"{postgres_url}?timeout=10&connect_timeout=10&deadline=10s"
    older = PostgresStore(postgres_url, timeout=10, connect_timeout=10)
    older.schema = older.schema._replace(version=0)
    policy = Policy("p", (Limit(9, "1d"),))
    assert older.apply_one("acquire", policy, "k", (1,))

    def run(*options):
        assert main(["doctor", "--store", url, "--json", *options]) == 0
        findings = json.loads(capsys.readouterr().out)["findings"]
        return [(found["level"], found["what"]) for found in findings if "older tidegate" in found["what"]]

    in_use = [("note", "processes of an older tidegate use tidegate_v0 in the store")]
    assert run() == run("--fix") == in_use
    assert older.apply_one("acquire", policy, "k", (1,))
    older.close()
    unused = [("note", "only an older tidegate uses tidegate_v0 in the store")]
    until(lambda: run() == unused, "the end of the session")
    assert run() == unused  # without --fix, nothing is dropped
    assert run("--fix") == [("ok", "dropped tidegate_v0 of an older tidegate")]
    assert run() == []


def test_a_store_in_memory_is_noted(check):
    (finding,) = check(RULES)
    assert finding.level == "note"
    assert "usage is lost when the process ends" in finding.what


def test_settings_without_policies(check, tmp_path):
    (finding,) = check(store_of(tmp_path))
    assert (finding.level, "no policy is configured" in finding.what) == ("problem", True)


def test_a_store_that_responds_and_one_that_does_not(check):
    with ValkeyServer() as valkey:
        text = f"store: {valkey.url}?deadline=5s\n{RULES}"
        assert check(text) == []
        valkey.kill()
        (finding,) = check(text.replace("5s", "200ms"))
        assert finding.level == "problem"
        assert "does not respond: " in finding.what
        assert "Connection refused" in finding.what
        (finding,) = check(f"store: redis://x:hidden@y?mars=1\n{RULES}")
        assert "hidden" not in finding.what.partition(":")[0]
        assert "cannot be opened" in finding.what


def test_a_sqlite_file_that_cannot_be_created(check, tmp_path):
    (finding,) = check(f"store: sqlite:///{tmp_path / 'missing' / 'limits.db'}\n{RULES}")
    assert (finding.level, "its folder must exist" in finding.what) == ("problem", True)


@pytest.mark.parametrize(
    ("duration", "skew", "levels", "part"),
    [
        (800, 10, ["ok", "ok"], "within 1ms"),
        (20_000, 10, ["note", "ok"], "delays every decision"),
        (800, 3_500_000, ["ok", "problem"], "3s500ms ahead of the clock of this machine"),
        (800, -3_500_000, ["ok", "problem"], "3s500ms behind the clock of this machine"),
    ],
)
def test_the_response_time_and_the_clock_of_a_store(duration, skew, levels, part):
    found = list(judge_store("s", duration, skew))
    assert [finding.level for finding in found] == levels
    assert any(part in finding.what for finding in found)


def test_a_bus_that_responds_and_one_that_does_not(check, tmp_path, monkeypatch):
    with NatsServer() as nats:
        found = check(store_of(tmp_path) + RULES + f"swarm: {nats.url}\nbus: {nats.url}\n", everything=True)
        assert [finding.level for finding in found if "the bus" in finding.what] == ["ok"]  # once
    monkeypatch.setattr(doctor, "BUS_TIMEOUT", 0.1)
    (finding,) = check(store_of(tmp_path) + RULES + f"bus: nats://me:hidden@127.0.0.1:{free_port()}\n")
    assert (finding.level, "does not respond" in finding.what) == ("problem", True)
    assert "hidden" not in finding.what


def test_modes_of_files(check, tmp_path):
    (tmp_path / "token").write_text(DECISION, encoding="utf-8")
    (tmp_path / "token").chmod(0o644)
    for name, text in (("with-key.yaml", "domain: a.test\nlimit: 1\nperiod: 1m\napi_key: x\n"),
                       ("plain.yaml", "domain: b.test\nlimit: 1\nperiod: 1m\n")):  # fmt: skip
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o644)
    (tmp_path / "data").mkdir(mode=0o755)
    text = store_of(tmp_path) + RULES + f"admin_token: {ADMIN}\ndecision_token_file: token\ndata: data\n"
    found = check(text + "providers: [with-key.yaml, plain.yaml]\n", mode=0o664)
    assert {finding.to_do.replace(str(tmp_path), "") for finding in found} == {
        "chmod go-w /service.yaml",
        "chmod 600 /service.yaml",
        "chmod 600 /token",
        "chmod 600 /with-key.yaml",
        "chmod 700 /data",
    }
    assert {finding.level for finding in found} == {"problem"}


def test_a_missing_file(check, tmp_path):
    (finding,) = check(store_of(tmp_path) + RULES + "providers: gone.yaml\n")
    assert finding.what == f"{tmp_path / 'gone.yaml'} cannot be checked: No such file or directory"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("open: true\nlisten: 0.0.0.0:0", ["because no token is set"]),
        ("open: true\ngrpc: 0.0.0.0:0", ["because Envoy sends no token"]),
        (f"decision_token: {DECISION}\nlisten: 0.0.0.0:0", ["unencrypted", "no admin token is set"]),
        (f"admin_token: {ADMIN}\nopen: true\nlisten: 0.0.0.0:0", ["no token is set", "decisions need no token"]),
        (f"decision_token: {DECISION}", ["no admin token is set"]),
    ],
)
def test_addresses_and_tokens(tmp_path, text, parts):
    path = tmp_path / "service.yaml"
    path.write_text(store_of(tmp_path) + RULES + text, encoding="utf-8")
    path.chmod(0o600)
    settings = load_settings(path, flags={} if "listen" in text else {"listen": "127.0.0.1:0"})
    found = [finding for finding in examine(settings, (), {}) if finding.level != "ok"]
    assert [finding.level for finding in found] == ["note"] * len(parts)
    for part, finding in zip(parts, found, strict=True):
        assert part in finding.what


def test_an_address_in_use(check, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        (finding,) = check(store_of(tmp_path) + RULES, listen=address)
        assert finding.what.startswith(f"listen: cannot listen on {address}: ")


@pytest.mark.parametrize(
    ("trusted", "level", "part"),
    [
        (["*"], "problem", "every client can choose its address"),
        (["10.0.0.0/8", "0.0.0.0/0"], "problem", "every client can choose its address"),
        (["ten"], "problem", "trusted_proxies"),
        (["10.0.0.0/8"], "ok", "trusted proxies: 10.0.0.0/8"),
    ],
)
def test_trusted_proxies(trusted, level, part):
    (finding,) = doctor.check_proxies(trusted, {})
    assert (finding.level, part in finding.what) == (level, True)


def test_a_server_that_trusts_every_client():
    (finding,) = doctor.check_proxies((), {"FORWARDED_ALLOW_IPS": "*"})
    assert finding.level == "problem"


def test_missing_packages(check, tmp_path, monkeypatch):
    monkeypatch.setitem(EXTRAS, "otel", ("no-such-package",))
    assert check(store_of(tmp_path) + RULES) == []  # not needed
    (finding,) = check(store_of(tmp_path) + RULES + "telemetry: true\n")
    assert finding == Finding("problem", "no-such-package is not installed", "pip install 'tidegate[otel]'")


def test_policies_that_allow_every_call_while_the_store_is_unavailable(check, tmp_path):
    (finding,) = check(store_of(tmp_path) + "policies: {api: {limits: 3/1h, on_store_error: allow}}\n")
    assert finding.what == "while the store is unavailable, these policies allow every call: api"


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command(tmp_path, capsys):
    path = tmp_path / "service.yaml"
    path.write_text(store_of(tmp_path) + RULES, encoding="utf-8")
    path.chmod(0o600)
    command = ["doctor", str(path), "--listen", "127.0.0.1:0"]
    assert main(command) == 0
    assert capsys.readouterr().out.endswith("no problems found\n")
    assert main([*command, "--trusted-proxy", "*"]) == 1
    output = capsys.readouterr().out
    assert "✗ trusted proxies *" in output
    assert output.endswith("1 problem to fix\n")
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def test_the_command_writes_findings_and_no_log_lines(caplog, capsys):
    assert main(["doctor", "--store", "redis://127.0.0.1:1", "--listen", "127.0.0.1:0"]) == 1
    assert "the store redis://127.0.0.1:1 does not respond" in capsys.readouterr().out
    assert not caplog.records


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--workers", "2"], "2 processes cannot share a store in memory"),
        (["--listen", "0.0.0.0:1"], "is reachable from other machines"),
        (["gone.yaml"], "gone.yaml: cannot be read"),
    ],
)
def test_invalid_settings_are_a_finding(options, part, capsys):
    assert main(["doctor", *options, "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["level"], part in finding["what"], bool(finding["to_do"])) == ("problem", True, True)


@pytest.mark.parametrize(
    "options",
    [
        ["--store", "sqlite:///LIMITS"],
        ["--trusted-proxy", "10.0.0.0/8"],
        ["config.yaml", "--store", "sqlite:///LIMITS"],
    ],
)
def test_an_application_is_not_told_what_a_service_needs(options, capsys, monkeypatch, tmp_path):
    """The packages and policies of a service do not concern a middleware."""
    monkeypatch.chdir(tmp_path)
    assert main(["init", "api"]) == 0
    capsys.readouterr()
    for group in ("service", "grpc", "sources"):
        monkeypatch.setitem(EXTRAS, group, ("no-such-package",))
    assert main(["doctor", *(each.replace("LIMITS", str(tmp_path / "limits.db")) for each in options)]) == 0
    output = capsys.readouterr().out
    assert "no-such-package" not in output
    assert "policy" not in output
    assert ("config.yaml is a middleware configuration without mistakes" in output) == ("config.yaml" in options)


def test_a_middleware_configuration_with_a_mistake(capsys, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("rate_limiting: {login: {limit: -1}}\n", encoding="utf-8")
    assert main(["doctor", str(path), "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert "config.yaml:1" in finding["what"]


def test_grpc_is_needed_only_for_its_address(check, tmp_path, monkeypatch):
    monkeypatch.setitem(EXTRAS, "envoy", ("no-such-package",))
    assert check(store_of(tmp_path) + RULES) == []
    (finding,) = check(store_of(tmp_path) + RULES, grpc=f"127.0.0.1:{free_port()}")
    assert finding.to_do == "pip install 'tidegate[envoy]'"
