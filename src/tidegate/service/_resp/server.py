"""The RESP server of one process: accepts connections, with TLS if a certificate is set.

Its connections count towards the bound of the HTTP server, also during their TLS handshake. The timer of that server
bounds their time, and its `stop` closes them.
"""

from __future__ import annotations

import asyncio
from itertools import count
from typing import TYPE_CHECKING

from tidegate.service._http.connections import BACKLOG
from tidegate.service._resp.commands import Commands
from tidegate.service._resp.protocol import RespConnection
from tidegate.service._resp.tls import TlsServer, tls_context

if TYPE_CHECKING:
    import socket

    from tidegate.service._http.app import App
    from tidegate.service._http.connections import Connections


class RespServer:
    """Serves an app to Redis clients."""

    def __init__(self, app: App, connections: Connections) -> None:
        """Serve this app; the connections are shared with the HTTP server."""
        self._app = app
        self._connections = connections
        self._commands = Commands(app, connections)
        self._numbers = count(1)
        self._server: asyncio.Server | TlsServer | None = None

    async def start(self, listener: socket.socket) -> None:
        """Accept connections."""
        settings = self._app.settings
        context = tls_context(settings.resp_tls_cert, settings.resp_tls_key)
        if context is None:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(self.connect, sock=listener, backlog=BACKLOG)
        else:
            clock, timeout = self._app.decider.store.clock, self._connections.read_timeout
            self._server = TlsServer(listener, context, self.connect, clock, timeout)

    def connect(self) -> RespConnection:
        """Create the protocol of a new connection."""
        return RespConnection(self._app, self._commands, self._connections, next(self._numbers))

    def close(self) -> None:
        """Accept no more connections."""
        if self._server is not None:
            self._server.close()
