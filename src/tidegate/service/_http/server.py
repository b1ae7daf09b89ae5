"""The HTTP server of one process: listens, and bounds its connections with one timer."""

from __future__ import annotations

import asyncio
import contextlib
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, Final

from tidegate.service._http.connections import BACKLOG
from tidegate.service._http.encoding import HttpWriter
from tidegate.service._http.protocol import HttpConnection
from tidegate.service._http.request_head import KnownHeads

if TYPE_CHECKING:
    import socket

    from tidegate._runtime.clock import Clock
    from tidegate.service._http.app import App
    from tidegate.service._http.connections import Connections

NANOS: Final = 10**9  # in a second


class HttpServer:
    """Serves an app over HTTP/1 on a listening socket."""

    def __init__(self, app: App, connections: Connections, clock: Clock) -> None:
        """Serve this app; the clock provides the Date of responses."""
        self.connections = connections
        self._app = app
        self._clock = clock
        self._heads = KnownHeads()
        self._writer = HttpWriter()
        self._tasks: set[asyncio.Task[Any]] = set()  # of requests
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, listener: socket.socket) -> None:
        """Accept connections."""
        self._tick()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self.connect, sock=listener, backlog=BACKLOG)

    def connect(self) -> HttpConnection:
        """Create the protocol of a new connection."""
        return HttpConnection(self._app, self.connections, self._heads, self._writer, self._tasks)

    def _tick(self) -> None:
        """Update the Date, and expire connections; the next tick is scheduled even if one connection fails."""
        self._timer = asyncio.get_running_loop().call_later(self.connections.tick_seconds, self._tick)
        self._writer.set_date(formatdate(self._clock.ns() // NANOS, usegmt=True).encode())
        self.connections.tick()

    def begin_drain(self) -> None:
        """Close each connection after its next response: the service is about to stop."""
        self._app.draining = True

    def close_listener(self) -> None:
        """Refuse new connections; those that are open stay open."""
        if self._server is not None:
            self._server.close()

    async def stop(self, within: float) -> None:
        """Refuse new connections, finish the complete requests, and close, within that many seconds."""
        self.close_listener()
        for connection in self.connections.snapshot():
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.connections.none_open.wait(), within)
        for connection in self.connections.snapshot():
            connection.drop()
        if self._tasks:  # they are cancelled when their connections are lost
            await asyncio.wait(self._tasks, timeout=within)
        if self._timer is not None:
            self._timer.cancel()
