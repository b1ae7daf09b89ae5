"""Measure the memory that a million keys take in the service.

    python -m bench.service [--json FILE]

See bench/front.py for the network interfaces.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description="Measure the memory of the service.")
    parser.add_argument("--json", type=Path, help="keep the results in this file")
    options = parser.parse_args()
    results = {"keys": many_keys()}
    if options.json:
        options.json.write_text(json.dumps(results, indent=2), encoding="utf-8")


def many_keys(count: int = 1_000_000) -> dict[str, Any]:
    """Tell how large the service is after a million keys."""
    with tempfile.TemporaryDirectory() as name:
        config = Path(name) / "service.yaml"
        config.write_text("store: memory://?max_entries=2000000\npolicies: {api: 100/1h}\n", encoding="utf-8")
        process = subprocess.Popen(  # noqa: S603 - our own server
            [sys.executable, "-m", "tidegate", "start", "--json", str(config), "--listen", "127.0.0.1:0"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip
        start = time.monotonic()
        output: Any = process.stdout
        url = json.loads(output.readline())["http"]
        ready = time.monotonic() - start
        before = resident(process.pid)
        from tidegate.service.client._client import Client  # noqa: PLC0415 - after the path is known

        with Client(url) as client:
            for first in range(0, count, 1000):
                client.batch([("api", f"user:{number}") for number in range(first, first + 1000)])
        after = resident(process.pid)
        process.send_signal(signal.SIGTERM)
        process.wait(15)
        output.close()
    print(f"memory      {before:.0f} MB at the start, {after:.0f} MB after {count:,} keys; ready in {ready:.2f} s")
    return {"before": before, "after": after, "ready": ready}


def resident(pid: int) -> float:
    """Read how much memory a process holds, in MB."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    found = re.search(r"VmRSS:\s+(\d+) kB", text)
    return int(found[1]) / 1024 if found else 0.0


if __name__ == "__main__":
    main()
