"""The RESP port measured beside HTTP and beside a RESP server with a constant answer, in turns in one run.

    python -m bench.resp [--quick] [--json FILE]

A client in a process of its own keeps 16 connections busy with raw sockets: on each, it sends one request or a pipeline
of 16, and the next one after all replies have arrived. Two rates are given: decisions per second, and decisions per
second of processor time of the server, which other work on the machine hardly changes. Targets are judged by the
latter. HTTP requests are single acquires with the same client.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from bench.service import running  # noqa: E402 - needs the path above

if TYPE_CHECKING:
    from collections.abc import Callable

CONNECTIONS: Final = 16
PIPELINE: Final = 16
POLICIES: Final = "policies: {api: 1000000000/1m}\n"
BODY: Final = b'{"policy":"api","key":"user:1234"}'
POST: Final = (
    b"POST /v1/acquire HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
    % (len(BODY), BODY)
)
ACQUIRE: Final = b"*3\r\n$10\r\nTG.ACQUIRE\r\n$3\r\napi\r\n$9\r\nuser:1234\r\n"
THROTTLE: Final = b"*5\r\n$11\r\nCL.THROTTLE\r\n$9\r\nuser:1234\r\n$9\r\n100000000\r\n$10\r\n1000000000\r\n$2\r\n60\r\n"
# name: the server, one request, how many are sent at once, and what ends a reply
CASES: Final = {
    "http": ("http", POST, 1, b"}]}"),
    "floor": ("floor", ACQUIRE, 1, b"*0\r\n"),
    "resp": ("resp", ACQUIRE, 1, b"*0\r\n"),
    "floor, pipelined": ("floor", ACQUIRE, PIPELINE, b"*0\r\n"),
    "resp, pipelined": ("resp", ACQUIRE, PIPELINE, b"*0\r\n"),
    "CL.THROTTLE": ("resp", THROTTLE, 1, b"*5\r\n"),
    "CL.THROTTLE, pipelined": ("resp", THROTTLE, PIPELINE, b"*5\r\n"),
}
TARGETS: Final = (
    ("one at a time, at least 4 times HTTP", "resp", "http", 4.0),
    ("pipelined by 16, at least 200,000/s per core", "resp, pipelined", None, 200_000.0),
)
FLOOR: Final = """\
import asyncio, sys, uvloop
REPLY = b"*5\\r\\n:1\\r\\n:999999999\\r\\n:0\\r\\n:1\\r\\n*0\\r\\n"
class Connection(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
    def data_received(self, data):
        self.transport.write(REPLY * data.count(b"*3\\r\\n"))
async def main():
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()
uvloop.run(main())
"""


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description="Measure the RESP port.")
    parser.add_argument("--quick", action="store_true", help="a few rounds only")
    parser.add_argument("--json", type=Path, help="keep the results in this file")
    parser.add_argument("--client", nargs=3, metavar=("CASE", "PORT", "SECONDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        name, port, seconds = options.client
        _, request, count, end = CASES[name]
        print(load(int(port), request * count, count, end, float(seconds)))
        return
    rounds, seconds = (3, 1.0) if options.quick else (7, 3.0)
    results = measure(rounds, seconds)
    for name, each in results.items():
        print(f"{name:<24} {each['per second']:12,.0f}/s  {each['per core']:12,.0f}/s of processor time")
    judge(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2), encoding="utf-8")


def measure(rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """Load every server in turns; return the medians by case."""
    rates: dict[str, list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "floor.py").write_text(FLOOR, encoding="utf-8")
        (folder / "service.yaml").write_text(POLICIES, encoding="utf-8")
        servers: dict[str, tuple[int, int]] = {}
        for name, start in commands(folder).items():
            port = stack.enter_context(running(start))
            servers[name] = port, listening_process(port)
        for _ in range(rounds):
            for name, (server, *_) in CASES.items():
                port, process = servers[server]
                before = processor_seconds(process)
                answered, elapsed = run_client(name, port, seconds)
                used = processor_seconds(process) - before
                rates.setdefault(name, []).append((answered / elapsed, answered / used))
    return {
        name: {"per second": median(r for r, _ in each), "per core": median(c for _, c in each)}
        for name, each in rates.items()
    }


def commands(folder: Path) -> dict[str, Callable[[int], list[str]]]:
    """Return how each server is started on a port."""
    start = [sys.executable, "-m", "tidegate", "start", str(folder / "service.yaml"), "--listen"]
    return {
        "floor": lambda port: [sys.executable, str(folder / "floor.py"), str(port)],
        "http": lambda port: [*start, f"127.0.0.1:{port}"],
        "resp": lambda port: [*start, "127.0.0.1:0", "--resp", f"127.0.0.1:{port}"],
    }


def listening_process(port: int) -> int:
    """Return the id of the child process that was started for a port."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == os.getpid() and str(port).encode() in words:
                return int(entry.name)
    raise RuntimeError(f"no process serves port {port}")


def processor_seconds(process: int) -> float:
    """Return how much processor time a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_client(name: str, port: int, seconds: float) -> tuple[int, float]:
    """Run the client in a process of its own; return the number of replies, and how long it took."""
    words = [sys.executable, str(Path(__file__).resolve()), "--client", name, str(port), str(seconds)]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout  # noqa: S603 - this program
    return int(json.loads(said)[0]), float(json.loads(said)[1])


def load(port: int, request: bytes, count: int, end: bytes, seconds: float) -> list[float]:
    """Keep all connections busy; return the number of replies, and how long it took."""
    selector = selectors.DefaultSelector()
    connections = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(CONNECTIONS)]
    missing: dict[Any, int] = {}
    for connection in connections:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(connection, selectors.EVENT_READ, connection)
        connection.sendall(request)
        missing[connection] = count
    answered, start = 0, time.perf_counter()
    deadline = start + seconds
    while (now := time.perf_counter()) < deadline:
        for selected, _ in selector.select(1.0):
            connection = selected.data
            data = connection.recv(65_536)
            if not data or data.startswith(b"-"):
                raise RuntimeError(data)
            missing[connection] -= data.count(end)
            if missing[connection] <= 0:
                answered += count
                missing[connection] = count
                connection.sendall(request)
    for connection in connections:
        connection.close()
    return [answered, now - start]


def judge(results: dict[str, dict[str, float]]) -> None:
    """Print which targets are met."""
    for about, ours, other, target in TARGETS:
        figure = results[ours]["per core"] / (1 if other is None else results[other]["per core"])
        print(f"{'met   ' if figure >= target else 'MISSED'} {about}: {figure:,.2f}")


if __name__ == "__main__":
    main()
