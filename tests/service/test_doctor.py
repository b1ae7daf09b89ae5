"""`tidegate doctor`: finds what is wrong with a deployment, says what to do, and changes nothing."""

import json
import socket

import pytest

from tests.servers.nats import NatsServer
from tests.servers.process import free_port
from tests.servers.valkey import ValkeyServer
from tests.service.harness import ADMIN, DECISION
from tidegate.cli import main
from tidegate.service import doctor
from tidegate.service.config.settings import load_settings
from tidegate.service.doctor import EXTRAS, Finding, answered, examine

RULES = "policies: {api: 3/1h}\n"


@pytest.fixture
def look(tmp_path):
    """Examine a file; only what is not well, unless asked for everything."""

    def examined(text, *, mode=0o600, everything=False, trusted=(), environment=None, **flags):
        path = tmp_path / "service.yaml"
        path.write_text(text, encoding="utf-8")
        path.chmod(mode)
        flags = {"listen": f"127.0.0.1:{free_port()}", **flags}
        found = examine(load_settings(path, flags=flags), trusted, environment or {})
        return found if everything else [finding for finding in found if finding.level != "well"]

    return examined


def store_of(tmp_path):
    return f"store: sqlite:///{tmp_path / 'limits.db'}\n"


def test_what_is_well(look, tmp_path):
    found = look(store_of(tmp_path) + RULES, everything=True)
    assert {finding.level for finding in found} == {"well"}
    text = "\n".join(finding.what for finding in found)
    for part in ("on Python 3", "uvicorn", "1 policies", "answers within", "clocks", "only this machine", "modes of"):
        assert part in text


def test_everything_that_is_not_well_says_what_to_do(look, tmp_path):
    text = f"{RULES}open: true\nswarm: nats://127.0.0.1:{free_port()}\n"
    found = look(text, mode=0o666, trusted=["*"], environment={"FORWARDED_ALLOW_IPS": "*"}, listen="0.0.0.0:0")
    assert len(found) >= 6
    assert all(finding.to_do for finding in found)


def test_memory_is_noted(look):
    (finding,) = look(RULES)
    assert finding.level == "note"
    assert "forgotten with the process" in finding.what


def test_nothing_to_decide_by(look, tmp_path):
    (finding,) = look(store_of(tmp_path))
    assert (finding.level, "no policy is configured" in finding.what) == ("wrong", True)


def test_a_store_that_answers_and_one_that_does_not(look):
    with ValkeyServer() as valkey:
        text = f"store: {valkey.url}?deadline=5s\n{RULES}"
        assert look(text) == []
        valkey.kill()
        (finding,) = look(text.replace("5s", "200ms"))
        assert finding.level == "wrong"
        assert "does not answer: " in finding.what
        assert "Connection refused" in finding.what
        (finding,) = look(f"store: mars://x:hidden@y\n{RULES}")
        assert "hidden" not in finding.what.partition(":")[0]
        assert "cannot be opened" in finding.what


def test_a_file_that_cannot_be_made_says_why(look, tmp_path):
    (finding,) = look(f"store: sqlite:///{tmp_path / 'missing' / 'limits.db'}\n{RULES}")
    assert (finding.level, "its folder must exist" in finding.what) == ("wrong", True)


@pytest.mark.parametrize(
    ("took", "skew", "levels", "part"),
    [
        (800, 10, ["well", "well"], "within 0.80 ms"),
        (20_000, 10, ["note", "well"], "every decision waits for"),
        (800, 3_500_000, ["well", "wrong"], "3.5 s ahead of this machine's"),
        (800, -3_500_000, ["well", "wrong"], "3.5 s behind this machine's"),
    ],
)
def test_how_fast_and_whose_clock(took, skew, levels, part):
    found = list(answered("s", took, skew))
    assert [finding.level for finding in found] == levels
    assert any(part in finding.what for finding in found)


def test_a_bus_that_answers_and_one_that_does_not(look, tmp_path, monkeypatch):
    with NatsServer() as nats:
        found = look(store_of(tmp_path) + RULES + f"swarm: {nats.url}\nbus: {nats.url}\n", everything=True)
        assert [finding.level for finding in found if "the bus" in finding.what] == ["well"]  # once
    monkeypatch.setattr(doctor, "BUS_TIMEOUT", 0.1)
    (finding,) = look(store_of(tmp_path) + RULES + f"bus: nats://me:hidden@127.0.0.1:{free_port()}\n")
    assert (finding.level, "does not answer" in finding.what) == ("wrong", True)
    assert "hidden" not in finding.what


def test_modes_of_files(look, tmp_path):
    (tmp_path / "token").write_text(DECISION, encoding="utf-8")
    (tmp_path / "token").chmod(0o644)
    for name, text in (("with-key.yaml", "domain: a.test\nlimit: 1\nperiod: 1m\napi_key: x\n"),
                       ("plain.yaml", "domain: b.test\nlimit: 1\nperiod: 1m\n")):  # fmt: skip
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o644)
    (tmp_path / "data").mkdir(mode=0o755)
    text = store_of(tmp_path) + RULES + f"admin_token: {ADMIN}\ndecision_token_file: token\ndata: data\n"
    found = look(text + "providers: [with-key.yaml, plain.yaml]\n", mode=0o664)
    assert {finding.to_do.replace(str(tmp_path), "") for finding in found} == {
        "chmod go-w /service.yaml",
        "chmod 600 /service.yaml",
        "chmod 600 /token",
        "chmod 600 /with-key.yaml",
        "chmod 700 /data",
    }
    assert {finding.level for finding in found} == {"wrong"}


def test_a_file_that_is_missing(look, tmp_path):
    (finding,) = look(store_of(tmp_path) + RULES + "providers: gone.yaml\n")
    assert finding.what == f"{tmp_path / 'gone.yaml'} cannot be looked at: No such file or directory"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("open: true\nlisten: 0.0.0.0:0", ["for no token is set"]),
        ("open: true\ngrpc: 0.0.0.0:0", ["for Envoy sends no token"]),
        (f"decision_token: {DECISION}\nlisten: 0.0.0.0:0", ["in the clear", "no admin token is set"]),
        (f"admin_token: {ADMIN}\nopen: true\nlisten: 0.0.0.0:0", ["no token is set", "only resets do"]),
        (f"decision_token: {DECISION}", ["no admin token is set"]),
    ],
)
def test_addresses_and_tokens(tmp_path, text, parts):
    path = tmp_path / "service.yaml"
    path.write_text(store_of(tmp_path) + RULES + text, encoding="utf-8")
    path.chmod(0o600)
    settings = load_settings(path, flags={} if "listen" in text else {"listen": "127.0.0.1:0"})
    found = [finding for finding in examine(settings, (), {}) if finding.level != "well"]
    assert [finding.level for finding in found] == ["note"] * len(parts)
    for part, finding in zip(parts, found, strict=True):
        assert part in finding.what


def test_an_address_that_is_taken(look, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        (finding,) = look(store_of(tmp_path) + RULES, listen=address)
        assert finding.what.startswith(f"listen {address} cannot be listened on: ")


@pytest.mark.parametrize(
    ("trusted", "level", "part"),
    [
        (["*"], "wrong", "every client can choose its address"),
        (["10.0.0.0/8", "0.0.0.0/0"], "wrong", "every client can choose its address"),
        (["ten"], "wrong", "trusted_proxies"),
        (["10.0.0.0/8"], "well", "trusted proxies: 10.0.0.0/8"),
    ],
)
def test_trusted_proxies(trusted, level, part):
    (finding,) = doctor.proxies(trusted, {})
    assert (finding.level, part in finding.what) == (level, True)


def test_a_server_that_believes_everybody():
    (finding,) = doctor.proxies((), {"FORWARDED_ALLOW_IPS": "*"})
    assert finding.level == "wrong"


def test_packages_that_are_missing(look, tmp_path, monkeypatch):
    monkeypatch.setitem(EXTRAS, "otel", ("no-such-package",))
    assert look(store_of(tmp_path) + RULES) == []  # not needed
    (finding,) = look(store_of(tmp_path) + RULES + "telemetry: true\n")
    assert finding == Finding("wrong", "no-such-package is not installed", "pip install 'tidegate[otel]'")


def test_a_lost_store_that_limits_nobody(look, tmp_path):
    (finding,) = look(store_of(tmp_path) + "policies: {api: {limits: 3/1h, on_store_error: allow}}\n")
    assert finding.what == "while the store is lost, nothing limits api"


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command(tmp_path, capsys):
    path = tmp_path / "service.yaml"
    path.write_text(store_of(tmp_path) + RULES, encoding="utf-8")
    path.chmod(0o600)
    words = ["doctor", str(path), "--listen", "127.0.0.1:0"]
    assert main(words) == 0
    assert capsys.readouterr().out.endswith("no problems found\n")
    assert main([*words, "--trusted-proxy", "*"]) == 1
    said = capsys.readouterr().out
    assert "✗ trusted proxies *" in said
    assert said.endswith("1 problem to fix\n")
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["well"] is True


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--workers", "2"], "2 processes cannot share a store in memory"),
        (["--listen", "0.0.0.0:1"], "is reachable from other machines"),
        (["gone.yaml"], "gone.yaml: cannot be read"),
    ],
)
def test_settings_that_cannot_be_used_are_a_finding(words, part, capsys):
    assert main(["doctor", *words, "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["level"], part in finding["what"], bool(finding["to_do"])) == ("wrong", True, True)
