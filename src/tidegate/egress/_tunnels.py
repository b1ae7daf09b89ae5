"""Tunnels (CONNECT) and upgraded connections (WebSocket): bytes are passed on in both directions, unread.

The gateway sees the host and the connection, not what is inside: no requests, models or tokens, and it can add no key.
So a tunnel is counted as one request when it is opened, and holds its slot of `concurrency` until it is closed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from aiohttp.http import StreamWriter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp import ClientResponse, web
    from aiohttp.base_protocol import BaseProtocol

MAX_QUEUED: Final = 2**16  # bytes that wait for the other side
READ_BYTES: Final = 2**16
TUNNEL_NOTE: Final = (
    "only the connection is counted: the gateway sees no requests, models or tokens inside a tunnel, and adds no key"
)


class ByteQueue:
    """Takes the bytes of an upgraded connection of aiohttp, as its parser, until they are read."""

    def __init__(self, protocol: BaseProtocol) -> None:
        """Pause the connection while too much is waiting."""
        self._protocol = protocol
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._ended = False
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Take what has arrived."""
        if data:
            self._pieces.append(bytes(data))
            self._size += len(data)
            if self._size > MAX_QUEUED and not self._paused:
                self._paused = True
                self._protocol.pause_reading()
            self._wake()
        return False, b""

    def feed_eof(self) -> None:
        """Record that the other side sends no more."""
        self._ended = True
        self._wake()

    def set_exception(self, *_error: object) -> None:
        """Record that the connection is lost."""
        self.feed_eof()

    def is_eof(self) -> bool:
        """Return whether the other side sends no more."""
        return self._ended

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def read(self) -> bytes:
        """Return what has arrived, waiting for it; nothing at the end."""
        while not self._pieces and not self._ended:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        data = b"".join(self._pieces)
        self._pieces.clear()
        self._size = 0
        if self._paused:
            self._paused = False
            self._protocol.resume_reading()
        return data


class TunnelEnd:
    """One side of a tunnel: how to read from it and write to it."""

    def __init__(
        self,
        read: Callable[[], Awaitable[bytes]],
        transport: asyncio.WriteTransport,
        drain: Callable[[], Awaitable[None]],
    ) -> None:
        """Wrap a connection."""
        self.read = read
        self._transport = transport
        self._drain = drain

    async def write(self, data: bytes) -> None:
        """Send bytes, as fast as the other side reads them."""
        if self._transport.is_closing():
            raise ConnectionResetError("the tunnel is closed")
        self._transport.write(data)
        await self._drain()

    def end(self) -> None:
        """Send no more."""
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()


def client_end(request: web.BaseRequest) -> TunnelEnd:
    """Take over the connection of a client, whose request has been answered."""
    protocol: Any = request.protocol
    queue = ByteQueue(protocol)
    protocol.set_parser(queue)
    if request.transport is None:
        raise ConnectionResetError("the client has disconnected")
    return TunnelEnd(queue.read, request.transport, StreamWriter(protocol, asyncio.get_running_loop()).drain)


def upgraded_end(response: ClientResponse, *, expected: bool) -> TunnelEnd:
    """Take over the connection of a provider that has switched protocols; `expected`: the client asked for that."""
    if not expected:
        raise ConnectionResetError("the provider switched protocols, but the client had not asked for it")
    connection = response.connection
    if connection is None or connection.protocol is None or connection.transport is None:
        raise ConnectionResetError("the provider has closed the connection")
    protocol: Any = connection.protocol
    queue = ByteQueue(protocol)
    protocol.set_parser(queue, queue)
    return TunnelEnd(queue.read, connection.transport, StreamWriter(protocol, asyncio.get_running_loop()).drain)


def stream_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> TunnelEnd:
    """Wrap a plain connection."""
    return TunnelEnd(lambda: reader.read(READ_BYTES), writer.transport, writer.drain)


async def run_tunnel(client: TunnelEnd, upstream: TunnelEnd, idle: float) -> None:
    """Pass bytes on until both sides have ended, one is lost, or nothing has come for `idle` seconds."""
    clock = asyncio.get_running_loop()
    deadline = asyncio.timeout(idle)

    async def pump(source: TunnelEnd, sink: TunnelEnd) -> None:
        while data := await source.read():
            deadline.reschedule(clock.time() + idle)
            await sink.write(data)
        sink.end()

    try:
        async with deadline, asyncio.TaskGroup() as group:
            group.create_task(pump(client, upstream))
            group.create_task(pump(upstream, client))
    except* (OSError, TimeoutError):
        pass  # one side is gone: the tunnel ends
    finally:
        upstream.close()
        client.close()
