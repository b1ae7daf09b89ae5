"""A temporary Prometheus server that scrapes one address, and promtool."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.servers.process import need

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIG = """\
global: {{scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 1s}}
rule_files: ['{rules}']
scrape_configs:
  - job_name: budget
    static_configs: [{{targets: ['127.0.0.1:{port}']}}]
"""


def program(name: str) -> str:
    """Find a program of the Prometheus package; if it is missing, fail under CI and skip elsewhere."""
    return need(shutil.which(name), name, "apt-get install prometheus")


def promtool(*arguments: object, text: bytes | None = None) -> str:
    """Run promtool; fail with its output."""
    command = [program("promtool"), *map(str, arguments)]
    result = subprocess.run(command, input=text, capture_output=True, check=False)
    output = (result.stdout + result.stderr).decode()
    assert result.returncode == 0, output
    return output


class Prometheus:
    """Sends queries to the server."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(query)}", timeout=10) as response:  # noqa: S310 - a server of the test
            return json.load(response)

    def query(self, expression: str) -> dict[str, float]:
        """Return the values by period; series without one have the key ''."""
        found = self.get("/api/v1/query", query=expression)["data"]["result"]
        return {series["metric"].get("period", ""): float(series["value"][1]) for series in found}


@contextmanager
def prometheus(folder: Path, port: int, rules: Path) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes the port; yields after two scrapes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        own_port = probe.getsockname()[1]
    config = folder / "prometheus.yml"
    config.write_text(CONFIG.format(port=port, rules=rules), encoding="utf-8")
    command = [
        program("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{own_port}",
        "--log.level=error",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    server = Prometheus(own_port)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                if server.query("count_over_time(up[1m]) >= 2"):
                    break
            except OSError:
                pass
            assert time.monotonic() < deadline, "Prometheus did not scrape within 60 s"
            time.sleep(0.02)
        yield server
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
