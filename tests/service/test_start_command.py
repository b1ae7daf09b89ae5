"""`tidegate start` with sources, a budget and a swarm, configured by file, environment and options."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.outbound.server import Answer, QuotaServer
from tests.servers.process import free_port, until
from tests.servers.valkey import ValkeyServer
from tests.service.harness import ROOT, serving
from tidegate._cli import main
from tidegate._policy.setting_values import PERMISSIONS
from tidegate.budget import TaskBudget
from tidegate.service._config.settings import load_settings


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return path


@pytest.fixture
def folder(tmp_path):
    """Yields a directory with provider and source files, and the server of the sources."""
    with QuotaServer() as server:
        write(tmp_path / "providers" / "local.yaml", "domain: 127.0.0.1\nlimit: 3\nperiod: 1h\napi_key: hunter2\n")
        write(tmp_path / "sources" / "prices.yaml", f"name: prices\nurl: {server.url}/prices\ninterval: 1h\n")
        write(tmp_path / "more.yaml", f"name: more\nurl: {server.url}/more\ninterval: 1h\n")
        yield tmp_path, server


FILE = "provider_dirs: providers\nsource_dirs: [sources]\ndata: data\npolicies: {api: 2/1h}\n"


def test_one_process_decides_and_fetches(folder, capsys):
    path, server = folder
    with serving(path, FILE) as service:
        until(lambda: len(server.requests) == 1, "the first fetch")
        assert service.post("acquire", {"policy": "api", "key": "k"}).json()["remaining"] == 1
        data = ["--data", str(path / "data")]
        assert main(["add", str(path / "more.yaml"), *data]) == 0
        assert "limited by provider local" in capsys.readouterr().out
        until(lambda: len(server.requests) == 2, "the fetch of what was added")
        assert main(["sources", "--json", *data]) == 0
        assert {row["name"] for row in json.loads(capsys.readouterr().out)["sources"]} == {"prices", "more"}
        panel = service.get("/v1/overview").json()["panels"]["sources"]
        assert {row["name"] for row in panel["sources"]} == {"prices", "more"}
        assert service.get("/readyz").status_code == 200
        assert service.stop() == 0
        assert service.logged("source prices: every 1h, limited by provider local")
        assert service.logged("stopped; sources that were not fetched are queued for the next start")
        assert not service.logged("hunter2")
    assert (path / "data" / "quota.db").exists()  # although the store of decisions is in memory
    assert not (path / "data" / "control.json").exists()


def test_a_stop_waits_for_an_active_fetch(folder):
    """The service gets SIGTERM during a fetch."""
    path, server = folder
    server.respond = lambda _request: Answer() if delayed.wait() else Answer(503)
    delayed = DelayedResponse()
    with serving(path, FILE, "--stop-within", "20s") as service:
        until(lambda: delayed.waiting, "the fetch")
        service.process.send_signal(signal.SIGTERM)
        until(lambda: refuses(service), "the refusal of requests")
        assert service.process.poll() is None  # the fetch is still under way
        delayed.send()
        assert service.stop() == 0
        assert not service.logged("queued again")
    assert len(list((path / "data" / "bodies" / "prices").iterdir())) == 1


class DelayedResponse:
    """Delays the response of the server until `send` is called."""

    def __init__(self):
        import threading  # noqa: PLC0415 - only here

        self.waiting = False
        self._event = threading.Event()

    def wait(self):
        self.waiting = True
        return self._event.wait(60)

    def send(self):
        self._event.set()


def refuses(service):
    try:
        return service.post("acquire", {"policy": "api", "key": "k"}).status_code == 503
    except OSError:
        return True
    except Exception as error:  # noqa: BLE001 - httpx's errors are no OSErrors
        return type(error).__name__ in ("ConnectError", "ReadError", "RemoteProtocolError")


def test_several_processes_fetch_once(folder):
    path, server = folder
    with serving(path, f"store: sqlite:///{path / 'limits.db'}?deadline=10s\n{FILE}", "--workers", "2") as service:
        until(lambda: len(server.requests) == 1, "the fetch")
        assert main(["sources", "--data", str(path / "data"), "--json"]) == 0
        assert service.stop() == 0
    assert len(server.requests) == 1
    assert not (path / "data" / "quota.db").exists()  # the shared store counts for the provider, too


def test_settings_from_options_and_environment(folder):
    path, server = folder
    environment = {"TIDEGATE_PROVIDERS": str(path / "providers/local.yaml"), "TIDEGATE_DATA": str(path / "data")}
    flags = ("--source", str(path / "sources/prices.yaml"), "--source", str(path / "more.yaml"), "--fetchers", "1")
    with serving(path, "", *flags, **environment):
        until(lambda: len(server.requests) == 2, "both fetches")


def test_lists_from_file_environment_and_options(tmp_path):
    file = write(tmp_path / "service.yaml", "sources: one.yaml\nprovider_dirs: [a, /b]\ndata: data\n")
    settings = load_settings(
        file,
        environment={"TIDEGATE_PROVIDERS": "x.yaml; y.yaml"},
        flags={"source_dirs": ["c", "d e"], "bus": "local://b"},
    )
    assert settings.sources == (tmp_path / "one.yaml",)  # relative to the file that names it
    assert settings.provider_dirs == (tmp_path / "a", Path("/b"))
    assert settings.data == tmp_path / "data"
    assert settings.providers == (Path("x.yaml"), Path("y.yaml"))
    assert settings.source_dirs == (Path("c"), Path("d e"))
    assert (settings.bus, settings.runs_sources, settings.data_folder) == ("local://b", True, tmp_path / "data")
    assert not load_settings().runs_sources
    assert str(load_settings().data_folder) == "tidegate-data"


def test_the_permissions_setting_has_the_values_of_providers():
    from typing import get_args  # noqa: PLC0415 - only here

    from tidegate.outbound._providers.registry import Permissions  # noqa: PLC0415 - only here

    assert get_args(Permissions) == PERMISSIONS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("providers: missing.yaml", "missing.yaml: cannot be read"),
        ("sources: bad.yaml", "bad.yaml:2: url: expected a URL with a host"),
        ("budget: missing.yaml", "missing.yaml: cannot be read"),
        ("bus: mars://here\ndata: data", "bus: unknown scheme mars://"),
        ("swarm: mars://here", "bus: unknown scheme mars://"),
    ],
)
def test_a_misconfigured_component_is_refused_before_the_start(tmp_path, capfd, text, message):
    write(tmp_path / "bad.yaml", "name: x\nurl: nowhere\ninterval: 1m\n")
    file = write(tmp_path / "service.yaml", f"data: data\n{text}\n".replace("data: data\nbus", "bus"))
    assert main(["start", str(file), "--listen", "127.0.0.1:0"]) == 2
    assert message in capfd.readouterr().err


def test_the_overview_shows_a_budget(tmp_path):
    write(tmp_path / "budget.yaml", f"name: nightly\ntiers: {{day: 50}}\nstore: {tmp_path / 'budget.db'}\n")
    with serving(tmp_path, "budget: budget.yaml\n") as service:
        panel = service.get("/v1/overview").json()["panels"]["budgets"]
        assert [budget["note"] for budget in panel] == ["nothing was counted yet"]  # it creates no file
        assert not (tmp_path / "budget.db").exists()
    TaskBudget.from_config(tmp_path / "budget.yaml").close()
    with serving(tmp_path, "budget: budget.yaml\n") as service:
        panel = service.get("/v1/overview").json()["panels"]["budgets"]
        assert [(each["name"], [tier["quota"] for tier in each["tiers"]]) for each in panel] == [("nightly", [50])]
    variables = {"RATE_LIMIT_PER_DAY": "70", "RATE_LIMIT_STORAGE_PATH": str(tmp_path / "other.db")}
    TaskBudget(tmp_path / "other.db", per_day=70).close()
    with serving(tmp_path, "budget: true\n", **variables) as service:
        panel = service.get("/v1/overview").json()["panels"]["budgets"]
        assert panel[0]["tiers"][0]["quota"] == 70


def test_the_service_is_ready_only_while_the_bus_is_connected(tmp_path):
    with ValkeyServer() as valkey, serving(tmp_path, f"swarm: {valkey.url}\n") as service:
        until(lambda: service.get("/readyz").status_code == 200, "the bus")
        assert service.get("/v1/overview").json()["panels"]["swarm"]["agents"] == []
        valkey.kill()
        until(lambda: service.get("/readyz").status_code == 503, "the outage of the bus")
        assert "the bus cannot be reached" in service.get("/readyz").json()["detail"]
        assert service.post("acquire", {"policy": "nope", "key": "k"}).status_code == 404  # decisions still work
        assert service.get("/healthz").status_code == 200
        valkey.start()
        until(lambda: service.get("/readyz").status_code == 200, "the return of the bus")


def test_json_output_reports_ready(folder):
    path, _ = folder
    options = [
        "--json",
        "--listen",
        f"127.0.0.1:{free_port()}",
        "--source-dir",
        str(path / "sources"),
        "--data",
        str(path / "d"),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "tidegate", "start", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        env=os.environ,
    )
    try:
        message = json.loads(process.stdout.readline())
        assert (message["ready"], message["sources"], message["providers"]) == (True, ["prices"], [])
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()
