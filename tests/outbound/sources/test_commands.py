"""`tidegate start`, `add` and `sources` as processes."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from tests.outbound.server import Answer, QuotaServer
from tests.servers.process import free_port, until
from tidegate._cli import main
from tidegate.outbound._control_file import CONTROL_FILE


@pytest.fixture
def default_url(monkeypatch):
    """A default URL at which no service listens."""
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr("tidegate._cli.service_args.DEFAULT_URL", url)
    monkeypatch.delenv("TIDEGATE_URL", raising=False)
    return url


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with two providers and a source, and a server that it is fetched from."""
    with QuotaServer() as server:
        (tmp_path / "providers").mkdir()
        (tmp_path / "sources").mkdir()
        write(tmp_path / "providers" / "a.yaml", "domain: 127.0.0.1\nlimit: 3\nperiod: 1h\napi_key: hunter2\n")
        write(tmp_path / "special.yaml", "domain: special.test\nlimit: 1\nperiod: 1m\n")
        write(tmp_path / "sources" / "s1.yaml", f"name: s1\nurl: {server.url}/s1?t=hunter3\ninterval: 1h\n")
        write(tmp_path / "s2.yaml", f"name: s2\nurl: {server.url}/s2\ninterval: 1h\n")
        write(tmp_path / "free.yaml", f"name: free\nurl: http://localhost:{server.port}/free\ncron: '0 0 1 1 *'\n")
        monkeypatch.chdir(tmp_path)
        yield tmp_path, server


def write(path, text):
    path.write_text(text)
    path.chmod(0o600)


class Running:
    """A service of its own process."""

    def __init__(self, *words):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tidegate", "start", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self):
        try:
            until(lambda: os.path.exists(f"tidegate-data/{CONTROL_FILE}"), "the start of the service")  # noqa: PTH110 - a poll
        except AssertionError:
            self.process.kill()
            raise AssertionError(self.process.communicate()[1]) from None
        return self

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        self.out, self.err = self.process.communicate(timeout=60)
        return self.process.returncode

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


START = (
    "--listen",
    "127.0.0.1:0",
    "--provider-dir",
    "providers",
    "--provider",
    "special.yaml",
    "--source-dir",
    "sources",
)


def test_a_service_starts_accepts_commands_and_stops(folder, capsys):
    _, server = folder
    with Running(*START) as service:
        until(lambda: len(server.requests) == 1, "the first fetch")
        assert main(["add", "s2.yaml"]) == 0
        assert capsys.readouterr().out == "added s2: limited by provider a (3/1h sliding_log)\n"
        assert main(["add", "free.yaml", "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert (said["limited"], said["provider"]) == (False, None)
        assert "runs without rate limiting" in said["says"]
        until(lambda: len(server.requests) == 3, "the fetches of what was added")
        until(lambda: sources(capsys)["s2"]["ok"] == 1, "the end of the second")
        found = sources(capsys)
        assert found["s1"]["last_result"] == "status 200, 2 bytes"
        assert {found[name]["provider"] for name in ("s1", "s2")} == {"a"}
        assert main(["sources"]) == 0
        table = capsys.readouterr().out.splitlines()
        assert table[0].split() == ["name", "provider", "next", "run", "last", "result", "ok", "failed", "skipped",
                                    "requeued"]  # fmt: skip
        assert [line.split()[:2] for line in table[1:]] == [["free", "unlimited"], ["s1", "a"], ["s2", "a"]]
        assert service.stop() == 0
    assert "source s1: every 1h, limited by provider a (3/1h sliding_log)" in service.out
    assert "running with 2 providers and 1 source" in service.out
    assert "stopped" in service.out
    assert "hunter" not in service.out + service.err
    assert not os.path.exists(f"tidegate-data/{CONTROL_FILE}")  # noqa: PTH110 - as above

    with Running(*START) as again:  # what was added is still there, and nothing is due
        assert sorted(sources(capsys)) == ["free", "s1", "s2"]
        assert again.stop(signal.SIGINT) == 0
    assert len(server.requests) == 3


def sources(capsys):
    assert main(["sources", "--json"]) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)["sources"]}


def test_stopping_waits_for_a_request_in_flight(folder):
    _, server = folder
    arrived, let_go = threading.Event(), threading.Event()

    def slow(_request):
        arrived.set()
        assert let_go.wait(60)
        return Answer()

    server.respond = slow
    with Running(*START) as service:
        assert arrived.wait(60)
        service.process.send_signal(signal.SIGTERM)
        let_go.set()
        assert service.stop() == 0
    assert "queued again" not in service.err
    assert len(list((folder[0] / "tidegate-data" / "bodies" / "s1").iterdir())) == 1


def test_a_second_service_on_the_same_folder_is_refused(folder, capsys):
    with Running(*START):
        assert main(["start", *START]) == 2
        assert "another service is using this folder" in capsys.readouterr().err


def test_without_a_service_the_commands_explain_how_to_start_one(folder, capsys):
    assert main(["sources"]) == 3
    assert "start one with 'tidegate start --data tidegate-data'" in capsys.readouterr().err
    assert main(["add", "s2.yaml", "--data", "elsewhere"]) == 3


def test_invalid_files_are_refused_before_anything_runs(folder, capsys):
    write(folder[0] / "copy.yaml", "domain: 127.0.0.1\nlimit: 9\nperiod: 1m\n")
    assert main(["start", *START, "--provider", "copy.yaml"]) == 2
    error = capsys.readouterr().err
    assert "copy.yaml" in error
    assert "providers/a.yaml" in error
    (folder[0] / "providers" / "a.yaml").chmod(0o644)
    assert main(["start", *START, "--permissions", "refuse"]) == 2
    assert "chmod 600" in capsys.readouterr().err
    (folder[0] / "bad.yaml").write_text("name: x\nurl: nowhere\ninterval: 1m\n")
    assert main(["add", "bad.yaml"]) == 2
    assert "bad.yaml:2: url: expected a URL with a host" in capsys.readouterr().err


def test_a_source_is_removed_and_fetched_on_demand(folder, capsys):
    _, server = folder
    with Running(*START) as service:
        until(lambda: len(server.requests) == 1, "the first fetch")
        until(lambda: sources(capsys)["s1"]["ok"] == 1, "its end")
        assert main(["sources", "--run", "s1"]) == 0
        assert capsys.readouterr().out == "s1 is due now: limited by provider a (3/1h sliding_log)\n"
        until(lambda: len(server.requests) == 2, "the fetch on demand")
        assert main(["add", "s2.yaml"]) == 0
        capsys.readouterr()
        assert main(["remove", "s2"]) == 0
        assert capsys.readouterr().out == "removed s2\n"
        assert sorted(sources(capsys)) == ["s1"]
        for command in (["remove", "s3"], ["sources", "--run", "s3"]):
            assert main(command) == 2
            assert "there is no source 's3': known sources are s1" in capsys.readouterr().err
        assert service.stop() == 0
    assert f"permits of providers in sqlite:///{folder[0] / 'tidegate-data' / 'quota.db'}" in service.out
    with Running(*START) as again:
        assert sorted(sources(capsys)) == ["s1"]
        assert again.stop() == 0


CLIENT_COMMANDS = (["usage", "api", "bob"], ["usage", "--provider", "a"], ["top", "--once"], ["block"], ["policies"],
                   ["peek", "api", "bob"], ["acquire", "api", "bob"], ["reset", "api", "bob"])  # fmt: skip


@pytest.mark.once
@pytest.mark.parametrize("workers", [(), ("--workers", "2", "--store", "sqlite:///limits.db")], ids=["one", "two"])
def test_commands_find_the_running_service_through_its_data_folder(folder, capsys, monkeypatch, workers):
    monkeypatch.delenv("TIDEGATE_URL", raising=False)
    with Running(*START, "--policy", "api=5/1m", *workers) as service:
        for command in CLIENT_COMMANDS:
            assert main(command) == 0, capsys.readouterr().err
        monkeypatch.setenv("TIDEGATE_DATA", str(folder[0] / "tidegate-data"))
        monkeypatch.chdir("/")
        assert main(["top", "--once"]) == 0
        monkeypatch.setenv("TIDEGATE_DATA", "elsewhere")
        assert main(["top", "--once", "--data", str(folder[0] / "tidegate-data")]) == 0
        assert service.stop() == 0


@pytest.mark.parametrize("command", [*CLIENT_COMMANDS, ["sources"], ["add", "s2.yaml"], ["remove", "s1"]], ids=" ".join)
def test_commands_say_the_same_if_no_service_runs(folder, default_url, capsys, command):
    for words in ([], ["--data", "elsewhere"]):
        assert main([*command, *words]) == 3
        data = words[-1] if words else "tidegate-data"
        error = capsys.readouterr().err
        assert error.startswith(f"tidegate: no service responds for the data folder {data} (")
        assert error.endswith(
            f"): start one with 'tidegate start --data {data}', or use --data with the folder of a running one\n"
        )


def test_a_control_file_that_is_left_after_a_kill_names_no_service(folder, capsys, monkeypatch):
    monkeypatch.delenv("TIDEGATE_URL", raising=False)
    with Running(*START) as service:
        service.stop(signal.SIGKILL)
    assert (folder[0] / "tidegate-data" / CONTROL_FILE).exists()
    assert main(["top", "--once"]) == 3
    assert "no service responds for the data folder tidegate-data (cannot reach a service at" in capsys.readouterr().err


def test_a_token_is_not_sent_to_where_the_default_folder_of_another_user_says(folder, default_url, capsys, monkeypatch):
    path, server = folder
    (path / "tidegate-data").mkdir()
    write(path / "tidegate-data" / CONTROL_FILE, json.dumps({"url": server.url}))
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert main(["top", "--once"]) == 3
    assert server.requests == []
    assert f"cannot reach a service at {default_url}" in capsys.readouterr().err


def test_the_start_message_of_several_workers_names_the_store_of_the_permits(folder):
    with Running(*START, "--workers", "2", "--store", "sqlite:///limits.db") as service:
        line = service.process.stdout.readline()
        assert service.stop() == 0
    assert "0 policies, store sqlite:///limits.db, permits of providers in sqlite:///limits.db" in line


def test_the_start_message_names_the_store_of_the_permits_in_json(folder):
    with Running(*START, "--json") as service:
        started = json.loads(service.process.stdout.readline())
        assert service.stop() == 0
    quota = folder[0] / "tidegate-data" / "quota.db"
    assert (started["store"], started["permits"]) == ("memory://", f"sqlite:///{quota}")


def test_a_file_in_the_source_folder_is_picked_up_and_removed_while_the_service_runs(folder, capsys):
    path, server = folder
    with Running(*START) as service:
        until(lambda: len(server.requests) == 1, "the first fetch")
        (path / "s2.yaml").rename(path / "sources" / "s2.yaml")
        (path / "sources" / "bad.yaml").write_text("name: bad\n")
        until(lambda: len(server.requests) == 2, "the fetch of the new file")
        assert main(["sources"]) == 0
        assert "sources/bad.yaml:1: needs a url, such as url: https://example.com/prices" in capsys.readouterr().out
        (path / "sources" / "s2.yaml").unlink()
        until(lambda: "s2" not in sources(capsys), "the removal")
        assert service.stop() == 0
    assert "a source file is invalid, it is ignored: sources/bad.yaml:1" in service.err


def test_an_added_source_still_replaces_the_configured_one_after_a_restart(folder, capsys):
    path, server = folder
    with Running(*START) as service:
        write(path / "other.yaml", f"name: s1\nurl: {server.url}/other\ninterval: 2h\n")
        assert main(["add", "other.yaml"]) == 0
        assert capsys.readouterr().out.startswith("replaced s1: ")
        assert service.stop() == 0
    with Running(*START) as again:
        assert sources(capsys)["s1"]["schedule"] == "every 2h"
        assert again.stop() == 0
    assert "source s1: the version that 'tidegate add' stored in" in again.err
