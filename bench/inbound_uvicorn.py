"""Measure what the middleware and one route limit cost under uvicorn: the server's processor time per request.

    python -m bench.inbound_uvicorn [--rounds 5] [--requests 20000]

Each site runs in a uvicorn process of its own (uvloop, httptools): the bare application, the application behind a
middleware that does nothing, behind one that adds three constant header fields (the floor of any limiter that writes
headers), with a category, and with a category and a route limit that are decided together. One client sends the same
requests to each in turns, over eight connections that are kept open. A ratio is the bare application's processor time
divided by the site's: 0.85 means that the site serves 85 % of the requests.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from bench.inbound_one_decision import CONFIG, ConstantAsgi, NothingAsgi, starlette_site  # noqa: E402 - after the path to it is known
from bench.inbound_sites import PATH  # noqa: E402 - as above
from tests.servers.process import until  # noqa: E402 - as above
from tidegate.inbound import asgi  # noqa: E402 - as above

if TYPE_CHECKING:
    from collections.abc import Iterator

SITES: Final = ("bare", "nothing", "constant", "category", "both")
CONNECTIONS: Final = 8
REQUEST: Final = f"GET {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: bench\r\nAccept: */*\r\n\r\n".encode()
END: Final = b"hello"  # of a response


def app() -> Any:  # noqa: ANN401 - an application
    """Build the site that the environment names; called by uvicorn."""
    name = os.environ["BENCH_SITE"]
    site = starlette_site(limited=name == "both")
    if name in ("category", "both"):
        return asgi.RateLimitMiddleware(site, CONFIG)
    return {"nothing": NothingAsgi, "constant": ConstantAsgi}[name](site) if name != "bare" else site


@contextmanager
def serving(name: str) -> Iterator[tuple[int, int]]:
    """Serve a site by uvicorn; yields the process id and the port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    words = ["-m", "uvicorn", "--factory", "bench.inbound_uvicorn:app", "--port", str(port), "--no-access-log"]
    environment = {**os.environ, "BENCH_SITE": name}
    process = subprocess.Popen([sys.executable, *words, "--log-level", "critical"], cwd=ROOT, env=environment)  # noqa: S603 - our own words
    try:
        until(lambda: is_open(port), f"uvicorn with {name}")
        yield process.pid, port
    finally:
        process.terminate()
        process.wait(10)


def is_open(port: int) -> bool:
    """Return whether something listens on a port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process with one thread has used."""
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[0]) / 1e9


async def send(port: int, count: int) -> None:
    """Send requests over one connection, one after another."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(count):
        writer.write(REQUEST)
        await reader.readuntil(END)
    writer.close()


async def load(port: int, requests: int) -> None:
    """Send all requests of a round."""
    await asyncio.gather(*(send(port, requests // CONNECTIONS) for _ in range(CONNECTIONS)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure the middleware under uvicorn.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=20_000)
    options = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in SITES}
    with ExitStack() as stack:
        servers = {name: stack.enter_context(serving(name)) for name in SITES}
        for turn in range(options.rounds + 1):
            for name, (pid, port) in servers.items():
                before = processor_seconds(pid)
                asyncio.run(load(port, options.requests if turn else options.requests // 10))
                if turn:  # the first warms up
                    times[name].append((processor_seconds(pid) - before) / options.requests * 1e6)
    for name, some in times.items():
        ratios = [bare / taken for bare, taken in zip(times["bare"], some, strict=True)]
        print(f"{name:10} median {median(some):6.1f} µs  best {min(some):6.1f} µs  of bare {median(ratios):.2f}")


if __name__ == "__main__":
    main()
