"""The egress gateway beside a bare aiohttp proxy, in one run: processor time per request and per streamed chunk.

python -m bench.egress            both proxies, interleaved
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import aiohttp

TICKS = os.sysconf("SC_CLK_TCK")
ROOT = Path(__file__).parent.parent
CONNECTIONS = 32


class Part(NamedTuple):
    """A process of the measurement."""

    role: str
    port: int
    process: subprocess.Popen[bytes]

    @property
    def processor_time(self) -> float:
        """The seconds of processor time that it has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii").rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS


def start(role: str, port: int, upstream: int, *more: str) -> Part:
    """Start a process, and wait until it listens."""
    command = [sys.executable, "-m", "bench.egress_parts", role, str(port), str(upstream), *more]
    process = subprocess.Popen(command, cwd=ROOT)  # noqa: S603 - our own interpreter
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        probe = subprocess.run(  # noqa: S603 - our own interpreter
            [sys.executable, "-c", f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"],
            check=False,
            stderr=subprocess.DEVNULL,
        )
        if probe.returncode == 0:
            return Part(role, port, process)
        time.sleep(0.1)
    raise RuntimeError(f"{role} did not start")


async def requests(port: int, path: str, count: int, first_bytes: list[float] | None = None) -> None:
    """Send requests over several connections."""
    left = iter(range(count))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def worker() -> None:
            for _ in left:
                began = time.perf_counter()
                async with session.get(f"http://127.0.0.1:{port}{path}") as response:
                    if first_bytes is not None:
                        first_bytes.append(time.perf_counter() - began)
                    body = await response.read()
                    if response.status != 200:
                        raise RuntimeError(f"status {response.status}: {body[:200]!r}")

        await asyncio.gather(*(worker() for _ in range(CONNECTIONS if first_bytes is None else 1)))


def measure(part: Part, path: str, count: int) -> float:
    """Return the microseconds of processor time per request."""
    before = part.processor_time
    asyncio.run(requests(part.port, path, count))
    return (part.processor_time - before) / count * 1e6


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=1500)
    args = parser.parse_args()
    provider = start("provider", 18101, 0)
    parts = [start("bare", 18102, 18101), start("gateway", 18103, 18101)]
    try:
        small: dict[str, list[float]] = {part.role: [] for part in parts}
        chunk: dict[str, list[float]] = {part.role: [] for part in parts}
        first: dict[str, list[float]] = {part.role: [] for part in parts}
        for part in parts:
            measure(part, "/up/small", 200)
        for _ in range(args.rounds):
            for part in parts:
                small[part.role].append(measure(part, "/up/small", args.count))
                chunk[part.role].append(measure(part, "/up/stream?chunks=400", 64) / 400)
                times: list[float] = []
                asyncio.run(requests(part.port, "/up/small", 200, times))
                first[part.role].append(statistics.median(times))
        for role, times in small.items():
            each = f"{min(times):7.0f} µs/request  {min(chunk[role]):6.1f} µs/chunk"
            print(f"{role:8} {each}  first byte p50 {min(first[role]) * 1e3:.2f} ms   all: {[round(t) for t in times]}")
        ratios = [a / b for a, b in zip(small["bare"], small["gateway"], strict=True)]
        chunks = [b / a for a, b in zip(chunk["bare"], chunk["gateway"], strict=True)]
        print(f"rate of the bare proxy that is kept: {statistics.median(ratios):.2f} (aim 0.65)")
        print(f"time per chunk, times the bare proxy's: {statistics.median(chunks):.2f} (aim 1.4)")
    finally:
        for part in (provider, *parts):
            part.process.kill()
            part.process.wait()


if __name__ == "__main__":
    main()
