"""`tidegate start --demo` fills every panel of the dashboard, and leaves no files behind."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import httpx
import pytest

from tests.servers.process import free_port, until
from tests.service.harness import ROOT
from tidegate import ConfigError
from tidegate._cli.demo_service import has_display, with_free_port
from tidegate._cli.output import Output
from tidegate._policy import Policy
from tidegate.service._config.settings import load_settings
from tidegate.service._runtime.demo import MAX_PAUSE, MIN_PAUSE, SOURCES, call_interval

FILE = str(ROOT / "examples/demo/service.yaml")


@contextmanager
def running_demo(folder, *flags):
    """Run the demo, with its temporary files in this directory."""
    port = free_port()
    command = [sys.executable, "-m", "tidegate", "start", FILE, "--demo", "--listen", f"127.0.0.1:{port}", *flags]
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    with (folder / "out").open("w+b") as out:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=out, stderr=out, start_new_session=True)
        try:
            until(lambda: b"Ctrl-C ends" in (folder / "out").read_bytes(), "the start of the demo", 60)
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait(10)


def overview(url):
    return httpx.get(f"{url}/v1/overview", trust_env=False, timeout=30).json()


def test_every_panel_has_data(tmp_path):
    with running_demo(tmp_path) as (process, url):
        assert f"The dashboard: {url}/" in (tmp_path / "out").read_text(encoding="utf-8")

        def has_all_traffic():
            data = overview(url)
            panels = data["panels"]
            return (
                all(policy["admitted"] for policy in data["policies"])
                and any(policy["denied"] for policy in data["policies"])
                and sum(source["ok"] for source in panels["sources"]["sources"]) >= len(SOURCES)
                and panels["budgets"][0]["tiers"][0]["used"]
                and len(panels["swarm"]["agents"]) == 3
                and {row["caller"] for row in panels["egress"]["rows"] if row["output_tokens"]}
                >= {"agents", "notebook"}
                and panels["pools"][0]["cost_micros"]
            )

        until(has_all_traffic, "traffic of every kind", 60)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        text = (tmp_path / "out").read_text(encoding="utf-8")
    assert text.endswith("stopped\n")
    assert "Traceback" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_no_demo_traffic(tmp_path):
    with running_demo(tmp_path, "--no-demo-traffic") as (process, url):
        assert overview(url)["panels"]["sources"]["sources"] == []  # demo traffic adds the sources when it starts
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_free_port_is_chosen_if_the_default_port_is_in_use(monkeypatch, capsys):
    monkeypatch.delenv("TIDEGATE_LISTEN", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as other:
        settings = load_settings()
        in_use = replace(settings, listen=settings.listen._replace(port=other.getsockname()[1]))
        output = Output(as_json=False)
        assert with_free_port(in_use, output).listen.port not in (0, in_use.listen.port)
        assert f"port {in_use.listen.port} is in use" in capsys.readouterr().out
        with pytest.raises(ConfigError, match="cannot listen on"):
            with_free_port(replace(in_use, flags={"listen": str(in_use.listen)}), output)


def test_a_browser_needs_a_display(monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert not has_display()
    monkeypatch.setenv("DISPLAY", ":0")
    assert has_display()


@pytest.mark.parametrize(
    ("limits", "rate", "seconds"),
    [
        ("20/10s", 0.5, 1.0),
        ("5000/1s", 1.0, MIN_PAUSE),
        ("1/1d", 1.0, MAX_PAUSE),
        ("7500/month", 1.0, MAX_PAUSE),
        ("500/10s unit=tokens", 1.0, MIN_PAUSE),
    ],
)
def test_the_interval_between_calls(limits, rate, seconds):
    from tidegate import Limit  # noqa: PLC0415 - only here

    assert call_interval(Policy("p", (Limit.parse(limits),)), rate) == seconds
