"""Proof of the egress gateway: a provider with a hidden limit, many connections, killed and several gateways.

    python -m bench.egress_proof                                      1,000 connections, 60 s windows, in memory
    python -m bench.egress_proof --store sqlite --kill                the gateway is killed (kill -9) and started again
    python -m bench.egress_proof --store valkey --gateways 2          two gateways on one Valkey
    python -m bench.egress_proof --streams 500                        500 streams at once: memory of the gateway

The provider counts every window exactly: a request is refused if `limit` others arrived within `period` before it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
from aiohttp import web

from tests.servers.process import free_port, until
from tidegate.event_loop import run_loop

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'


class HiddenLimit:
    """A provider that tells nobody its limit. It counts by its own clock, and never sends rate limit headers."""

    def __init__(self, limit: int, period: float) -> None:
        """Allow so many requests in any window of this length."""
        self.limit, self.period = limit, period
        self.recent: deque[float] = deque()
        self.arrivals: list[float] = []
        self.refused: list[float] = []
        self.streams = 0

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Count a request and answer it; /counts tells what was counted."""
        if request.path == "/counts":
            return web.json_response({"arrivals": self.arrivals, "refused": self.refused, "now": time.monotonic()})
        await request.read()
        if request.path == "/stream":
            return await self._stream(request)
        now = time.monotonic()
        while self.recent and now - self.recent[0] >= self.period:
            self.recent.popleft()
        if len(self.recent) >= self.limit:
            self.refused.append(now)
            return web.Response(status=429, text="slow down")
        self.recent.append(now)
        self.arrivals.append(now)
        return web.json_response({"ok": True})

    async def _stream(self, request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(200):
            await response.write(EVENT * 8)
            await asyncio.sleep(0.1)
        await response.write_eof()
        return response


async def provide(port: int, limit: int, period: float) -> None:
    """Serve the provider until it is killed."""
    listener = socket.create_server(("127.0.0.1", port), backlog=4096)
    server = web.Server(HiddenLimit(limit, period).handle, access_log=None)
    await asyncio.get_running_loop().create_server(server, sock=listener, backlog=4096)
    await asyncio.Event().wait()


class Gateway(NamedTuple):
    """A gateway that can be killed and started again."""

    folder: Path
    port: int

    def start(self) -> subprocess.Popen[bytes]:
        """Start it, and wait until it listens."""
        command = [sys.executable, "-m", "tidegate", "egress", "egress.yaml", "--listen", f"127.0.0.1:{self.port}"]
        process = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.DEVNULL)  # noqa: S603 - our own
        until(self._listens, "the gateway", 60)
        return process

    def _listens(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), 1):
            return True


def write_files(folder: Path, upstream: int, store: str, limit: int, period: float) -> None:
    """Write the files of the gateways."""
    provider = {"domain": "127.0.0.1", "name": "up", "limits": [f"{limit}/{round(period)}s"]}
    (folder / "up.yaml").write_text(json.dumps(provider), encoding="utf-8")
    url = f"http://127.0.0.1:{upstream}"
    settings: dict[str, Any] = {"store": store, "providers": ["up.yaml"], "timeout": "10m", "max_connections": 8192}
    settings |= {"upstreams": {"up": url}, "allow_private": ["127.0.0.1"]}
    (folder / "egress.yaml").write_text(json.dumps(settings), encoding="utf-8")


class Load:
    """Callers that send one request after another, over connections of their own."""

    def __init__(self, ports: list[int], connections: int) -> None:
        """Send to these gateways in turn."""
        self.ports = ports
        self.connections = connections
        self.statuses: dict[str, int] = {}

    async def run(self, seconds: float) -> None:
        """Send for so long."""
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        ) as session:
            workers = [asyncio.create_task(self._worker(session, number)) for number in range(self.connections)]
            await asyncio.sleep(seconds)
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _worker(self, session: aiohttp.ClientSession, number: int) -> None:
        url = f"http://127.0.0.1:{self.ports[number % len(self.ports)]}/up/call"
        while True:
            try:
                async with session.get(url) as response:
                    await response.read()
                    found = str(response.status)
            except aiohttp.ClientError as error:
                found = type(error).__name__
                await asyncio.sleep(0.2)
            self.statuses[found] = self.statuses.get(found, 0) + 1


def most_within(times: list[float], period: float) -> int:
    """Return the largest number of requests in any window."""
    most, first = 0, 0
    for last, instant in enumerate(times):
        while instant - times[first] >= period:
            first += 1
        most = max(most, last - first + 1)
    return most


def memory_of(pid: int) -> float:
    """Return the resident memory of a process, in MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def streams(port: int, count: int, pid: int) -> list[float]:
    """Read streams at once, and return the memory of the gateway while they run."""
    memory = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def read() -> int:
            async with session.post(f"http://127.0.0.1:{port}/up/stream", json={}) as response:
                return len(await response.read())

        tasks = [asyncio.create_task(read()) for _ in range(count)]
        while not all(task.done() for task in tasks):
            memory.append(round(memory_of(pid), 1))
            await asyncio.sleep(2)
        sizes = {task.result() for task in tasks}
    print(f"{count} streams at once, sizes of the answers {sizes}")
    return memory


@contextlib.contextmanager
def chosen_store(kind: str) -> Iterator[str]:
    """Yield the URL of a store."""
    if kind == "valkey":
        from tests.servers.valkey import ValkeyServer  # noqa: PLC0415 - only for this store

        with ValkeyServer() as server:
            yield server.url
    else:
        yield "memory://" if kind == "memory" else "sqlite:///quota.db"


def report(counts: dict[str, Any], statuses: dict[str, int], args: argparse.Namespace) -> None:
    """Print what the provider counted."""
    arrivals, refused = counts["arrivals"], counts["refused"]
    start = arrivals[0]
    whole = int((arrivals[-1] - start) // args.period)
    windows = [
        sum(start + i * args.period <= t < start + (i + 1) * args.period for t in arrivals) for i in range(whole)
    ]
    print(f"the callers saw {statuses}; the provider counted {len(arrivals)} and refused {len(refused)}")
    print(f"most in any window {most_within(arrivals, args.period)} of {args.limit}")
    print(f"in each window {windows}: used {[f'{n / args.limit:.1%}' for n in windows]}")
    settled = [t for t in refused if t >= start + args.period]
    print(f"refused after the first window: {len(settled)}")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--limit", type=int, default=2000)
    parser.add_argument("--period", type=float, default=60.0)
    parser.add_argument("--windows", type=float, default=2.2, help="how many periods to run for")
    parser.add_argument("--store", choices=("memory", "sqlite", "valkey"), default="memory")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--kill", action="store_true", help="kill -9 a gateway every half period")
    parser.add_argument("--streams", type=int, default=0)
    parser.add_argument("--provider", nargs=3, metavar=("PORT", "LIMIT", "PERIOD"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.provider:
        run_loop(provide(int(args.provider[0]), int(args.provider[1]), float(args.provider[2])))
        return
    upstream = free_port()
    command = [
        sys.executable,
        "-m",
        "bench.egress_proof",
        "--provider",
        str(upstream),
        str(args.limit),
        str(args.period),
    ]
    with chosen_store(args.store) as store, tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), upstream, store, args.limit, args.period)
        gateways = [Gateway(Path(folder), free_port()) for _ in range(args.gateways)]
        processes = [subprocess.Popen(command, cwd=ROOT), *(gateway.start() for gateway in gateways)]  # noqa: S603 - our own
        try:
            if args.streams:
                memory = asyncio.run(streams(gateways[0].port, args.streams, processes[1].pid))
                print(f"memory of the gateway, MB, every 2 s: {memory}")
                return
            load = Load([gateway.port for gateway in gateways], args.connections)
            asyncio.run(run_load(load, args, gateways, processes))
        finally:
            for process in processes:
                process.send_signal(signal.SIGKILL)
                process.wait()


async def run_load(
    load: Load, args: argparse.Namespace, gateways: list[Gateway], processes: list[subprocess.Popen[bytes]]
) -> None:
    """Run the load, kill gateways meanwhile, and report what the provider counted."""
    running = asyncio.create_task(load.run(args.period * args.windows))
    number = 0
    while args.kill and not running.done():
        await asyncio.sleep(args.period / 2)
        if running.done():
            break
        place = number % len(gateways)
        processes[1 + place].kill()
        processes[1 + place].wait()
        processes[1 + place] = await asyncio.to_thread(gateways[place].start)
        number += 1
    await running
    if args.kill:
        print(f"killed {number} times")
    provider = int(processes[0].args[4])  # type: ignore[index]  # the command above
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{provider}/counts") as response:
        report(await response.json(), load.statuses, args)


if __name__ == "__main__":
    main()
