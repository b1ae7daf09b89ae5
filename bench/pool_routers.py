"""Compare tidegate's pool with litellm's router: four processes, five deployments with unequal quotas, real HTTP.

python -m bench.pool_routers                  about two minutes, and the installation of litellm
python -m bench.pool_routers --litellm PYTHON    use an environment that has litellm
python -m bench.pool_routers --no-litellm --store valkey --stall 0.6

Each deployment is a provider (`token_provider`) that counts for itself, on the loopback interface. Both libraries run
at the same time, against deployments of their own. The processes of tidegate share a store; those of litellm have no
Redis, so each counts for itself. With `--stall`, the first call of each process of tidegate blocks its event loop after
it has its permit, while the other calls already have theirs: they reach their deployments that much later.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

from bench.chosen_store import chosen_store
from bench.token_provider import PERIOD, TokenProvider

ROOT: Final = Path(__file__).parent.parent
CLIENTS: Final = Path(__file__).parent / "pool_clients.py"
LITELLM: Final = "litellm==1.106.2"
SHARES: Final = (2, 3, 4, 5, 6)  # of the quotas of five deployments
TOKENS: Final = 8_000  # per minute and share
REQUESTS: Final = 30
PROCESSES: Final = 4
CALLS: Final = 110  # of each process: about 2.2 minutes of the quotas
CONCURRENCY: Final = 12  # of each process
SETTLED: Final = 65.0  # seconds after which refusals count as late
FULL_WINDOWS: Final = 2  # minutes in which there is more to send than the quotas allow


class Outcome(NamedTuple):
    """What one library did."""

    name: str
    over: int
    refused: int
    late: int
    failed: int
    idle: float
    seconds: float


class CountingProvider(TokenProvider):
    """A provider that notes when it refused."""

    refusals: list[float]

    async def _answer(self, body: dict[str, object]) -> tuple[str, dict[str, object], list[str]]:
        before = self.refused
        found = await super()._answer(body)
        if self.refused > before and found[0].startswith("429"):
            self.refusals.append(time.monotonic())
        return found


def make_providers() -> list[CountingProvider]:
    """Create the deployments."""
    found = []
    for share in SHARES:
        provider = CountingProvider(REQUESTS * share, TOKENS * share, seed=share)
        provider.refusals = []
        found.append(provider)
    return found


async def run(name: str, python: str, store: str, stall: float) -> Outcome:
    """Let the processes of one library send all calls."""
    providers = make_providers()
    urls = [f"http://127.0.0.1:{await provider.start()}" for provider in providers]
    quotas = [f"{url},{each.requests},{each.tokens}" for url, each in zip(urls, providers, strict=True)]
    command = [python, str(CLIENTS), name, store, str(CALLS), str(CONCURRENCY), str(stall), *quotas]
    begun = time.monotonic()
    processes = [
        await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
        for _ in range(PROCESSES)
    ]
    printed = await asyncio.gather(*(process.communicate() for process in processes))
    for provider in providers:
        provider.close()
    for process, (_, errors) in zip(processes, printed, strict=True):
        if process.returncode:
            raise SystemExit(f"{name} failed: {errors.decode()[-2000:]}")
    told = [json.loads(out.splitlines()[-1]) for out, _ in printed]
    first = min(provider.calls[0].at for provider in providers if provider.calls)
    used = sum(provider.used(first, first + FULL_WINDOWS * PERIOD) for provider in providers)
    over = sum(max(0, provider.largest_window() - provider.tokens) for provider in providers)
    late = sum(at - begun > SETTLED for provider in providers for at in provider.refusals)
    idle = 1 - used / (FULL_WINDOWS * sum(provider.tokens for provider in providers))
    refused = sum(provider.refused for provider in providers)
    return Outcome(
        name, over, refused, late, sum(each["failed"] for each in told), idle, max(each["seconds"] for each in told)
    )


async def run_all(litellm: str | None, store: str, stall: float) -> list[Outcome]:
    """Run both at the same time, or tidegate only."""
    runs = [run("tidegate", sys.executable, store, stall)]
    if litellm is not None:
        runs.append(run("litellm", litellm, store, stall))
    return list(await asyncio.gather(*runs))


def main() -> None:
    """Install, run and print a table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--litellm", help="a Python that has litellm; by default one is installed")
    options.add_argument("--no-litellm", action="store_true", help="run tidegate only")
    options.add_argument("--store", choices=("sqlite", "valkey", "postgres"), default="sqlite", help="of tidegate")
    options.add_argument("--stall", type=float, default=0.0, help="seconds for which the first calls block; default 0")
    chosen = options.parse_args()
    python: str | None = chosen.litellm
    with tempfile.TemporaryDirectory() as folder, chosen_store(chosen.store, folder) as store:
        if chosen.no_litellm:
            python = None
        elif python is None:
            python = f"{folder}/litellm/bin/python"
            subprocess.run([sys.executable, "-m", "venv", f"{folder}/litellm"], check=True)  # noqa: S603 - our own program
            subprocess.run([python, "-m", "pip", "install", "--quiet", LITELLM], check=True)  # noqa: S603 - as above
        outcomes = asyncio.run(run_all(python, store, chosen.stall))
    print("| library | tokens over the quotas | refused | refused after 65 s | failed calls | quotas idle | time |")
    print("|---|---|---|---|---|---|---|")
    for name, over, refused, late, failed, idle, seconds in outcomes:
        print(f"| {name} | {over:,} | {refused} | {late} | {failed} | {idle:.1%} | {seconds:.0f} s |")


if __name__ == "__main__":
    main()
