"""The HTTP server of the gateway: aiohttp's, with bounds on connections, heads and times."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final, Self

from aiohttp import web

from tidegate.egress._messages import EgressError

if TYPE_CHECKING:
    import socket

    from tidegate.egress._gateway import EgressGateway

BACKLOG: Final = 1024
MAX_HEADERS: Final = 128
FIRST_SERVER_ERROR: Final = 500
LEVELS: Final = (logging.INFO, logging.ERROR)
BAD_REQUEST: Final = ("bad-request", "the request is not valid HTTP, or its header is too large")
MAX_IDLE: Final = 75.0  # seconds between two requests on a connection
LINGER: Final = 2.0  # seconds that the rest of a refused body is read for, so that the client sees the answer


class _WithoutDetails(logging.Filter):
    """Removes exceptions from log records: those of the HTTP parser quote header fields, which may hold a key."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.exc_info = record.exc_text = None
        return True


HTTP_LOG: Final = logging.getLogger("tidegate.egress.http")
HTTP_LOG.addFilter(_WithoutDetails())


class ClientConnection(web.RequestHandler):
    """One connection of a client."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,  # noqa: ARG002 - as aiohttp calls it
        message: str | None = None,  # noqa: ARG002 - as above
    ) -> web.StreamResponse:
        """Answer a request that the parser has refused, without quoting it: it may contain a key."""
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun")
        HTTP_LOG.log(LEVELS[status >= FIRST_SERVER_ERROR], "cannot read a request from %s", request.remote)
        kind, text = ("internal", "the gateway failed") if status >= FIRST_SERVER_ERROR else BAD_REQUEST
        response = EgressError(status, kind, text).response()
        response.force_close()
        return response

    def eof_received(self) -> bool | None:  # type: ignore[override]  # asyncio's own signature
        """Keep a tunnel open whose client sends no more: it may still receive."""
        parser: Any = self._payload_parser
        if parser is None:
            return None
        parser.feed_eof()
        return True


class EgressServer(web.Server):
    """Serves a gateway on a listening socket. An async context manager."""

    def __init__(self, gateway: EgressGateway, listener: socket.socket) -> None:
        """Serve on this socket."""
        settings = gateway.settings
        super().__init__(
            gateway.handle,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=min(MAX_IDLE, settings.whole_timeout),
            lingering_time=LINGER,
            logger=HTTP_LOG,
            max_field_size=settings.max_header,
            max_headers=MAX_HEADERS,
            max_line_size=settings.max_header,
        )
        self._gateway = gateway
        self._listener = listener
        self._serving: asyncio.Server | None = None

    def __call__(self) -> web.RequestHandler:
        """Create the protocol of a connection."""
        return ClientConnection(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Refuse a connection if there are too many."""
        super().connection_made(handler, transport)
        if len(self._connections) > self._gateway.settings.max_connections:
            transport.abort()

    async def __aenter__(self) -> Self:
        """Accept connections."""
        loop = asyncio.get_running_loop()
        self._serving = await loop.create_server(self, sock=self._listener, backlog=BACKLOG)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Finish active requests within `stop_within`, then close all connections."""
        if self._serving is not None:
            self._serving.close()
        self.pre_shutdown()
        await self.shutdown(self._gateway.settings.stop_within)
