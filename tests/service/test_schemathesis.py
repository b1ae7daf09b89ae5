"""The description of the HTTP interface is true: schemathesis, with all of its checks, finds nothing."""

import os
import re
import subprocess

import pytest

from tests.servers.process import need
from tests.servers.proxy import beside_python
from tests.service.harness import ROOT, serving

RULES = """
max_wait: 10ms
policies: {api: [100/1h, 1000/1h unit=tokens], slots: 5/1m concurrency}
domains: [{domain: edge, descriptors: [{key: ip, limits: 2/1h}]}]
"""


@pytest.mark.slow
def test_schemathesis_finds_nothing(tmp_path):
    program = need(beside_python("schemathesis"), "schemathesis", "pip install schemathesis")
    folder = ROOT / "tests" / "service"
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": str(folder / "openapi_hooks.py")}
    with serving(tmp_path, RULES) as service:
        command = [program, "--config-file", str(folder / "openapi.toml"), "run", f"{service.url}/openapi.json"]
        done = subprocess.run(
            [*command, "--checks", "all"], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        selected, operations, tested = map(
            int, re.search(r"Selected: (\d+)/(\d+)\s+Tested: (\d+)", done.stdout).groups()
        )
        assert selected == tested == operations - 6
        generated = int(re.search(r"(\d+) generated", done.stdout)[1])
        assert generated > 500
        metrics = service.get("/metrics").text
        for verb in ("acquire", "peek", "reserve", "batch", "check"):  # it got as far as decisions
            assert f'tidegate_request_seconds_count{{verb="{verb}"}}' in metrics
        assert 'tidegate_decisions_total{policy="api",outcome="allowed"}' in metrics
        assert 'kind="internal"' not in metrics
