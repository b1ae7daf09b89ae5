"""Drives the code that enforces limits, and a replay of the log of it, with the same requests in virtual time."""

from __future__ import annotations

import asyncio
import heapq
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import httpx

from tidegate.errors import Denied
from tidegate.inbound.asgi import RateLimitMiddleware as AsgiMiddleware
from tidegate.inbound.wsgi import RateLimitMiddleware as WsgiMiddleware
from tidegate.outbound.httpx import RateLimitTransport
from tidegate.plan._logs.stream import LogStream
from tidegate.plan._replay import Replay, Replays
from tidegate.service._config.settings import load_settings
from tidegate.service._decisions.decider import Decider, Subject
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

if TYPE_CHECKING:
    from tidegate.plan._logs.formats import LogOptions

START = 1_790_000_000_000  # milliseconds
LOG_FORMAT = '$remote_addr [$msec] "$request" $status $request_time "$http_x_forwarded_for"'


class Call(NamedTuple):
    """A request: when it arrives and how long it takes (in milliseconds), from whom, for what, its status."""

    at: int
    took: int = 0
    peer: str = "203.0.113.1"
    method: str = "GET"
    target: str = "/"
    status: int = 200
    forwarded: str = "-"


def line_of(call: Call) -> str:
    """Return the line that nginx writes when the request has ended."""
    ended = START + call.at + call.took
    return (
        f'{call.peer} [{ended // 1000}.{ended % 1000:03}] "{call.method} {call.target} HTTP/1.1" {call.status} '
        f'{call.took // 1000}.{call.took % 1000:03} "{call.forwarded}"\n'
    )


def write_log(path: Any, calls: list[Call]) -> Any:
    """Write the log of calls in the order in which they ended."""
    ended = sorted(calls, key=lambda call: call.at + call.took)
    path.write_text("".join(map(line_of, ended)), encoding="utf-8")
    return path


def replay_outcomes(paths: list[Any], rules: Any, options: LogOptions) -> list[bool]:
    """Return whether each request of logs would have been allowed, in the order of time."""
    replay = Replay(rules)
    found = []
    for rows in LogStream(paths, options).read(Replays([replay])):
        found += [replay.decide(row).allowed for row in rows]
    replay.finish()
    return found


def drive_wsgi(calls: list[Call], config: Any, **options: Any) -> list[bool]:
    """Send calls through a WSGI middleware, whose application answers when the request ends."""
    clock = ManualClock(START / 1000)
    current: dict[str, int] = {}

    def app(environ: Any, start: Any) -> Any:
        status = environ["test.status"]
        start(f"{status} X", [])
        yield b""

    middleware = WsgiMiddleware(app, config, clock=clock, admin=False, **options)
    open_bodies: list[tuple[int, int, Any]] = []
    order = count()
    found = []

    def end_until(instant: int) -> None:
        while open_bodies and open_bodies[0][0] <= instant:
            ends, _, body = heapq.heappop(open_bodies)
            clock.advance((START + ends - clock.steady() // 1000) / 1000)
            list(body)
            body.close()

    for call in sorted(calls, key=lambda call: call.at):
        end_until(call.at)
        clock.advance((START + call.at - clock.steady() // 1000) / 1000)
        environ = {
            "REQUEST_METHOD": call.method,
            "PATH_INFO": unquote(call.target.partition("?")[0]),
            "REMOTE_ADDR": call.peer,
            "test.status": call.status,
        }
        if call.forwarded != "-":
            environ["HTTP_X_FORWARDED_FOR"] = call.forwarded
        current.clear()
        body = middleware(environ, lambda status, _headers, _info=None: current.update(status=int(status[:3])))
        denied = current.get("status") == 429  # the application has not started its response yet
        found.append(not denied)
        if not denied and hasattr(body, "close"):
            heapq.heappush(open_bodies, (call.at + call.took, next(order), body))
    end_until(1 << 60)
    middleware.close()
    return found


def drive_asgi(calls: list[Call], config: Any, **options: Any) -> list[bool]:
    """Send calls that take no time through an ASGI middleware."""
    clock = ManualClock(START / 1000)

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": scope["test.status"], "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def drive() -> list[bool]:
        middleware = AsgiMiddleware(app, config, clock=clock, admin=False, **options)
        found = []
        for call in sorted(calls, key=lambda call: call.at):
            clock.advance((START + call.at - clock.steady() // 1000) / 1000)
            headers = [] if call.forwarded == "-" else [(b"x-forwarded-for", call.forwarded.encode())]
            scope = {
                "type": "http",
                "method": call.method,
                "path": unquote(call.target.partition("?")[0]),
                "headers": headers,
                "client": (call.peer, 1),
                "test.status": call.status,
            }
            statuses: list[int] = []

            async def send(message: Any, statuses: list[int] = statuses) -> None:
                statuses += [message["status"]] if message["type"] == "http.response.start" else []

            await middleware(scope, None, send)
            found.append(statuses[0] != 429)
        await middleware.close()
        return found

    return asyncio.run(drive())


def drive_service(calls: list[tuple[int, str, str, int]], policies: Any) -> list[bool]:
    """Ask the decider of a service: (milliseconds, policy, key, cost)."""
    clock = ManualClock(START / 1000)

    async def drive() -> list[bool]:
        decider = Decider(load_settings({"policies": policies}).policies, MemoryStore(clock=clock), secrets=("s" * 20,))
        found = []
        for at, policy, key, cost in calls:
            clock.advance((START + at - clock.steady() // 1000) / 1000)
            result = await decider.acquire(Subject(policy, key), cost)
            found.append(result is None or result.allowed)
        await decider.close()
        return found

    return asyncio.run(drive())


def drive_transport(calls: list[Call], providers: Any) -> list[bool]:
    """Send calls with httpx through a transport that does not wait."""
    clock = ManualClock(START / 1000)
    inner = httpx.MockTransport(lambda _request: httpx.Response(200))
    transport = RateLimitTransport(providers, MemoryStore(clock=clock), inner, timeout=0)
    found = []
    with httpx.Client(transport=transport) as client:
        for call in calls:
            clock.advance((START + call.at - clock.steady() // 1000) / 1000)
            try:
                client.request(call.method, call.target)
                found.append(True)
            except Denied:
                found.append(False)
    return found
