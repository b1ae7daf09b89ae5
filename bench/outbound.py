"""Measure the cost of a limiter per request: tidegate's transports, plain httpx and requests, and others, in one run.

python -m bench.outbound             under a minute
python -m bench.outbound --quick     a look

A small server of its own process answers on loopback. The contenders take turns in short slices, each with a connection
that stays open, far below their limits, so that nothing waits: what is left is what they add. Shown is the median time
of a request, and how much more that is than the plain client's of the same slice (the median over slices).
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib import import_module, metadata
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tests.outbound.server import QuotaServer

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    Get = Callable[[str], Any]

PLENTY: Final = 2000  # per second: more than one connection can send
SLICE: Final = 40  # requests


class Contender(NamedTuple):
    """Who is measured, against which plain client, and how to open it."""

    name: str
    plain: str
    open: Callable[[ExitStack], Get]


# ---- contenders ------------------------------------------------------------------------------------------------------


def plain_httpx(stack: ExitStack) -> Get:
    """Nothing in between."""
    import httpx  # noqa: PLC0415 - as below: only what is measured is loaded

    return stack.enter_context(httpx.Client()).get


def plain_requests(stack: ExitStack) -> Get:
    """Nothing in between."""
    import requests  # noqa: PLC0415 - as above

    return stack.enter_context(requests.Session()).get


def providers() -> Any:  # noqa: ANN401 - of tidegate
    """Allow plenty."""
    from tidegate.outbound import Providers  # noqa: PLC0415 - as above

    return Providers.of({"domain": "127.0.0.1", "limit": PLENTY, "period": "1s"})


def tidegate_httpx(store: str) -> Callable[[ExitStack], Get]:
    """Ask tidegate, with its state somewhere."""

    def opened(stack: ExitStack) -> Get:
        import httpx  # noqa: PLC0415 - as above

        from tidegate.outbound.httpx import RateLimitTransport  # noqa: PLC0415 - as above

        folder = stack.enter_context(tempfile.TemporaryDirectory())
        transport = RateLimitTransport(providers(), store.format(Path(folder)))
        return stack.enter_context(httpx.Client(transport=transport)).get

    return opened


def tidegate_requests(stack: ExitStack) -> Get:
    """Ask tidegate."""
    import requests  # noqa: PLC0415 - as above

    from tidegate.outbound.requests import RateLimitAdapter  # noqa: PLC0415 - as above

    session = stack.enter_context(requests.Session())
    session.mount("http://", RateLimitAdapter(providers()))
    return session.get


def pyrate_httpx(stack: ExitStack) -> Get:
    """Ask pyrate-limiter's transport."""
    import httpx  # noqa: PLC0415 - as above

    limits = import_module("pyrate_limiter")
    transports = import_module("pyrate_limiter.extras.httpx_limiter")

    limiter = limits.Limiter(limits.Rate(PLENTY, limits.Duration.SECOND))
    transport = transports.RateLimiterTransport(limiter=limiter)
    return stack.enter_context(httpx.Client(transport=transport)).get


def pyrate_requests(stack: ExitStack) -> Get:
    """Ask requests-ratelimiter, which asks pyrate-limiter."""
    sessions = import_module("requests_ratelimiter")
    get: Get = stack.enter_context(sessions.LimiterSession(per_second=PLENTY)).get
    return get


CONTENDERS: Final = (
    Contender("httpx", "httpx", plain_httpx),
    Contender("httpx + tidegate, memory", "httpx", tidegate_httpx("memory://")),
    Contender("httpx + tidegate, sqlite", "httpx", tidegate_httpx("sqlite:///{}/quota.db")),
    Contender("httpx + pyrate-limiter, memory", "httpx", pyrate_httpx),
    Contender("requests", "requests", plain_requests),
    Contender("requests + tidegate, memory", "requests", tidegate_requests),
    Contender("requests + requests-ratelimiter", "requests", pyrate_requests),
)


# ---- measuring -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer slices")
    rounds = 15 if options.parse_args().quick else 80
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,))
    server.start()
    try:
        report(measure(ours.recv(), rounds))
    finally:
        ours.send("stop")
        server.join()


def serve(pipe: Connection) -> None:
    """Be the server, until told to stop."""
    with QuotaServer() as server:
        pipe.send(server.url)
        pipe.recv()


def measure(url: str, rounds: int) -> dict[str, list[float]]:
    """Let the contenders take turns; give the microseconds per request of each slice."""
    with ExitStack() as stack:
        clients = {each.name: each.open(stack) for each in CONTENDERS}
        times: dict[str, list[float]] = {name: [] for name in clients}
        for number in range(rounds + 1):
            for name, get in clients.items():
                begun = time.perf_counter()
                for _ in range(SLICE):
                    get(url)
                if number:  # the first one connects and imports
                    times[name].append((time.perf_counter() - begun) / SLICE * 1e6)
    return times


def report(times: dict[str, list[float]]) -> None:
    """Print a table."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in
                         ("tidegate", "httpx", "requests", "pyrate-limiter", "requests-ratelimiter"))  # fmt: skip
    print(f"Python {sys.version.split()[0]}; {versions}\n")
    print(f"{'':34} {'µs per request':>15} {'added':>8} {'ratio':>7}")
    for name, plain, _ in CONTENDERS:
        pairs = list(zip(times[name], times[plain], strict=True))
        added, ratio = median(a - b for a, b in pairs), median(a / b for a, b in pairs)
        print(f"{name:34} {median(times[name]):15.0f} {added:8.0f} {ratio:7.2f}")


if __name__ == "__main__":
    main()
