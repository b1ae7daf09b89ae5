"""Accepts TLS connections, and counts each one from the moment it is accepted.

asyncio's server creates the transport of a TLS connection only after the handshake. A client that never completes its
handshake would hold a file descriptor that no bound counts. Here, such a connection is one of `Connections` from the
start: it expires after `read_timeout`, and it is closed like any other waiting connection if there are too many.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from tidegate._runtime.clock import TaskSignal
from tidegate.core._bounds import SECOND
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tidegate._runtime.clock import Clock
    from tidegate.service._resp.protocol import RespConnection

log: logging.Logger = logging.getLogger("tidegate.service")

ACCEPT_PAUSE: Final = SECOND  # after an error such as too many open files


class TlsServer:
    """Accepts connections on a socket until it is closed."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        connect: Callable[[], RespConnection],
        clock: Clock,
        handshake_timeout: float,
    ) -> None:
        """Accept from now on; `connect` creates the protocol of a new connection. Timeouts are in seconds."""
        self._listener = listener
        self._context = context
        self._connect = connect
        self._clock = clock
        self._handshake_timeout = handshake_timeout
        self._handshakes: set[asyncio.Task[None]] = set()
        listener.setblocking(False)  # noqa: FBT003 - the socket module has no keyword for it
        self._accepting = asyncio.get_running_loop().create_task(self._accept_all())

    def close(self) -> None:
        """Accept no more connections; those that are open stay open."""
        self._accepting.cancel()
        self._listener.close()

    async def _accept_all(self) -> None:
        loop, signal = asyncio.get_running_loop(), TaskSignal()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._listener)
            except ConnectionAbortedError:  # the client has closed it already
                continue
            except OSError as error:
                log.error("cannot accept a connection on the RESP port: %s", error)  # noqa: TRY400 - no fault of the code
                await self._clock.wait_async(signal, self._clock.steady() + ACCEPT_PAUSE)
                continue
            task = loop.create_task(self._handshake(accepted))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)
            await asyncio.sleep(0)  # counts it before the next one: asyncio accepts a whole queue without suspending

    async def _handshake(self, accepted: socket.socket) -> None:
        connection = self._connect()
        connection.begin_handshake(HandshakeTransport(accepted))
        try:
            with suppress(OSError):  # an SSLError or a TimeoutError is an OSError
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: connection,
                    accepted,
                    ssl=self._context,
                    ssl_handshake_timeout=self._handshake_timeout,
                )
        finally:
            if isinstance(connection.transport, HandshakeTransport):  # the handshake has failed
                connection.connection_lost(None)


class HandshakeTransport(asyncio.Transport):
    """The transport of a connection whose handshake is not complete: it can only be closed."""

    def __init__(self, accepted: socket.socket) -> None:
        """Close this socket."""
        super().__init__()
        self._socket = accepted

    def get_write_buffer_size(self) -> int:
        """Return 0: nothing was sent but the handshake."""
        return 0

    def abort(self) -> None:
        """Close the connection; then the handshake fails, which closes the socket."""
        with suppress(OSError):  # the client has closed it
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self.abort()


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
