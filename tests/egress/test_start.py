"""`tidegate start` with `egress`, and `tidegate egress FILE`: the same gateway, as a process."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import httpx
import pytest

from tests.egress.harness import KEY, OTHER_TOKEN, TOKEN
from tests.outbound.server import QuotaServer, as_json
from tests.servers.process import free_port, until
from tidegate._cli import main


@pytest.fixture(scope="module")
def upstream():
    with QuotaServer(respond=lambda request: as_json({"path": request.path})) as server:
        yield server


@contextmanager
def command(*arguments, folder):
    """Run a command of tidegate; yields its process and the JSON line that it writes when it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tidegate", *arguments, "--json"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "EGRESS_TOKEN": TOKEN},
    )
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()


def write_files(folder, upstream, **egress):
    (folder / "up.yaml").write_text(
        f"domain: 127.0.0.1\nname: up\nlimits: [5/1h]\napi_key: {KEY}\nkey: {{header: Authorization, prefix: Bearer}}\n"
    )
    (folder / "up.yaml").chmod(0o600)
    settings = {"upstreams": {"up": upstream.url}, "allow_private": ["127.0.0.1"], **egress}
    (folder / "egress.yaml").write_text(json.dumps({"callers": {"a": {"token": "${EGRESS_TOKEN}"}}, **settings}))


def get(url, token=TOKEN):
    response = httpx.get(url, headers={"X-Api-Key": token}, timeout=20)
    return response.status_code, response.headers, response.content


def test_the_command_egress_serves_alone_and_ends_on_sigterm(upstream, tmp_path):
    write_files(tmp_path, upstream, listen="127.0.0.1:0", providers=["up.yaml"], store="sqlite:///quota.db")
    with command("egress", "egress.yaml", folder=tmp_path) as (process, ready):
        assert (ready["providers"], ready["permits"]) == (["up"], "sqlite:///quota.db")
        status, headers, body = get(f"{ready['egress']}/up/v1/x")
        assert (status, json.loads(body), headers["X-Tidegate-Remaining"]) == (200, {"path": "/v1/x"}, "1h=4")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    with command("egress", "egress.yaml", folder=tmp_path) as (_, ready):
        assert get(f"{ready['egress']}/up/v1/x")[1]["X-Tidegate-Remaining"] == "1h=3"  # the usage was kept
    assert upstream.requests[-1].headers["authorization"] == f"Bearer {KEY}"


def test_the_service_runs_the_gateway_beside_its_decisions(upstream, tmp_path):
    write_files(tmp_path, upstream)
    service = {"listen": "127.0.0.1:0", "egress": f"127.0.0.1:{free_port()}", "egress_config": "egress.yaml"}
    (tmp_path / "service.yaml").write_text(
        json.dumps({**service, "providers": ["up.yaml"], "policies": {"api": "5/1m"}})
    )
    with command("start", "service.yaml", folder=tmp_path) as (process, ready):
        assert get(f"{ready['egress']}/up/v1/x")[0] == 200
        overview = json.loads(get(f"{ready['http']}/v1/overview")[2])
        (row,) = overview["panels"]["egress"]["rows"]
        assert (row["caller"], row["provider"], row["requests"]) == ("a", "up", 1)
        metrics = get(f"{ready['http']}/metrics")[2].decode()
        assert 'tidegate_egress_requests_total{caller="a",provider="up"} 1' in metrics
        top = subprocess.run(
            [sys.executable, "-m", "tidegate", "top", "--egress", "--once", "--url", ready["http"]],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert "caller" in top.stdout
        assert "up" in top.stdout
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.slow
def test_the_gateway_reads_its_file_again_and_top_names_the_missing_token(upstream, tmp_path):
    fields = {"listen": "127.0.0.1:0", "providers": ["up.yaml"], "metrics_token": "metrics-token-1234"}
    write_files(tmp_path, upstream, **fields)
    with command("egress", "egress.yaml", folder=tmp_path) as (process, ready):
        assert get(f"{ready['egress']}/up/v1/x", OTHER_TOKEN)[0] == 401
        write_files(tmp_path, upstream, **fields, callers={"b": {"token": OTHER_TOKEN}})
        process.send_signal(signal.SIGHUP)
        until(lambda: get(f"{ready['egress']}/up/v1/x", OTHER_TOKEN)[0] == 200, "the new caller")
        top = subprocess.run(
            [sys.executable, "-m", "tidegate", "top", "--egress", "--once", "--url", ready["egress"]],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert "this needs the metrics token" in top.stderr


def test_top_shows_the_members_of_pools_and_asks_for_the_option_egress(upstream, tmp_path, capsys):
    write_files(tmp_path, upstream, listen="127.0.0.1:0", providers=["up.yaml"], callers={})
    with (tmp_path / "up.yaml").open("a") as file:
        file.write("pool: {members: [{name: first}, {name: second, drain: true}]}\n")
    with command("egress", "egress.yaml", folder=tmp_path) as (_, ready):
        url = ready["egress"]
        assert get(f"{url}/up/v1/x")[0] == 200
        assert main(["top", "--egress", "--once", "--url", url]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert lines[-3:] == [
            ["member", "state", "left", "refused", "cost"],
            ["up/first", "ready", "4", "of", "5", "requests", "0", "-"],
            ["up/second", "drained", "5", "of", "5", "requests", "0", "-"],
        ]
        assert main(["top", "--egress", "--once", "--json", "--rows", "1", "--url", url]) == 0
        (member,) = json.loads(capsys.readouterr().out)["pools"]
        assert (member["pool"], member["member"], member["state"]) == ("up", "first", "ready")
        assert main(["top", "--once", "--url", url]) == 2
        assert capsys.readouterr().err == f"tidegate: --url: {url} is an egress gateway, not a service: add --egress\n"


def test_an_address_in_use_is_refused(upstream, tmp_path):
    write_files(tmp_path, upstream, listen="127.0.0.1:0", providers=["up.yaml"])
    with command("egress", "egress.yaml", folder=tmp_path) as (_, ready):
        address = ready["egress"].removeprefix("http://")
        found = subprocess.run(
            [sys.executable, "-m", "tidegate", "egress", "egress.yaml", "--listen", address],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env={**os.environ, "EGRESS_TOKEN": TOKEN},
        )
    advice = "Address already in use: stop the other program, or choose another address with --listen"
    assert (found.returncode, found.stderr) == (2, f"tidegate: listen: cannot listen on {address}: {advice}\n")


@pytest.mark.once
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"callers": {"a": {"token": "${EGRESS_TOKEN}", "providers": ["upp"]}}}, "there is no provider 'upp'"),
        (
            {"callers": {"a": {"token": "${EGRESS_TOKEN}", "limits": ["9/1d unit=tokns"]}}},
            "egress.yaml:1: callers.a.limits[0]: calls are not charged in the unit 'tokns': did you mean 'tokens'?",
        ),
        (
            {"callers": {"a": {"token": "${EGRESS_TOKEN}", "limits": ["9/1d unit=pages"]}}},
            "'pages': use requests, concurrent-requests, tokens, input-tokens, output-tokens or usd_micros",
        ),
        ({"upstreams": {"down": "http://127.0.0.1:1"}}, "there is no provider 'down'"),
        ({"providers": []}, "needs at least one provider"),
        ({"callers": {}, "listen": "0.0.0.0:1"}, "reachable from other machines"),
    ],
)
def test_mistakes_are_reported_before_anything_is_served(upstream, tmp_path, change, message):
    write_files(tmp_path, upstream, **{"listen": "127.0.0.1:0", "providers": ["up.yaml"], **change})
    found = subprocess.run(
        [sys.executable, "-m", "tidegate", "egress", "egress.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "EGRESS_TOKEN": TOKEN},
    )
    assert found.returncode == 2
    assert message in found.stderr
