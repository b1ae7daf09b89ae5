"""`tidegate start --demo`: everything on the page has something to show, and nothing is left of it."""

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
from tidegate.cli.demo_service import has_display, with_free_port
from tidegate.policy import Policy
from tidegate.service.config.settings import load_settings
from tidegate.service.runtime.demo import MAX_PAUSE, MIN_PAUSE, SOURCES, call_interval

FILE = str(ROOT / "examples/demo/service.yaml")


@contextmanager
def showing(folder, *flags):
    """Run the demonstration, with temporary folders in this one."""
    port = free_port()
    words = [sys.executable, "-m", "tidegate", "start", FILE, "--demo", "--listen", f"127.0.0.1:{port}", *flags]
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    with (folder / "out").open("w+b") as out:
        process = subprocess.Popen(words, env=environment, cwd=folder, stdout=out, stderr=out, start_new_session=True)
        try:
            until(lambda: b"Ctrl-C ends" in (folder / "out").read_bytes(), "the start of the demonstration", 60)
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait(10)


def overview(url):
    return httpx.get(f"{url}/v1/overview", trust_env=False, timeout=30).json()


def test_everything_has_something_to_show(tmp_path):
    with showing(tmp_path) as (process, url):
        assert f"The dashboard: {url}/" in (tmp_path / "out").read_text(encoding="utf-8")

        def busy():
            told = overview(url)
            panels = told["panels"]
            return (
                all(policy["admitted"] for policy in told["policies"])
                and any(policy["denied"] for policy in told["policies"])
                and sum(source["ok"] for source in panels["sources"]["sources"]) >= len(SOURCES)
                and panels["budgets"][0]["tiers"][0]["used"]
                and len(panels["swarm"]["agents"]) == 3
            )

        until(busy, "traffic of every kind", 60)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        text = (tmp_path / "out").read_text(encoding="utf-8")
    assert text.endswith("stopped\n")
    assert "Traceback" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_without_traffic(tmp_path):
    with showing(tmp_path, "--no-demo-traffic") as (process, url):
        assert overview(url)["panels"]["sources"]["sources"] == []  # the traffic adds them before it begins
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_another_port_where_the_usual_one_is_taken(monkeypatch):
    monkeypatch.delenv("TIDEGATE_LISTEN", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as other:
        settings = load_settings()
        taken = replace(settings, listen=settings.listen._replace(port=other.getsockname()[1]))
        assert with_free_port(taken).listen.port == 0
        with pytest.raises(ConfigError, match="cannot listen on"):
            with_free_port(replace(taken, flags={"listen": str(taken.listen)}))


def test_a_browser_needs_a_display(monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert not has_display()
    monkeypatch.setenv("DISPLAY", ":0")
    assert has_display()


@pytest.mark.parametrize(
    ("limits", "pace", "seconds"),
    [
        ("20/10s", 0.5, 1.0),
        ("5000/1s", 1.0, MIN_PAUSE),
        ("1/1d", 1.0, MAX_PAUSE),
        ("7500/month", 1.0, MAX_PAUSE),
        ("500/10s unit=tokens", 1.0, MIN_PAUSE),
    ],
)
def test_how_often_a_caller_comes(limits, pace, seconds):
    from tidegate import Limit  # noqa: PLC0415 - only here

    assert call_interval(Policy("p", (Limit.parse(limits),)), pace) == seconds
