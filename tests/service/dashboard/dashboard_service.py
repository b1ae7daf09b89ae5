"""A service with everything that the dashboard can show, as real processes: for tests and for screenshots."""

from __future__ import annotations

import shutil
import threading
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import httpx

from tests.servers.nats import NatsServer
from tests.servers.process import need
from tests.service.harness import RunningService, serving
from tidegate.budget import TaskBudget
from tidegate.bus import open_bus
from tidegate.swarm import SwarmLimiter

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser

PROGRAM = "chromium-headless-shell"
POLICIES = """
policies:
  api: 2000/1m token_bucket
  login: {limits: [5/1m fixed_window, 20/1h], overrides: [{key: "partner:*", limits: 500/1m}]}
  search: {limits: 30/10s, rollout: 25%}
  openai: [60/1m, 9000/1m unit=tokens name=tokens]
  exports: {limits: 2/1m concurrency, mode: shadow}
"""
BUDGET = {
    "RATE_LIMIT_ENABLED": "true",
    "RATE_LIMIT_PER_MINUTE": "40",
    "RATE_LIMIT_PER_HOUR": "200",
    "RATE_LIMIT_PER_DAY": "1500",
    "RATE_LIMIT_PER_MONTH": "20000",
}


class DashboardService:
    """A running service, a client for it, and the agents of its swarm."""

    def __init__(self, running: RunningService) -> None:
        """Connect to the service."""
        self.running = running
        self.url = running.url
        self.http = httpx.Client(base_url=running.url, trust_env=False, timeout=30)
        self.agents: list[SwarmLimiter] = []

    def acquire(self, policy: str, key: str, times: int = 1, **fields: Any) -> list[bool]:
        """Acquire `times` times; returns whether each call was allowed (an error is not)."""
        body = {"policy": policy, "key": key, **fields}
        return [self.http.post("/v1/acquire", json=body).json().get("allowed", False) for _ in range(times)]

    def overview(self) -> dict[str, Any]:
        """Return the data of the dashboard."""
        return self.http.get("/v1/overview").json()  # type: ignore[no-any-return]  # JSON


class UpstreamHandler(BaseHTTPRequestHandler):
    """Handles the requests of sources."""

    def do_GET(self) -> None:
        """Respond with a short body."""
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def upstream() -> Iterator[int]:
    """Run a server for sources; yields its port."""
    with serving_thread(ThreadingHTTPServer(("127.0.0.1", 0), UpstreamHandler)) as port:
        yield port


@contextmanager
def serving_thread(server: ThreadingHTTPServer) -> Iterator[int]:
    """Run a server in a thread; yields its port."""
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class PrefixProxy(BaseHTTPRequestHandler):
    """A reverse proxy that removes a prefix from the path, as nginx does with `proxy_pass …/;`."""

    PREFIX = "/team/limits"
    target = ""

    def do_GET(self) -> None:
        """Forward a request."""
        if not self.path.startswith(f"{self.PREFIX}/"):
            self.send_error(404)
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = self.target + self.path.removeprefix(self.PREFIX)
        kept = {name: value for name, value in self.headers.items() if name.lower() != "host"}
        reply = httpx.request(self.command, url, headers=kept, content=body, trust_env=False, timeout=30)
        self.send_response(reply.status_code)
        for name, value in reply.headers.items():
            if name not in {"transfer-encoding", "connection", "content-encoding"}:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(reply.content)

    do_POST = do_GET  # noqa: N815 - the name that http.server calls

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def prefix_proxy(target: str) -> Iterator[str]:
    """Run a proxy before a service; yields the URL of the dashboard."""
    handler = type("Handler", (PrefixProxy,), {"target": target})
    with serving_thread(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as port:
        yield f"http://127.0.0.1:{port}{PrefixProxy.PREFIX}/"


@contextmanager
def basic_service(folder: Path, text: str = POLICIES, *flags: str, **environment: str) -> Iterator[DashboardService]:
    """Run a service without sources, budget, bus and swarm."""
    with serving(folder, text, *flags, **environment) as running:
        service = DashboardService(running)
        try:
            yield service
        finally:
            service.http.close()


@contextmanager
def full_service(folder: Path) -> Iterator[DashboardService]:
    """Run a service with sources, a budget and a swarm on a bus."""
    with ExitStack() as stack:
        nats = stack.enter_context(NatsServer())
        port = stack.enter_context(upstream())
        provider = folder / "quotes.yaml"
        provider.write_text("name: quotes\ndomain: localhost\nlimit: 30\nperiod: 1m\n", encoding="utf-8")
        for name, interval in (("prices", "2s"), ("news", "15s"), ("rates", "1h")):
            path = folder / "sources" / f"{name}.yaml"
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"name: {name}\nurl: http://localhost:{port}/{name}\ninterval: {interval}\n", "utf-8")
        budget = {**BUDGET, "RATE_LIMIT_STORAGE_PATH": str(folder / "budget.db")}
        with TaskBudget.from_env(budget) as tasks:
            tasks.record_completed_tasks(33)
        flags = ("--provider", provider, "--source-dir", folder / "sources", "--data", folder / "data", "--budget",
                 "true", "--bus", nats.url, "--swarm", nats.url)  # fmt: skip
        service = stack.enter_context(basic_service(folder, POLICIES, *map(str, flags), **budget))
        bus = stack.enter_context(open_bus(nats.url))
        assert bus.wait(20)
        for number in (1, 2, 3):
            agent = stack.enter_context(SwarmLimiter(bus=bus, agent_id=f"agent-{number}"))
            agent.set_capacity("openai", 100, window=60)
            agent.set_capacity("crawler", 40, window=60)
            service.agents.append(agent)
        yield service


def send_traffic(service: DashboardService, random: random.Random) -> None:
    """Send the traffic of one second."""
    users = [f"user:{random.randint(1, 40)}" for _ in range(random.randint(25, 70))]
    service.http.post("/v1/batch", json={"policy": "api", "keys": users}).raise_for_status()
    service.http.post("/v1/batch", json={"policy": "search", "keys": users[: random.randint(4, 16)] + ["crawler"] * 5})
    for address in ("203.0.113.9", "198.51.100.4", "partner:acme", "2001:db8::7"):
        if random.random() < 0.6:
            service.acquire("login", address)
    asks = [{"policy": "openai", "key": "team-blue", "cost": {"requests": 1, "tokens": random.randint(50, 400)}}]
    asks += [{"policy": "exports", "key": "nightly"}] * (random.random() < 0.3)
    service.http.post("/v1/batch", json={"asks": asks})


@contextmanager
def browser() -> Iterator[Browser]:
    """Start the system's headless Chromium."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - not installed everywhere

    program = need(shutil.which(PROGRAM), PROGRAM, f"apt-get install {PROGRAM}")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield chromium
        finally:
            chromium.close()
