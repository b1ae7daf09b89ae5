"""HTTP/1 connections without sockets: the test controls what a client sends and reads, and when."""

import asyncio
import json
from contextlib import asynccontextmanager

from tests.service.harness import InProcessService
from tidegate.service.http.connections import Connections
from tidegate.service.http.server import HttpServer

READ, IDLE = 100, 300  # seconds, which are ticks
POLICIES = {"api": "100000/1h", "slow": "1/1h"}
GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
OK, HEALTHY = 200, b'{"ok":true}'
HIGH_WATER = 64 * 1024


class ClientTransport(asyncio.Transport):
    """The connection as the client sees it: the bytes that were written, and whether it was closed."""

    def __init__(self, protocol):
        super().__init__()
        self.protocol = protocol
        self.written = bytearray()
        self.unsent = None  # None: the client reads everything at once
        self.state = "open"
        self.eof = self.paused = False
        self._inbox = b""
        protocol.connection_made(self)

    # what the protocol does

    def write(self, data):
        assert not self.eof
        if self.state == "open":
            self.written += data
            if self.unsent is not None:
                self.unsent += len(data)
                if self.unsent > HIGH_WATER:
                    self.protocol.pause_writing()

    def write_eof(self):
        self.eof = True

    def can_write_eof(self):
        return True

    def get_write_buffer_size(self):
        return self.unsent or 0

    def is_closing(self):
        return self.state != "open"

    def close(self):
        if self.state == "open":
            self.state = "closing"
            if not self.unsent:
                self._lose(None)

    def abort(self):
        if self.state != "closed":
            self._lose(None)

    def pause_reading(self):
        self.paused = True

    def resume_reading(self):
        self.paused = False
        asyncio.get_running_loop().call_soon(self.send, b"")

    def _lose(self, error):
        self.state = "closed"
        asyncio.get_running_loop().call_soon(self.protocol.connection_lost, error)

    # what the client does

    def send(self, data):
        self._inbox += data
        if self._inbox and not self.paused and self.state == "open":
            data, self._inbox = self._inbox, b""
            self.protocol.data_received(data)

    def take(self, count):
        """Read so many of the written bytes."""
        self.unsent = max(0, self.unsent - count)
        if self.unsent < HIGH_WATER // 4:
            self.protocol.resume_writing()
        if self.state == "closing" and not self.unsent:
            self._lose(None)

    def responses(self):
        """Return the responses so far: status, header fields, body."""
        found, data = [], bytes(self.written)
        while data:
            head, _, data = data.partition(b"\r\n\r\n")
            lines = head.decode().split("\r\n")
            fields = dict(line.lower().split(": ", 1) for line in lines[1:])
            length = int(fields.get("content-length", 0))
            found.append((int(lines[0].split()[1]), fields, data[:length]))
            data = data[length:]
        return found

    def statuses(self):
        return [status for status, _, _ in self.responses()]

    def problems(self):
        """Return the kinds of the problems among the responses."""
        found = []
        for status, fields, body in self.responses():
            if fields.get("content-type") == "application/problem+json":
                assert json.loads(body)["status"] == status
                found.append(json.loads(body)["type"].removeprefix("urn:tidegate:problem:"))
        return found


class SocketlessServer:
    """A server without a socket: the test creates its connections."""

    def __init__(self, service, max_connections):
        self.service = service
        self.connections = Connections(max_connections, READ, IDLE)
        self.server = HttpServer(service.app, self.connections, service.clock)

    def connect(self, data=b""):
        client = ClientTransport(self.server.connect())
        client.send(data)
        return client

    async def ask(self, data):
        """Send on a new connection, and run the app until it has responded."""
        client = self.connect(data)
        await self.settle()
        return client

    async def settle(self, turns=30):
        for _ in range(turns):
            await asyncio.sleep(0)

    async def ticks(self, count):
        for _ in range(count):
            self.connections.tick()
        await self.settle()


@asynccontextmanager
async def running(max_connections=100, **settings):
    async with InProcessService(**{"policies": POLICIES, "max_body": 4096, **settings}) as service:
        it = SocketlessServer(service, max_connections)
        try:
            yield it
        finally:
            await it.server.stop(0)
            await it.settle()
        assert (service.app.in_flight, len(it.connections)) == (0, 0)


def post(body, *fields, path="/v1/acquire"):
    """Write a request."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *fields]
    if not any(field.startswith(("Transfer-Encoding", "Content-Length")) for field in fields):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode() + body


def acquire_body(key="k", **more):
    return json.dumps({"policy": "api", "key": key, **more}).encode()


def chunked(body, size=7, trailer=b""):
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n" + trailer + b"\r\n"


CHUNKED = "Transfer-Encoding: chunked"
