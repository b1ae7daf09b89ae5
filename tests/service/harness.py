"""Runs the service for tests: without sockets in this process, or as separate processes on loopback ports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from tests.servers.process import free_port, until
from tests.service.client_transport import SocketlessTransport
from tidegate.service._config.settings import load_settings
from tidegate.service._decisions.decider import Decider
from tidegate.service._http import App
from tidegate.service._http.connections import Connections
from tidegate.service._http.server import HttpServer
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parents[2]
START = 1_728_000_000
DECISION = "decision-token-0123"
ADMIN = "admin-token-01234567"


class InProcessService:
    """An app on a manual clock, with an HTTP client over connections without sockets."""

    def __init__(self, store=None, **settings: Any) -> None:
        self.clock = ManualClock(start=START)
        self.settings = load_settings(settings)
        self.decider = Decider(
            self.settings.policies,
            store or MemoryStore(clock=self.clock),
            max_wait=self.settings.max_wait,
            max_priority=self.settings.max_priority,
        )
        self.app = App(self.decider, self.settings)
        self.http = http_client(self.app)

    async def post(self, verb: str, body: Any, **more: Any) -> httpx.Response:
        return await self.http.post(f"/v1/{verb}", json=body, **more)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()
        await self.decider.close()


def http_client(app: App, base_url: str = "http://127.0.0.1:8080") -> httpx.AsyncClient:
    """Return a client of an app in this process."""
    server = HttpServer(app, Connections(1000, 5, 75), app.decider.store.clock)
    return httpx.AsyncClient(transport=SocketlessTransport(server), base_url=base_url)


class RunningService:
    """A process of `tidegate start`."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, grpc: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.grpc = grpc
        self.log = log
        self.url = f"http://127.0.0.1:{port}"

    def post(self, verb: str, body: Any, **more: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/{verb}", json=body, **{"timeout": 30, "trust_env": False, **more})

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=30, trust_env=False, **more)

    def logged(self, text: str) -> bool:
        return text in self.log.read_text(encoding="utf-8")

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(30)


@contextmanager
def serving(
    folder: Path, text: str, *flags: str, prefix: Sequence[str] = (), **environment: str
) -> Iterator[RunningService]:
    """Run the service with this file until the end of the block; `prefix` is a command that wraps it."""
    port, grpc = free_port(), free_port()
    config, log = folder / "service.yaml", folder / "service.log"
    config.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "tidegate", "start", str(config), "--listen", f"127.0.0.1:{port}", *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*prefix, *(argument.replace("GRPC", f"127.0.0.1:{grpc}") for argument in command)],
            cwd=ROOT,
            env={**os.environ, "TIDEGATE_DRAIN_FOR": "0s", **environment},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    running = RunningService(process, port, grpc, log)
    try:
        until(lambda: is_up(running), "the start of the service", 60)
        yield running
    finally:
        try:
            running.stop()
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
            raise


def is_up(running: RunningService) -> bool:
    """Return whether the service is ready. Raises if it has ended."""
    if running.process.poll() is not None:
        raise AssertionError(running.log.read_text(encoding="utf-8"))
    return running.logged("listening on")
