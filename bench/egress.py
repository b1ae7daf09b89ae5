"""The egress gateway beside a bare aiohttp proxy, in one run: processor time per request and per streamed chunk.

python -m bench.egress                       both proxies, interleaved
python -m bench.egress --litellm PYTHON      and litellm's proxy; the environment of PYTHON has litellm[proxy]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import aiohttp

TICKS = os.sysconf("SC_CLK_TCK")
ROOT = Path(__file__).parent.parent
CONNECTIONS = 32
TOKEN = f"sk-{secrets.token_hex(24)}"  # of litellm's proxy, for this run


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


def start_litellm(python: str, port: int, upstream: int, folder: Path) -> Part:
    """Start litellm's proxy with one model, and wait until it answers."""
    params = {"model": "openai/fake", "api_base": f"http://127.0.0.1:{upstream}/v1", "api_key": "sk-none"}
    config = {"model_list": [{"model_name": "fake", "litellm_params": params}]}
    (folder / "litellm.yaml").write_text(json.dumps(config), encoding="utf-8")
    command = [str(Path(python).parent / "litellm"), "--config", str(folder / "litellm.yaml"), "--port", str(port)]
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": TOKEN}
    process = subprocess.Popen(  # noqa: S603 - as the user says
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        try:
            asyncio.run(chats(port, "", 1))
        except (aiohttp.ClientError, RuntimeError):
            time.sleep(1)
        else:
            return Part("litellm", port, process)
    process.kill()
    raise RuntimeError("litellm did not start")


async def chats(port: int, prefix: str, count: int) -> None:
    """Send chat completions over several connections."""
    left = iter(range(count))
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def worker() -> None:
            for _ in left:
                url = f"http://127.0.0.1:{port}{prefix}/v1/chat/completions"
                async with session.post(url, json=body, headers={"Authorization": f"Bearer {TOKEN}"}) as response:
                    await response.read()
                    if response.status != 200:
                        raise RuntimeError(f"status {response.status}")

        await asyncio.gather(*(worker() for _ in range(min(count, CONNECTIONS))))


def compare_litellm(python: str, gateway: Part, upstream: int) -> None:
    """Print the processor time of the gateway and of litellm's proxy for a chat completion."""
    with tempfile.TemporaryDirectory() as folder:
        litellm = start_litellm(python, upstream + 9, upstream, Path(folder))
        try:
            found: dict[str, list[float]] = {"gateway": [], "litellm": []}
            for _ in range(3):
                for part, prefix, count in ((gateway, "/up", 1500), (litellm, "", 100)):
                    before = part.processor_time
                    asyncio.run(chats(part.port, prefix, count))
                    found[part.role].append((part.processor_time - before) / count * 1e6)
        finally:
            litellm.process.kill()
            litellm.process.wait()
    ours, theirs = min(found["gateway"]), min(found["litellm"])
    print(
        f"chat completions: gateway {ours:.0f} µs, litellm's proxy {theirs:.0f} µs: {theirs / ours:.0f} times (aim 30)"
    )


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
    parser.add_argument("--litellm", metavar="PYTHON", help="the interpreter of an environment with litellm[proxy]")
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
        if args.litellm:
            compare_litellm(args.litellm, parts[1], 18101)
        print(f"time per chunk, times the bare proxy's: {statistics.median(chunks):.2f} (aim 1.4)")
    finally:
        for part in (provider, *parts):
            part.process.kill()
            part.process.wait()


if __name__ == "__main__":
    main()
