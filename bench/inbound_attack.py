"""Measure how an attack from rotating addresses slows down the requests of a normal client.

    python -m bench.inbound_attack [--addresses 1000000] [--between 50] [--rounds 5]

The processor time of single requests of one client, in process, in four situations that take turns:

    alone       nothing between two requests: every processor cache is warm
    other work  between two requests, as many requests to the same application without the middleware
    known       between two requests, as many requests of 50 known clients
    attack      between two requests, as many requests of addresses that were never seen before

A server does something between two requests of a client, at least the work of the kernel and of the event loop, so
`other work` is the quiet value; `alone` is a loop that no server runs. The table has the median of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import sys
import time
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tidegate.inbound.asgi import RateLimitMiddleware  # noqa: E402 - after the path to it is known

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CONFIG: Final = {"max_entries": 10_000, "categories": {"read": {"limit": 10**9}}}
CLIENT: Final = "203.0.113.9"
KNOWN_CLIENTS: Final = 50
SITUATIONS: Final = ("alone", "other work", "known", "attack")
WARM_UP: Final = 2000  # requests


async def site(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - as ASGI has it
    """Respond with a short text."""
    del scope, receive
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"hello"})


async def request(app: Any, peer: str) -> None:  # noqa: ANN401 - an application
    """Send one request to an application."""
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "path": "/api/feeds",
        "raw_path": b"/api/feeds", "query_string": b"", "root_path": "", "scheme": "http", "headers": [(b"host", b"a")],
        "client": (peer, 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    await app(scope, _receive, _send)


async def _receive() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _send(message: dict[str, Any]) -> None:
    del message


def new_addresses() -> Iterator[str]:
    """Yield IPv4 addresses, each once."""
    for number in range(2**24, 2**32):
        yield f"{number >> 24}.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"


async def measure(app: Any, between: Callable[[], Any], requests: int) -> list[int]:  # noqa: ANN401 - an application
    """Return the processor time of each request of the client, in nanoseconds."""
    times = []
    for _ in range(requests):
        await between()
        start = time.thread_time_ns()
        await request(app, CLIENT)
        times.append(time.thread_time_ns() - start)
    return times


async def run(addresses: int, between: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return p50 and p99 of each situation and round, in microseconds."""
    app, attackers = RateLimitMiddleware(site, CONFIG, log_burst=0), new_addresses()

    async def nothing() -> None:
        pass

    async def other_work() -> None:
        for _ in range(between):
            await request(site, CLIENT)

    async def known_clients() -> None:
        for number in range(between):
            await request(app, f"198.51.100.{number % KNOWN_CLIENTS}")

    async def attack() -> None:
        for _ in range(between):
            await request(app, next(attackers))

    steps = dict(zip(SITUATIONS, (nothing, other_work, known_clients, attack), strict=True))
    requests = max(1000, addresses // between // rounds)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in SITUATIONS}
    await measure(app, nothing, WARM_UP)
    for _ in range(rounds):
        for name, step in steps.items():
            gc.collect()
            ranks = quantiles(await measure(app, step, requests), n=100)
            found[name].append((ranks[49] / 1000, ranks[98] / 1000))
    await app.close()
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--addresses", type=int, default=1_000_000, help="addresses of the attack, in all rounds")
    parser.add_argument("--between", type=int, default=50, help="requests between two requests of the client")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    found = asyncio.run(run(options.addresses, options.between, options.rounds))
    medians = {name: tuple(median(column) for column in zip(*rows, strict=True)) for name, rows in found.items()}
    print(f"{'':12}{'p50 µs':>10}{'p99 µs':>10}{'p99 / other work':>19}{'p99 / alone':>14}")
    for name, (p50, p99) in medians.items():
        ratios = f"{p99 / medians['other work'][1]:19.2f}{p99 / medians['alone'][1]:14.2f}"
        print(f"{name:12}{p50:10.1f}{p99:10.1f}{ratios}")


if __name__ == "__main__":
    main()
