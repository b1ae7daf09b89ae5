"""Compare inbound limiters: the same page without a limiter, with tidegate and with others, interleaved in one run.

    python -m bench.inbound [--quick] [--only process|server] [--json FILE]

In process: microseconds per call of the whole application, ours and theirs in turns, best and median of many slices.
Under uvicorn (uvloop, httptools; one process each) with wrk: requests a second of the server's own time, in turns, the
median of the rounds. A server is bound by its processor time, so that is its rate on a machine that does nothing else;
what wrk counted on this one stands beside it.
Leased stores are a SQLite file and a throw-away Valkey. A library that is not installed is named and left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from bench.inbound_sites import ASGI, BARE, DENIED, PATH, SITES, WSGI  # noqa: E402 - after the path to it is known

if TYPE_CHECKING:
    from collections.abc import Iterator

SLICE: Final = 200  # calls timed together, by the time that this thread has run
TARGETS: Final = (
    ("in process, ours adds at most 8 µs", "process", "tidegate", "starlette", 8.0),
    ("under uvicorn, ours keeps at least 0.88 of bare", "server", "tidegate", "starlette", 0.88),
    ("under uvicorn, Redis leased keeps at least 0.75", "server", "tidegate-redis-leased", "starlette", 0.75),
    ("denied answers at least 4 x slowapi's", "denied", "tidegate-denied", "slowapi-denied", 4.0),
)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description="Compare inbound limiters.")
    parser.add_argument("--quick", action="store_true", help="a few rounds only")
    parser.add_argument("--only", choices=["process", "server"], help="one half only")
    parser.add_argument("--json", type=Path, help="keep the results in this file")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    results: dict[str, Any] = {}
    with stores():
        if options.only != "server":
            results["process"] = in_process(5 if options.quick else 40)
        if options.only != "process":
            results.update(under_servers(1 if options.quick else 5, 1 if options.quick else 3))
    report(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


@contextmanager
def stores() -> Iterator[None]:
    """Have a SQLite file and a Valkey for leased sites."""
    from tests.servers.valkey import ValkeyServer  # noqa: PLC0415 - needs the server's wheel

    folder = tempfile.mkdtemp(prefix="tidegate-bench-")
    server = ValkeyServer().start()
    os.environ["BENCH_SQLITE"] = f"sqlite:///{folder}/limits.db"
    os.environ["BENCH_REDIS"] = server.url
    try:
        yield
    finally:
        server.close()
        shutil.rmtree(folder, ignore_errors=True)


# ---- in process ------------------------------------------------------------------------------------------------------


def in_process(rounds: int) -> dict[str, dict[str, float]]:
    """Time every site in turns; microseconds per call."""
    loop = asyncio.new_event_loop()
    apps = {name: app for name in (*ASGI, *DENIED, *WSGI) if (app := built(name)) is not None}
    times: dict[str, list[float]] = {name: [] for name in apps}
    for turn in range(rounds + 1):
        for name, app in apps.items():
            taken = plain_slice(app) if name in WSGI else loop.run_until_complete(task_slice(app))
            if turn:  # the first warms up
                times[name].append(taken)
    for name, app in apps.items():
        if name not in WSGI and hasattr(app, "close"):
            loop.run_until_complete(app.close())
    loop.close()
    return {name: {"best": min(some), "median": median(some)} for name, some in times.items()}


def built(name: str) -> Any:  # noqa: ANN401 - an application
    """Build a site, if what it needs is installed."""
    try:
        return SITES[name]()
    except ImportError as error:
        print(f"  {name} is not measured: {error}")
        return None


HEADERS: Final = [
    (b"host", b"127.0.0.1"), (b"user-agent", b"bench"), (b"accept", b"*/*"), (b"accept-encoding", b"gzip"),
    (b"connection", b"keep-alive"), (b"cookie", b"a=b"),
]  # fmt: skip


async def task_slice(app: Any) -> float:  # noqa: ANN401 - an application
    """Time calls of an ASGI application."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: dict[str, Any]) -> None:
        pass

    scopes = [
        {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
            "path": PATH, "raw_path": PATH.encode(), "query_string": b"", "root_path": "", "headers": list(HEADERS),
            "client": ("203.0.113.9", 4711), "server": ("127.0.0.1", 80), "state": {},
        }
        for _ in range(SLICE)
    ]  # fmt: skip
    start = time.thread_time_ns()
    for scope in scopes:
        await app(scope, receive, send)
    return (time.thread_time_ns() - start) / SLICE / 1000


def plain_slice(app: Any) -> float:  # noqa: ANN401 - an application
    """Time calls of a WSGI application."""
    environs = [
        {
            "REQUEST_METHOD": "GET", "SCRIPT_NAME": "", "PATH_INFO": PATH, "QUERY_STRING": "", "SERVER_NAME": "x",
            "SERVER_PORT": "80", "SERVER_PROTOCOL": "HTTP/1.1", "HTTP_HOST": "127.0.0.1", "wsgi.url_scheme": "http",
            "REMOTE_ADDR": "203.0.113.9",
        }
        for _ in range(SLICE)
    ]  # fmt: skip

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: object = None) -> None:
        pass

    start = time.thread_time_ns()
    for environ in environs:
        b"".join(app(environ, start_response))
    return (time.thread_time_ns() - start) / SLICE / 1000


# ---- under a server --------------------------------------------------------------------------------------------------


def under_servers(rounds: int, seconds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Let wrk ask every site in turns; requests a second of the server's own time."""
    if shutil.which("wrk") is None:
        print("  wrk is not installed (apt-get install wrk): nothing measured under a server")
        return {}
    with ExitStack() as stack:
        started = {name: stack.enter_context(serving(name)) for name in (*ASGI, *DENIED)}
        servers = {name: server for name, server in started.items() if server}
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
        for turn in range(rounds + 1):
            for name, found in runs.items():
                rates = wrk(*servers[name], seconds if turn else 1)
                if turn:
                    found.append(rates)
    figures = {
        name: {
            "best": max(rate for rate, _ in some),
            "median": median(rate for rate, _ in some),
            "seen": median(seen for _, seen in some),
        }
        for name, some in runs.items()
    }
    return {
        "server": {name: figure for name, figure in figures.items() if name not in DENIED},
        "denied": {name: figure for name, figure in figures.items() if name in DENIED},
    }


@contextmanager
def serving(name: str) -> Iterator[tuple[int, int] | None]:
    """Serve a site by uvicorn, and give its process and port; None: it cannot be."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    words = ["--factory", "bench.inbound_sites:app", "--port", str(port), "--log-level", "critical", "--no-access-log"]
    process = subprocess.Popen(  # noqa: S603 - our own words
        [sys.executable, "-m", "uvicorn", *words, "--no-proxy-headers"],
        cwd=ROOT,
        env={**os.environ, "BENCH_SITE": name, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"},
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield (process.pid, port) if listening(process, port) else None
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)


def listening(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until a server takes connections, or has ended."""
    deadline = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return True
        time.sleep(0.05)
    return False


def wrk(pid: int, port: int, seconds: int) -> tuple[float, float]:
    """Ask as fast as possible over 32 connections; requests a second of the server's time, and of the clock's."""
    words = ["wrk", "-t1", "-c32", f"-d{seconds}s", f"http://127.0.0.1:{port}{PATH}"]
    before = processor_time(pid)
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout  # noqa: S603 - our own words
    used = processor_time(pid) - before
    seen, count = re.search(r"Requests/sec:\s+([0-9.]+)", said), re.search(r"(\d+) requests in", said)
    return (int(count[1]) / used, float(seen[1])) if seen and count and used else (0.0, 0.0)


def processor_time(pid: int) -> float:
    """Tell how many seconds a process has run so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- telling ---------------------------------------------------------------------------------------------------------


def bare_of(name: str) -> str:
    """Name the bare site that a site is compared with."""
    for bare, sites in BARE.items():
        if name in (bare, *sites):
            return bare
    return "starlette"


def report(results: dict[str, Any]) -> None:
    """Print the figures, and which targets they meet."""
    for part, unit in (
        ("process", "µs per call"),
        ("server", "requests/s of processor time"),
        ("denied", "denied answers/s"),
    ):
        if not results.get(part):
            continue
        print(f"\n{unit}, best (median), compared with the site without a limiter")
        for name, figure in results[part].items():
            bare = results[part].get(bare_of(name), figure)
            against = figure["best"] - bare["best"] if part == "process" else figure["median"] / bare["median"]
            told = f"{against:+8.1f} µs" if part == "process" else f"{against:8.2f}"
            told = "" if part == "denied" or name == bare_of(name) else told
            seen = f"   seen {figure['seen']:,.0f}" if "seen" in figure else ""
            print(f"  {name:24} {figure['best']:12,.1f} ({figure['median']:,.1f})  {told}{seen}")
    print("\ntargets")
    for target, part, ours, other, wanted in TARGETS:
        figures = results.get(part, {})
        if ours not in figures or other not in figures:
            continue
        if part == "process":
            value = figures[ours]["best"] - figures[other]["best"]
            met = value <= wanted
        else:
            value = figures[ours]["median"] / figures[other]["median"]
            met = value >= wanted
        print(f"  {'met    ' if met else 'NOT MET'}  {target}: {value:.2f}")


if __name__ == "__main__":
    main()
