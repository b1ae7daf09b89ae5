"""Tries one interface of an installed tidegate: run by `make release` in an environment with one extra only.

    python smoke.py EXTRA

It uses no server but those it starts itself, and nothing of the checkout.
"""

import asyncio
import importlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.request import urlopen

from tidegate import Denied, Limiter, StoreUnavailable


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


def try_envoy() -> None:
    """Load the gRPC server of the service, which needs the extra `service` in addition to run."""
    importlib.import_module("grpc")
    importlib.import_module("google.protobuf.descriptor_pb2")


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


class OkHandler(BaseHTTPRequestHandler):
    """Answers every GET with an empty 200."""

    def do_GET(self) -> None:
        """Send the response."""
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def one_call_provider() -> Iterator[tuple[Any, str]]:
    """Start an HTTP server; yield a provider with a quota of one call for it, and its URL."""
    server = HTTPServer(("127.0.0.1", 0), OkHandler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        providers = importlib.import_module("tidegate.outbound").Providers
        yield (
            providers.of({"domain": "127.0.0.1", "limits": ["1/1h"]}),
            f"http://127.0.0.1:{server.server_port}",
        )
    finally:
        server.shutdown()
        server.server_close()


def expect_one_call(get: Callable[[], int]) -> None:
    """Check that the first call is sent and the second one is denied."""
    assert get() == 200
    try:
        get()
    except Denied:
        return
    raise AssertionError("the second call was sent, although the quota is one call")


def try_httpx(name: str) -> None:
    """Send a request with httpx or httpx2."""
    with one_call_provider() as (provider, url):
        transport = importlib.import_module(f"tidegate.outbound.{name}").RateLimitTransport(provider, timeout=0)
        with importlib.import_module(name).Client(transport=transport, trust_env=False) as client:
            expect_one_call(lambda: client.get(url).status_code)


def try_requests() -> None:
    """Send a request with requests."""
    with one_call_provider() as (provider, url), importlib.import_module("requests").Session() as session:
        session.trust_env = False
        session.mount(
            "http://", importlib.import_module("tidegate.outbound.requests").RateLimitAdapter(provider, timeout=0)
        )
        expect_one_call(lambda: session.get(url).status_code)


def try_aiohttp() -> None:
    """Send a request with aiohttp."""
    session_class = importlib.import_module("aiohttp").ClientSession
    middleware_class = importlib.import_module("tidegate.outbound.aiohttp").RateLimitMiddleware
    with one_call_provider() as (provider, url), asyncio.Runner() as runner:

        async def get() -> int:
            async with session_class(middlewares=[middleware]) as session, session.get(url) as response:
                return int(response.status)

        middleware = middleware_class(provider, timeout=0)
        expect_one_call(lambda: runner.run(get()))
        runner.run(middleware.close())


def try_lost_store(url: str) -> None:
    """Use a store whose server does not run: the driver is there, and its error is translated."""
    with Limiter("2/1h", store=url) as limiter:
        try:
            limiter.reset("k")
        except StoreUnavailable:
            return
    raise AssertionError(f"{url} responded, although no server runs there")


def try_nats() -> None:
    """Open a bus whose server does not run: messages are not lost on this side, and closing it works."""
    bus = importlib.import_module("tidegate.bus").open_bus("nats://127.0.0.1:9")
    bus.close()


def try_prometheus() -> None:
    """Count a decision and export it."""
    registry = importlib.import_module("prometheus_client").CollectorRegistry()
    observer = importlib.import_module("tidegate.observe.prometheus").PrometheusObserver(registry)
    with Limiter("2/1h", observer=observer) as limiter:
        limiter.try_acquire("k")
    assert b"tidegate_" in importlib.import_module("prometheus_client").generate_latest(registry)


def try_otel() -> None:
    """Report a decision to OpenTelemetry, which ignores it without an SDK."""
    observer = importlib.import_module("tidegate.observe.otel").OpenTelemetryObserver()
    with Limiter("2/1h", observer=observer) as limiter:
        assert limiter.try_acquire("k")


def try_egress() -> None:
    """Start the gateway and ask for its health."""
    with tempfile.TemporaryDirectory() as folder:
        provider = Path(folder) / "provider.yaml"
        provider.write_text("domain: api.example.com\nlimits: [10/1m]\n", encoding="utf-8")
        file = Path(folder) / "egress.yaml"
        file.write_text(f"listen: 127.0.0.1:0\nproviders: [{provider}]\n", encoding="utf-8")
        try_command("egress", str(file), "--json", path="/healthz")


def try_table() -> None:
    """Draw a table of the command line with rich."""
    tables = importlib.import_module("tidegate._cli.tables")
    assert tables.draw_rich(tables.TextTable(tables.columns("policy", "denied"), [("api", "3")]), [6, 6])


TRIALS: dict[str, Callable[[], object]] = {
    "redis": partial(try_lost_store, "redis://127.0.0.1:9"),
    "postgres": partial(try_lost_store, "postgresql://127.0.0.1:9/limits"),
    "nats": try_nats,
    "httpx": partial(try_httpx, "httpx"),
    "httpx2": partial(try_httpx, "httpx2"),
    "requests": try_requests,
    "aiohttp": try_aiohttp,
    "sources": try_sources,
    "prometheus": try_prometheus,
    "otel": try_otel,
    "egress": try_egress,
    "service": try_service,
    "envoy": try_envoy,
    "client": try_client,
    "cli": try_table,
    "all": try_service,
}

if __name__ == "__main__":
    extra = sys.argv[1] if len(sys.argv) > 1 else ""
    try_library()
    if extra:
        TRIALS[extra]()
    print(f"{extra or 'without extras'}: ok")
