"""A small HTTP server that enforces a limit of its own and counts what it really received.

It counts exactly, over any window: a request is let through if fewer than `limit` others were within `period` before
it. It runs on a thread of its own with its own event loop, on a free loopback port.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from tests.servers.thread import ThreadServer

if TYPE_CHECKING:
    import ssl

REASONS = {200: "OK", 302: "Found", 404: "Not Found", 429: "Too Many Requests", 503: "Service Unavailable"}


class Request(NamedTuple):
    """A received request, with its time by the server's clock."""

    at: float
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Answer(NamedTuple):
    """A response to send: pieces are sent one after another, chunked if there are several."""

    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    pieces: tuple[bytes, ...] = (b"ok",)


Respond = Callable[[Request], Answer]


class QuotaServer(ThreadServer):
    """One server. A context manager that leaves nothing behind."""

    def __init__(
        self,
        limit: int = 2**31,
        period: float = 1.0,
        respond: Respond | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Allow so many requests per period; `respond` answers what is let through."""
        super().__init__()
        self.tls = tls
        self.limit = limit
        self.period = period
        self.respond = respond or (lambda _request: Answer())
        self.requests: list[Request] = []
        self.statuses: Counter[int] = Counter()
        self.let_through: list[float] = []
        self._recent: deque[float] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    def most_within(self, period: float) -> int:
        """Tell the largest number of received requests within any window of a length."""
        times, first, most = sorted(request.at for request in self.requests), 0, 0
        for last, instant in enumerate(times):
            while instant - times[first] >= period:
                first += 1
            most = max(most, last - first + 1)
        return most

    # ---- serving -----------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=1000, ssl=self.tls)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        await self._settle()  # a connection that was just accepted becomes a task
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._settle()

    @staticmethod
    async def _settle() -> None:
        """Let the loop do what it has begun, such as closing sockets."""
        for _ in range(5):
            await asyncio.sleep(0)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        line, *fields = head.decode("latin-1").split("\r\n")
        method, path, _ = line.split(" ", 2)
        headers = {
            name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields if field)
        }
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        request = Request(time.monotonic(), method, path, headers, body)
        self.requests.append(request)
        answer = self._judge(request)
        self.statuses[answer.status] += 1
        writer.write(self._head(answer))
        if len(answer.pieces) == 1:
            writer.write(answer.pieces[0])
        else:
            for piece in answer.pieces:
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
                await asyncio.sleep(0)
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    def _judge(self, request: Request) -> Answer:
        while self._recent and request.at - self._recent[0] >= self.period:
            self._recent.popleft()
        if len(self._recent) >= self.limit:
            return self.refuse(request)
        self._recent.append(request.at)
        self.let_through.append(request.at)
        return self.respond(request)

    def refuse(self, _request: Request) -> Answer:
        """Answer a request that exceeds the limit."""
        return Answer(429, (("Content-Type", "text/plain"),), (b"slow down",))

    @property
    def left(self) -> int:
        """How many more requests it would let through now."""
        return max(0, self.limit - len(self._recent))

    @staticmethod
    def _head(answer: Answer) -> bytes:
        lines = [f"HTTP/1.1 {answer.status} {REASONS.get(answer.status, 'Status')}"]
        lines += [f"{name}: {value}" for name, value in answer.headers]
        whole = len(answer.pieces) == 1
        lines.append(f"Content-Length: {len(answer.pieces[0])}" if whole else "Transfer-Encoding: chunked")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def as_json(value: object) -> Answer:
    """Answer with JSON."""
    return Answer(200, (("Content-Type", "application/json"),), (json.dumps(value).encode(),))
