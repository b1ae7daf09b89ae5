"""Compare libraries that keep calls to a language model within a quota, over real HTTP.

python -m bench.token_limiters            about four minutes, and the installation of the libraries
python -m bench.token_limiters --keep DIR    reuse the environments in a folder

The libraries run at the same time, each with a process of its own and against a provider of its own (`token_provider`)
on the loopback interface. Their environments are temporary: REQUIREMENTS lists them. token-throttle needs Python 3.12.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from bench.token_provider import PERIOD, TokenProvider

ROOT: Final = Path(__file__).parent.parent
CLIENTS: Final = Path(__file__).parent / "token_clients.py"
REQUIREMENTS: Final = {
    "openai": ["openai==3.49.0", "token-throttle==10.1.0", f"{ROOT}[httpx2]"],
    "litellm": ["litellm==1.106.2"],  # needs another version of openai
}
CONTENDERS: Final = {"tidegate": "openai", "token-throttle": "openai", "litellm": "litellm", "plain": "openai"}
CALLS: Final = 200
CONCURRENCY: Final = 32
REQUESTS: Final = 300  # per minute
TOKENS: Final = 60_000  # per minute: about 75 calls
FULL_WINDOWS: Final = 2  # minutes in which there is more to send than the quota allows


class Outcome(NamedTuple):
    """What one library did."""

    name: str
    over: int
    refused: int
    failed: int
    idle: float
    seconds: float


def install(folder: Path) -> None:
    """Create the environments that do not exist yet."""
    python = subprocess.run([ROOT / "tools/find-python", "3.12"], check=True, capture_output=True, text=True)  # noqa: S603 - our own program
    for name, requirements in REQUIREMENTS.items():
        if not (folder / name).exists():
            print(f"installing {name}: {', '.join(requirements)}")
            subprocess.run([python.stdout.strip(), "-m", "venv", folder / name], check=True)  # noqa: S603 - as above
            command = [folder / name / "bin/python", "-m", "pip", "install", "--quiet", *requirements]
            subprocess.run(command, check=True)  # noqa: S603 - as above


async def run(name: str, environment: Path) -> Outcome:
    """Let one library send all calls to a provider of its own."""
    provider = TokenProvider(REQUESTS, TOKENS)
    url = f"http://127.0.0.1:{await provider.start()}/v1"
    numbers = map(str, (CALLS, CONCURRENCY, REQUESTS, TOKENS))
    command = [str(environment / "bin/python"), str(CLIENTS), name, url, *numbers]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    printed, errors = await process.communicate()
    provider.close()
    if process.returncode:
        raise SystemExit(f"{name} failed: {errors.decode()[-2000:]}")
    told = json.loads(printed.splitlines()[-1])
    first = provider.calls[0].at
    used = provider.used(first, first + FULL_WINDOWS * PERIOD)
    over = max(0, provider.largest_window() - TOKENS)
    idle = max(0.0, 1 - used / (FULL_WINDOWS * TOKENS))
    return Outcome(name, over, provider.refused, told["failed"], idle, told["seconds"])


async def run_all(folder: Path) -> list[Outcome]:
    """Run the libraries at the same time."""
    return list(await asyncio.gather(*(run(name, folder / kind) for name, kind in CONTENDERS.items())))


def main() -> None:
    """Install, run and print a table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--keep", type=Path, help="folder of the environments, which are not removed")
    kept = options.parse_args().keep
    with tempfile.TemporaryDirectory() as temporary:
        folder = kept or Path(temporary)
        folder.mkdir(exist_ok=True)
        install(folder)
        outcomes = asyncio.run(run_all(folder))
    print("| library | tokens over the quota | refused by the provider | failed calls | quota idle | time to finish |")
    print("|---|---|---|---|---|---|")
    for name, over, refused, failed, idle, seconds in outcomes:
        print(f"| {name} | {over:,} | {refused} | {failed} | {idle:.1%} | {seconds:.0f} s |")


if __name__ == "__main__":
    main()
