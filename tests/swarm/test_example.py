"""The example of the documentation: five processes against a server with a hidden limit."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.swarm.virtual import run
from tests.servers.nats import NatsServer

ROOT = Path(__file__).parents[2]


def test_the_recoveries_differ_in_half_an_hour_of_virtual_time():
    gradual, remember = (run(recovery, 30) for recovery in ("gradual", "remember"))
    assert 70 <= gradual["used_percent"] <= 80
    assert remember["used_percent"] >= 90
    assert max(gradual["refused_percent"], remember["refused_percent"]) <= 1
    shown = (ROOT / "examples" / "swarm" / "README.md").read_text()
    for result in (gradual, remember):
        assert json.dumps(result) in shown


@pytest.mark.slow
def test_five_agents_against_a_hidden_limit():
    with NatsServer() as server:
        words = [sys.executable, "-W", "error", "-m", "examples.swarm.run", server.url, "80"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [result["recovery"] for result in results] == ["gradual", "remember"]
    for result in results:
        assert result["agents"] == 5
        assert result["served"] + result["refused"] == 400
        assert result["refused"] > 0, "the agents together exceed the hidden limit"
    assert re.search(r"agent-\d: agent-\d reduced the capacity to \d+", done.stdout), "not announced"
    lowest = [int(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if "lowest" in line]
    assert len(lowest) == 10
    assert min(lowest) <= 20
