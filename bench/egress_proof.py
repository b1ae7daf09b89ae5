"""Proof of the egress gateway: providers with hidden limits, many unmodified clients, killed and several gateways.

    python -m bench.egress_proof                                      1,000 connections, 60 s windows, in memory
    python -m bench.egress_proof --store sqlite --kill                the gateway is killed (kill -9) and started again
    python -m bench.egress_proof --store valkey --gateways 2          two gateways on one Valkey
    python -m bench.egress_proof --streams 500                        500 streams at once: memory of the gateway

The clients are curl, Node's fetch and openai package, Go, and the Python SDKs (bench/egress_clients); what cannot be
installed is named. The program fails if a provider refuses a call after the first window, if less than 98 % of a
quota is used in a window, or if the gateway has settled other numbers of calls and tokens than the provider counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp

from bench.chosen_store import chosen_store
from bench.egress_clients.mixed import prepare, run_clients
from tests.egress.harness import settled_by
from tests.servers.process import free_port, until

ROOT = Path(__file__).parent.parent
TOKEN: Final = "token-of-the-proof-1234"  # noqa: S105 - of this run
MIN_USED: Final = 0.98
DAY: Final = 10**9  # a quota that is never used up: what is left of it tells what was settled
CALLS: Final = {
    "openai": ("/openai/v1/chat/completions", {"model": "gpt-4o-mini", "max_tokens": 1, "messages": []}),
    "anthropic": ("/anthropic/v1/messages", {"model": "claude-haiku-4-5", "max_tokens": 1, "messages": []}),
}


class Gateway(NamedTuple):
    """A gateway that can be killed and started again."""

    folder: Path
    port: int

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> subprocess.Popen[bytes]:
        """Start it, and wait until it listens."""
        command = [sys.executable, "-m", "tidegate", "egress", "egress.yaml", "--listen", f"127.0.0.1:{self.port}"]
        process = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.DEVNULL)  # noqa: S603 - our own
        until(self._listens, "the gateway", 60)
        return process

    def _listens(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), 1):
            return True


def write_files(folder: Path, upstream: int, store: str, limits: dict[str, int], period: float) -> None:
    """Write the files of the gateways."""
    units = {"openai": ("tokens",), "anthropic": ("input-tokens", "output-tokens")}
    for name, limit in limits.items():
        counted = [f"{DAY}/1d fixed_window unit={unit} name=day_{unit}" for unit in ("requests", *units[name])]
        quotas = [f"{limit}/{round(period)}s", *counted]
        provider = {"domain": f"api.{name}.com", "name": name, "profile": name, "limits": quotas}
        (folder / f"{name}.yaml").write_text(json.dumps(provider), encoding="utf-8")
    settings: dict[str, Any] = {"store": store, "timeout": "10m", "max_connections": 8192}
    settings |= {"providers": [f"{name}.yaml" for name in limits], "allow_private": ["127.0.0.1"]}
    settings |= {"upstreams": dict.fromkeys(limits, f"http://127.0.0.1:{upstream}")}
    settings |= {"callers": {"proof": {"token": TOKEN, "connections": 8192}}}
    (folder / "egress.yaml").write_text(json.dumps(settings), encoding="utf-8")


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


async def streams(gateway: Gateway, count: int, pid: int) -> list[float]:
    """Read streams at once, and return the memory of the gateway while they run."""
    memory = []
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:

        async def read() -> int:
            async with session.post(f"{gateway.url}/openai/stream", json={}) as response:
                return len(await response.read())

        tasks = [asyncio.create_task(read()) for _ in range(count)]
        while not all(task.done() for task in tasks):
            memory.append(round(memory_of(pid), 1))
            await asyncio.sleep(2)
        sizes = {task.result() for task in tasks}
    print(f"{count} streams at once, sizes of the answers {sizes}")
    return memory


# ---- what was counted ------------------------------------------------------------------------------------------------


def counted_by(counts: dict[str, Any], units: dict[str, int]) -> dict[str, int]:
    """Return what a provider has counted, in the units of its limits."""
    tokens = {"input-tokens": counts["input_tokens"], "output-tokens": counts["output_tokens"]}
    own = {"requests": len(counts["arrivals"]), "tokens": sum(tokens.values()), **tokens}
    return {unit: own[unit] for unit in units}


def report(name: str, counts: dict[str, Any], settled: dict[str, int], args: argparse.Namespace) -> list[str]:
    """Print what a provider has counted; return what is wrong."""
    arrivals, refused, limit, period = counts["arrivals"], counts["refused"], counts["limit"], args.period
    start = arrivals[0]
    # The clients begin no call after the last whole window, so only the windows before that are full.
    whole = int(args.windows)
    windows = [sum(start + i * period <= t < start + (i + 1) * period for t in arrivals) for i in range(whole)]
    most = most_within(arrivals, period)
    counted = counted_by(counts, settled)
    print(f"{name}: counted {len(arrivals)}, refused {len(refused)}, most in any window {most} of {limit}")
    print(f"{name}: used in each window {[f'{n / limit:.1%}' for n in windows]}")
    print(f"{name}: the provider counted {counted}; settled in the store {settled}")
    late = [t for t in refused if t >= start + period]
    unsettled = settled != counted
    if args.kill:  # calls that a killed gateway has not settled keep their estimate: never too little is charged
        unsettled = any(settled[unit] < counted[unit] for unit in counted)
    checks = {
        "refused after the first window": bool(late),
        "more than the limit in a window": most > limit,
        f"less than {MIN_USED:.0%} used": min(windows) < MIN_USED * limit,
        "settled is not what the provider counted": unsettled,
    }
    return [f"{name}: {problem}" for problem, wrong in checks.items() if wrong]


async def run_load(
    args: argparse.Namespace, gateways: list[Gateway], processes: list[subprocess.Popen[bytes]], provider: int
) -> list[str]:
    """Run the clients, kill gateways meanwhile, and report what was counted; return what is wrong."""
    folder = args.clients or gateways[0].folder
    folder.mkdir(parents=True, exist_ok=True)
    clients, missing = await asyncio.to_thread(prepare, folder)
    print(f"clients: {', '.join(client.name for client in clients)}; not to be had: {'; '.join(missing) or 'none'}")
    seconds, expected = args.period * args.windows, round(args.limit * args.windows)
    urls = [gateway.url for gateway in gateways]
    running = asyncio.create_task(run_clients(clients, urls, TOKEN, args.connections, seconds, expected))
    number = 0
    while args.kill and not running.done() and number < args.windows * 2 - 1:
        await asyncio.wait([running], timeout=args.period / 2)
        if running.done():
            break
        place = number % len(gateways)
        processes[1 + place].kill()
        processes[1 + place].wait()
        processes[1 + place] = await asyncio.to_thread(gateways[place].start)
        number += 1
    for name, seen in (await running).items():
        print(f"  {name:16} saw {dict(seen)}")
    if args.kill:
        print(f"killed {number} times")
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{provider}/counts") as response:
        counts = await response.json()
    settled = {name: await settled_by(gateways[0].url, path, body, DAY, TOKEN) for name, (path, body) in CALLS.items()}
    used = [name for name in counts if counts[name]["arrivals"]]
    return [problem for name in used for problem in report(name, counts[name], settled[name], args)]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--limit", type=int, default=2000, help="of OpenAI's API; Anthropic's has a tenth")
    parser.add_argument("--period", type=float, default=60.0)
    parser.add_argument("--windows", type=float, default=2.2, help="how many periods to begin calls for")
    parser.add_argument("--store", choices=("memory", "sqlite", "valkey"), default="memory")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--kill", action="store_true", help="kill -9 a gateway every half period")
    parser.add_argument("--streams", type=int, default=0)
    parser.add_argument("--clients", type=Path, help="folder for what the clients need; default: a temporary one")
    args = parser.parse_args()
    upstream, limits = free_port(), {"openai": args.limit, "anthropic": args.limit // 10}
    numbers = [str(each) for each in (upstream, *limits.values(), args.period)]
    command = [sys.executable, "-m", "bench.egress_provider", *numbers]
    with chosen_store(args.store) as store, tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), upstream, store, limits, args.period)
        gateways = [Gateway(Path(folder), free_port()) for _ in range(args.gateways)]
        processes = [subprocess.Popen(command, cwd=ROOT), *(gateway.start() for gateway in gateways)]  # noqa: S603 - our own
        try:
            if args.streams:
                memory = asyncio.run(streams(gateways[0], args.streams, processes[1].pid))
                print(f"memory of the gateway, MB, every 2 s: {memory}")
                return
            problems = asyncio.run(run_load(args, gateways, processes, upstream))
        finally:
            for process in processes:
                process.send_signal(signal.SIGKILL)
                process.wait()
    print("\n".join(problems) or "all as it should be")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
