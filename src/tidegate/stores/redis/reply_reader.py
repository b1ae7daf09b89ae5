"""Parses the replies of a server to scripts: a string, OK, or an error."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from tidegate.stores.redis import driver

if TYPE_CHECKING:
    from collections.abc import Callable

    OnData = Callable[[], None]
    OnReply = Callable[[bytes | Exception], None]
    OnLost = Callable[[BaseException], None]

STRING, STATUS, ERROR = b"$+-"
END: Final = b"\r\n"


class ReplyReader(asyncio.Protocol):
    """Passes replies to `on_reply` in order, and calls `on_lost` when the connection ends.

    `on_data` is called whenever any byte has arrived.
    """

    def __init__(self, on_data: OnData, on_reply: OnReply, on_lost: OnLost) -> None:
        """Start at the next byte."""
        self.set_callbacks(on_data, on_reply, on_lost)
        self._buffer = b""

    def set_callbacks(self, on_data: OnData, on_reply: OnReply, on_lost: OnLost) -> None:
        """Replace the callbacks."""
        self._on_data = on_data
        self._on_reply = on_reply
        self._on_lost = on_lost

    def data_received(self, data: bytes) -> None:
        """Parse complete replies; keep the rest."""
        self._on_data()
        data = self._buffer + data if self._buffer else data
        position = 0
        while (end := data.find(END, position)) >= 0:
            reply: bytes | Exception = data[position + 1 : end]
            kind, following = data[position], end + 2
            if kind == STRING:
                start, following = following, following + int(data[position + 1 : end]) + 2
                if len(data) < following:
                    break
                reply = data[start : following - 2]
            elif kind == ERROR:
                reply = driver.read_error(data[position + 1 : end])
            elif kind != STATUS:
                reply = ConnectionError(f"unexpected reply to a script: {data[position:end]!r}")
            self._on_reply(reply)
            position = following
        self._buffer = data[position:]

    def connection_lost(self, exc: Exception | None) -> None:
        """Report that the connection was closed by either side."""
        self._on_lost(exc or ConnectionError("Connection closed by server."))
