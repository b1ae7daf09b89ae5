"""Tries one interface of an installed tidegate: run by `make release` in an environment with one extra only.

    python smoke.py EXTRA

It uses no server but those it starts itself, and nothing of the checkout.
"""

import importlib
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.request import urlopen

from tidegate import Limiter


def try_library() -> None:
    """Try what needs no extra: a durable limiter, the middleware, a budget, a swarm."""
    with tempfile.TemporaryDirectory() as folder, Limiter("2/1h", store=f"sqlite:///{folder}/limits.db") as limiter:
        assert [bool(limiter.try_acquire("k")) for _ in range(3)] == [True, True, False]
    asgi = importlib.import_module("tidegate.inbound.asgi")
    asgi.RateLimitMiddleware(lambda *_: None)
    budget = importlib.import_module("tidegate.budget")
    with tempfile.TemporaryDirectory() as folder, budget.TaskBudget(f"{folder}/b.db", per_day=2) as tasks:
        assert tasks.check_all_limits(2)
    swarm = importlib.import_module("tidegate.swarm")
    assert swarm.MemoryLimiter


def start(*arguments: str) -> "subprocess.Popen[str]":
    """Start a command of tidegate."""
    command = [sys.executable, "-m", "tidegate", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def try_command(*arguments: str, path: str) -> None:
    """Start a command that serves HTTP, read its first line, get a page, and stop it."""
    process = start(*arguments)
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        with urlopen(ready.get("http", ready.get("egress")) + path, timeout=20) as response:  # noqa: S310 - http
            assert response.status == 200
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def try_service() -> None:
    """Start the service and ask for its health."""
    try_command("start", "--json", "--listen", "127.0.0.1:0", "--policy", "api=2/1h", path="/healthz")


def try_sources() -> None:
    """Start the service with a source that fails, and ask for its health."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source.yaml"
        source.write_text("name: nothing\nurl: http://127.0.0.1:9/\n", encoding="utf-8")
        options = ("--source", str(source), "--data", folder)
        try_command("start", "--json", "--listen", "127.0.0.1:0", *options, path="/healthz")


def try_client() -> None:
    """Open a client of the service."""
    client = importlib.import_module("tidegate.service.client")
    client.Client("http://127.0.0.1:9").close()


def try_transport(module: str) -> None:
    """Open a transport of an HTTP client."""
    providers = importlib.import_module("tidegate.outbound").Providers([])
    importlib.import_module(module).RateLimitTransport(providers)


def try_table() -> None:
    """Draw a table of the command line with rich."""
    tables = importlib.import_module("tidegate.cli.tables")
    assert tables.draw_rich(tables.TextTable(tables.columns("policy", "denied"), [("api", "3")]), [6, 6])


TRIALS = {
    "": try_library,
    "redis": lambda: importlib.import_module("tidegate.stores.redis"),
    "postgres": lambda: importlib.import_module("tidegate.stores.postgres"),
    "nats": lambda: importlib.import_module("tidegate.bus.nats"),
    "httpx": lambda: try_transport("tidegate.outbound.httpx"),
    "httpx2": lambda: try_transport("tidegate.outbound.httpx2"),
    "requests": lambda: importlib.import_module("tidegate.outbound.requests"),
    "aiohttp": lambda: importlib.import_module("tidegate.outbound.aiohttp"),
    "sources": try_sources,
    "prometheus": lambda: importlib.import_module("tidegate.observe.prometheus").PrometheusObserver(),
    "otel": lambda: importlib.import_module("tidegate.observe.otel"),
    "egress": lambda: importlib.import_module("tidegate.egress.run"),
    "service": try_service,
    "client": try_client,
    "cli": try_table,
    "all": try_service,
}

if __name__ == "__main__":
    extra = sys.argv[1] if len(sys.argv) > 1 else ""
    try_library()
    TRIALS[extra]()
    print(f"{extra or 'without extras'}: ok")
