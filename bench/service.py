"""Compare the decision service with its HTTP server and an empty handler, in turns, in one run.

    python -m bench.service [--quick] [--only process|http|grpc|keys] [--json FILE]

In process: microseconds per decision of the whole application, without a server. Over HTTP: wrk with 64 connections to
one process each; the bare servers answer the same request with an empty handler. Batches hold 100 keys and are answered
in full. Without wrk, nothing is measured over HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
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
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.servers.valkey import ValkeyServer  # noqa: E402 - needs the path above

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CONNECTIONS: Final = 64
BATCH: Final = 100
SINGLE: Final = json.dumps({"policy": "api", "key": "user:42"})
MANY: Final = json.dumps({"policy": "api", "keys": [f"user:{number}" for number in range(BATCH)]})
POLICIES: Final = "policies: {api: 1000000000/1m}\n"
SHARE: Final = 0.7
SERVERS: Final = ("uvicorn-bare", "granian-bare", "uvicorn-h11-bare", "tidegate", "tidegate-redis-leased")
TARGETS: Final = (
    ("single, at least 0.7 of the bare server", "tidegate", "uvicorn-bare", SHARE),
    ("batches of 100, at least 300,000 decisions/s", "tidegate-batch", None, 300_000.0),
)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description="Measure the decision service.")
    parser.add_argument("--quick", action="store_true", help="a few rounds only")
    parser.add_argument("--only", choices=["process", "http", "grpc", "keys"], help="one part only")
    parser.add_argument("--json", type=Path, help="keep the results in this file")
    options = parser.parse_args()
    rounds, seconds = (2, 2) if options.quick else (5, 4)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "process": lambda: in_process(rounds * 8),
        "http": lambda: over_http(rounds, seconds),
        "grpc": lambda: over_grpc(rounds, seconds),
        "keys": many_keys,
    }
    results = {name: part() for name, part in parts.items() if options.only in (None, name)}
    if "http" in results:
        judge(results["http"])
    if options.json:
        options.json.write_text(json.dumps(results, indent=2), encoding="utf-8")


# ---- in process ------------------------------------------------------------------------------------------------------


def in_process(rounds: int) -> dict[str, Any]:
    """Time the application itself."""
    found = asyncio.run(_in_process(rounds))
    for name, nanos in found.items():
        print(f"in process  {name:<16} {nanos / 1000:8.2f} µs per decision  {1e9 / nanos:12,.0f}/s")
    return found


async def _in_process(rounds: int) -> dict[str, float]:
    from tidegate.service.config.settings import load_settings  # noqa: PLC0415 - as above
    from tidegate.service.decisions.decider import Decider  # noqa: PLC0415 - after the path is known
    from tidegate.service.http import App  # noqa: PLC0415 - as above
    from tidegate.stores import MemoryStore  # noqa: PLC0415 - as above

    settings = load_settings({"policies": {"api": "1000000000/1m"}})
    app = App(Decider(settings.policies, MemoryStore()), settings)
    asks = json.dumps({"asks": [{"policy": "api", "key": f"user:{number}"} for number in range(BATCH)]})
    cases = {
        "single": ("acquire", SINGLE, 1),
        "batch, keys": ("batch", MANY, BATCH),
        "batch, asks": ("batch", asks, BATCH),
    }
    best = dict.fromkeys(cases, 1e12)
    for _ in range(rounds):
        for name, (verb, body, count) in cases.items():
            calls = max(1, 2000 // count)
            start = time.process_time_ns()
            for _ in range(calls):
                await _call(app, f"/v1/{verb}", body.encode())
            best[name] = min(best[name], (time.process_time_ns() - start) / calls / count)
    return best


async def _call(app: Any, path: str, body: bytes) -> None:  # noqa: ANN401 - an application
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message.get("status", 200) != 200:
            raise RuntimeError(message)

    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    await app(scope, receive, send)


# ---- over HTTP -------------------------------------------------------------------------------------------------------

BARE: Final = """\
import asyncio, sys
START = {"type": "http.response.start", "status": 200,
         "headers": [(b"content-type", b"application/json"), (b"content-length", b"2")]}
BODY = {"type": "http.response.body", "body": b"{}"}
async def app(scope, receive, send):
    await receive()
    await send(START)
    await send(BODY)
kind, port = sys.argv[1], int(sys.argv[2])
if kind == "granian-bare":
    from granian.constants import Interfaces
    from granian.server.embed import Server
    async def main():
        await Server(app, port=port, interface=Interfaces.ASGINL, log_enabled=False, websockets=False).serve()
    asyncio.run(main())
else:
    import uvicorn
    fast = kind == "uvicorn-bare"
    uvicorn.run(app, port=port, lifespan="off", access_log=False, log_level="error",
                http="httptools" if fast else "h11", loop="uvloop" if fast else "asyncio")
"""


def over_http(rounds: int, seconds: int) -> dict[str, Any]:
    """Measure with wrk, all servers in turns."""
    if shutil.which("wrk") is None:
        print("wrk is not installed: nothing measured over HTTP")
        return {}
    rates: dict[str, list[float]] = {}
    tails: dict[str, list[float]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "bare.py").write_text(BARE, encoding="utf-8")
        redis = stack.enter_context(ValkeyServer()).url
        ports = {name: stack.enter_context(running(command(name, folder, redis))) for name in SERVERS}
        cases = [(name, ports[name], SINGLE, "acquire", 1) for name in ports]
        cases += [(f"{name}-batch", ports[name], MANY, "batch", BATCH) for name in ports if name.startswith("tidegate")]
        for _, port, body, verb, _ in cases:
            warm_up(port, body, verb)
        for _ in range(rounds):
            for name, port, body, verb, count in cases:
                rate, tail = wrk(folder, port, body, verb, seconds)
                rates.setdefault(name, []).append(rate * count)
                tails.setdefault(name, []).append(tail)
    for name, each in rates.items():
        print(f"HTTP        {name:<24} {median(each):12,.0f} decisions/s  p99 {median(tails[name]):8.2f} ms")
    return {name: median(each) for name, each in rates.items()}


def command(name: str, folder: Path, redis: str) -> Callable[[int], list[str]]:
    """Word how a server is started on a port."""
    if not name.startswith("tidegate"):
        return lambda port: [sys.executable, str(folder / "bare.py"), name, str(port)]
    config = folder / f"{name}.yaml"
    leased = f"store: {redis}\nlease: true\n" if "leased" in name else ""
    config.write_text(leased + POLICIES, encoding="utf-8")
    return lambda port: [sys.executable, "-m", "tidegate", "start", str(config), "--listen", f"127.0.0.1:{port}"]


@contextmanager
def running(start: Callable[[int], list[str]]) -> Iterator[int]:
    """Run a server on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    path = os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    process = subprocess.Popen(  # noqa: S603 - our own servers
        start(port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path}
    )
    try:
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(15)


def warm_up(port: int, body: str, verb: str) -> None:
    """Make a few calls, so that leases exist and the code is warm."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    for _ in range(20):
        connection.request("POST", f"/v1/{verb}", body, {"Content-Type": "application/json"})
        connection.getresponse().read()
    connection.close()


def wrk(folder: Path, port: int, body: str, verb: str, seconds: int) -> tuple[float, float]:
    """Load one server; gives requests a second, and the 99th percentile in milliseconds."""
    script = folder / f"{verb}.lua"
    script.write_text(
        f"wrk.method='POST'; wrk.body=[==[{body}]==]; wrk.headers['Content-Type']='application/json'\n",
        encoding="utf-8",
    )
    words = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}", "--latency", "-s", str(script)]
    said = subprocess.run(  # noqa: S603 - wrk, with our words
        [*words, f"http://127.0.0.1:{port}/v1/{verb}"], capture_output=True, text=True, check=True
    ).stdout
    if "Non-2xx" in said:
        raise RuntimeError(said)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", said)
    tail = re.search(r"99%\s+([\d.]+)(us|ms|s)", said)
    if rate is None or tail is None:
        raise RuntimeError(said)
    return float(rate[1]), float(tail[1]) * {"us": 0.001, "ms": 1.0, "s": 1000.0}[tail[2]]


def judge(rates: dict[str, float]) -> None:
    """Say which targets are met."""
    for about, ours, bare, target in TARGETS:
        if ours not in rates:
            continue
        figure = rates[ours] if bare is None else rates[ours] / rates[bare]
        print(f"{'met   ' if figure >= target else 'MISSED'} {about}: {figure:,.2f}")


# ---- over gRPC -------------------------------------------------------------------------------------------------------


def over_grpc(rounds: int, seconds: int) -> dict[str, Any]:
    """Compare ShouldRateLimit with a bare grpc.aio server: all are Python, the client in this process."""
    rates: dict[str, list[float]] = {"tidegate": [], "grpc-bare": []}
    tails: dict[str, list[float]] = {"tidegate": [], "grpc-bare": []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "bare.py").write_text(BARE_GRPC, encoding="utf-8")
        config = folder / "service.yaml"
        config.write_text(
            "domains: [{domain: edge, descriptors: [{key: ip, limits: 1000000000/1m}]}]\n", encoding="utf-8"
        )
        ours = [sys.executable, "-m", "tidegate", "start", str(config), "--listen", "127.0.0.1:0", "--grpc"]
        bare = [sys.executable, str(folder / "bare.py")]
        ports = {
            "tidegate": stack.enter_context(running(lambda port: [*ours, f"127.0.0.1:{port}"])),
            "grpc-bare": stack.enter_context(running(lambda port: [*bare, str(port)])),
        }
        for _ in range(rounds):
            for name, port in ports.items():
                rate, tail = asyncio.run(_grpc_load(port, seconds))
                rates[name].append(rate)
                tails[name].append(tail)
    found = {name: median(each) for name, each in rates.items()}
    for name, rate in found.items():
        print(f"gRPC        {name:<24} {rate:12,.0f} decisions/s  p99 {median(tails[name]):8.2f} ms, client in Python")
    figure = found["tidegate"] / found["grpc-bare"]
    print(f"{'met   ' if figure >= SHARE else 'MISSED'} gRPC, at least 0.7 of the bare server: {figure:.2f}")
    return found


BARE_GRPC: Final = """\
import asyncio, sys
import grpc
async def answer(request, context):
    return b"\\x08\\x01"
async def main():
    server = grpc.aio.server()
    handlers = {"ShouldRateLimit": grpc.unary_unary_rpc_method_handler(answer)}
    service = "envoy.service.ratelimit.v3.RateLimitService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
    await server.start()
    await server.wait_for_termination()
asyncio.run(main())
"""


async def _grpc_load(port: int, seconds: int) -> tuple[float, float]:
    import grpc  # type: ignore[import-untyped]  # noqa: PLC0415 - it has no types; only this part needs it

    from tidegate.service.envoy.messages import METHOD, SERVICE, message_classes  # noqa: PLC0415 - as above

    request = message_classes()["RateLimitRequest"](domain="edge")
    request.descriptors.add().entries.add(key="ip", value="203.0.113.9")
    body = request.SerializeToString()
    times: list[float] = []
    end = time.monotonic() + seconds
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(f"/{SERVICE}/{METHOD}")

        async def ask() -> None:
            while (before := time.monotonic()) < end:
                await call(body)
                times.append(time.monotonic() - before)

        await asyncio.gather(*(ask() for _ in range(CONNECTIONS)))
    return len(times) / seconds, quantiles(times, n=100)[98] * 1000


# ---- memory ----------------------------------------------------------------------------------------------------------


def many_keys(count: int = 1_000_000) -> dict[str, Any]:
    """Tell how large the service is after a million keys."""
    with tempfile.TemporaryDirectory() as name:
        config = Path(name) / "service.yaml"
        config.write_text("store: memory://?max_entries=2000000\npolicies: {api: 100/1h}\n", encoding="utf-8")
        process = subprocess.Popen(  # noqa: S603 - our own server
            [sys.executable, "-m", "tidegate", "start", "--json", str(config), "--listen", "127.0.0.1:0"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip
        start = time.monotonic()
        output: Any = process.stdout
        url = json.loads(output.readline())["http"]
        ready = time.monotonic() - start
        before = resident(process.pid)
        from tidegate.service.client.client import Client  # noqa: PLC0415 - after the path is known

        with Client(url) as client:
            for first in range(0, count, 1000):
                client.batch([("api", f"user:{number}") for number in range(first, first + 1000)])
        after = resident(process.pid)
        process.send_signal(signal.SIGTERM)
        process.wait(15)
        output.close()
    print(f"memory      {before:.0f} MB at the start, {after:.0f} MB after {count:,} keys; ready in {ready:.2f} s")
    return {"before": before, "after": after, "ready": ready}


def resident(pid: int) -> float:
    """Read how much memory a process holds, in MB."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    found = re.search(r"VmRSS:\s+(\d+) kB", text)
    return int(found[1]) / 1024 if found else 0.0


if __name__ == "__main__":
    main()
