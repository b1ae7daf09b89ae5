"""Measure the decision service in process, and the memory that a million keys take.

    python -m bench.service [--quick] [--only process|keys] [--json FILE]

In process: microseconds per decision of the whole ASGI application, without a server. Batches hold 100 keys. See
bench/front.py for the network interfaces.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH: Final = 100
SINGLE: Final = json.dumps({"policy": "api", "key": "user:42"})
MANY: Final = json.dumps({"policy": "api", "keys": [f"user:{number}" for number in range(BATCH)]})


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description="Measure the decision service.")
    parser.add_argument("--quick", action="store_true", help="a few rounds only")
    parser.add_argument("--only", choices=["process", "keys"], help="one part only")
    parser.add_argument("--json", type=Path, help="keep the results in this file")
    options = parser.parse_args()
    rounds = 2 if options.quick else 5
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "process": lambda: in_process(rounds * 8),
        "keys": many_keys,
    }
    results = {name: part() for name, part in parts.items() if options.only in (None, name)}
    if options.json:
        options.json.write_text(json.dumps(results, indent=2), encoding="utf-8")


# ---- in process ------------------------------------------------------------------------------------------------------


def in_process(rounds: int) -> dict[str, Any]:
    """Time the application itself."""
    found = asyncio.run(_in_process(rounds))
    for name, nanos in found.items():
        print(f"in process  {name:<16} {nanos / 1000:8.2f} µs per decision  {1e9 / nanos:12,.0f}/s")
    return found


async def _in_process(rounds: int) -> dict[str, float]:
    from tidegate.service.config.settings import load_settings  # noqa: PLC0415 - as above
    from tidegate.service.decisions.decider import Decider  # noqa: PLC0415 - after the path is known
    from tidegate.service.http import App  # noqa: PLC0415 - as above
    from tidegate.stores import MemoryStore  # noqa: PLC0415 - as above

    settings = load_settings({"policies": {"api": "1000000000/1m"}})
    app = App(Decider(settings.policies, MemoryStore()), settings)
    asks = json.dumps({"asks": [{"policy": "api", "key": f"user:{number}"} for number in range(BATCH)]})
    cases = {
        "single": ("acquire", SINGLE, 1),
        "batch, keys": ("batch", MANY, BATCH),
        "batch, asks": ("batch", asks, BATCH),
    }
    best = dict.fromkeys(cases, 1e12)
    for _ in range(rounds):
        for name, (verb, body, count) in cases.items():
            calls = max(1, 2000 // count)
            start = time.process_time_ns()
            for _ in range(calls):
                await _call(app, f"/v1/{verb}", body.encode())
            best[name] = min(best[name], (time.process_time_ns() - start) / calls / count)
    return best


async def _call(app: Any, path: str, body: bytes) -> None:  # noqa: ANN401 - an application
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message.get("status", 200) != 200:
            raise RuntimeError(message)

    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    await app(scope, receive, send)


# ---- memory ----------------------------------------------------------------------------------------------------------


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
        from tidegate.service.client.client import Client  # noqa: PLC0415 - after the path is known

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
