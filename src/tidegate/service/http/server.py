"""The HTTP server of one process: listens, and bounds its connections with one timer.

uvicorn's own Server is not used: it takes over the signals of the process and polls while it stops.
"""

from __future__ import annotations

import asyncio
import contextlib
from email.utils import formatdate
from typing import TYPE_CHECKING, Final

from uvicorn.config import Config
from uvicorn.server import ServerState

from tidegate.service.http.connections import BACKLOG
from tidegate.service.http.known_heads import KnownHeads
from tidegate.service.http.protocol import HttpConnection

if TYPE_CHECKING:
    import socket

    from tidegate.clock import Clock
    from tidegate.service.http.app import App
    from tidegate.service.http.connections import Connections

NANOS: Final = 10**9  # in a second


class HttpServer:
    """Serves an app over HTTP/1 on a listening socket."""

    def __init__(self, app: App, connections: Connections, clock: Clock) -> None:
        """Serve this app; the clock provides the Date of responses."""
        self.connections = connections
        self._app = app
        self._clock = clock
        self._config = Config(
            app,
            http=HttpConnection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            proxy_headers=False,
            server_header=False,
            access_log=False,
            log_config=None,
            workers=1,
        )
        self._config.load()
        self._state = ServerState()
        self._heads = KnownHeads()
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, listener: socket.socket) -> None:
        """Accept connections."""
        self._tick()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self.connect, sock=listener, backlog=BACKLOG)

    def connect(self) -> HttpConnection:
        """Create the protocol of a new connection."""
        return HttpConnection(self._config, self._state, self._app, self.connections, self._heads)

    def _tick(self) -> None:
        """Update the Date, and expire connections; the next tick is scheduled even if one connection fails."""
        self._timer = asyncio.get_running_loop().call_later(self.connections.tick_seconds, self._tick)
        self._state.default_headers = [(b"date", formatdate(self._clock.ns() // NANOS, usegmt=True).encode())]
        self._heads.set_default_fields(self._state.default_headers)
        self.connections.tick()

    def begin_drain(self) -> None:
        """Close each connection after its next response: the service is about to stop."""
        self._app.draining = True
        self._heads.clear()  # the responses to known heads keep their connection open

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
        if self._state.tasks:  # the app has been notified that the clients are gone
            await asyncio.wait(self._state.tasks, timeout=within)
        if self._timer is not None:
            self._timer.cancel()
