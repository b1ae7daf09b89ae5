"""How the responses of the app are sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.service.http.protocol import HttpConnection


class ResponseTransport:
    """The transport of one request; closing it gives the client time to read the last response."""

    __slots__ = ("_connection", "is_closing", "write")

    def __init__(self, connection: HttpConnection) -> None:
        """Write to this connection."""
        self._connection = connection
        self.write: Callable[[bytes], None] = connection.transport.write
        self.is_closing: Callable[[], bool] = connection.transport.is_closing

    def close(self) -> None:
        """Close the connection after the client had time to read the response."""
        self._connection.close_after_response()
