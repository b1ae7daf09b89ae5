"""The RESP server of one process: accepts connections, with TLS if a certificate is set.

Its connections count towards the bound of the HTTP server. The timer of that server bounds their time, and its `stop`
closes them.
"""

from __future__ import annotations

import asyncio
import ssl
from itertools import count
from typing import TYPE_CHECKING

from tidegate.errors import ConfigError
from tidegate.service.http.connections import BACKLOG
from tidegate.service.resp.commands import Commands
from tidegate.service.resp.protocol import RespConnection

if TYPE_CHECKING:
    import socket
    from pathlib import Path

    from tidegate.service.http.app import App
    from tidegate.service.http.connections import Connections


class RespServer:
    """Serves an app to Redis clients."""

    def __init__(self, app: App, connections: Connections) -> None:
        """Serve this app; the connections are shared with the HTTP server."""
        self._app = app
        self._connections = connections
        self._commands = Commands(app, connections)
        self._numbers = count(1)
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Accept connections."""
        settings = self._app.settings
        context = tls_context(settings.resp_tls_cert, settings.resp_tls_key)
        timeout = None if context is None else self._connections.read_timeout
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            self.connect, sock=listener, backlog=BACKLOG, ssl=context, ssl_handshake_timeout=timeout
        )

    def connect(self) -> RespConnection:
        """Create the protocol of a new connection."""
        return RespConnection(self._app, self._commands, self._connections, next(self._numbers))

    def close(self) -> None:
        """Accept no more connections."""
        if self._server is not None:
            self._server.close()


def tls_context(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Load a certificate and its private key; None without a certificate."""
    if certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        message = f"cannot load the certificate {certificate}: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(message, field="resp_tls_cert") from None
    return context
