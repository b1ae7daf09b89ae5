"""HTTP/1 connections without sockets: the test controls what a client sends and reads, and when."""

import asyncio
import json
from contextlib import asynccontextmanager

from tests.service.client_transport import HIGH_WATER, ClientTransport
from tests.service.harness import InProcessService
from tidegate.service._http.connections import Connections
from tidegate.service._http.server import HttpServer

READ, IDLE = 100, 300  # seconds, which are ticks
POLICIES = {"api": "100000/1h", "slow": "1/1h"}
GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
OK, HEALTHY = 200, b'{"ok":true}'

__all__ = ["HIGH_WATER", "ClientTransport"]


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
