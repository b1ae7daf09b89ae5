"""Opens connections of tasks, and parses the replies of a server: a string, OK, or an error."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.stores._redis import driver
from tidegate.stores._redis.library import pack_command

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.stores._redis.address import RedisAddress

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


class OpenConnection(NamedTuple):
    """An open connection, and what reads its replies."""

    transport: asyncio.Transport
    reader: ReplyReader


async def open_connection(address: RedisAddress) -> OpenConnection:
    """Connect in the running event loop; the caller limits the time, and sets the callbacks of the reader.

    redis-py's connections of tasks have no public transport, and its streams wake a task for each reply, which costs
    more than all else.
    """
    loop = asyncio.get_running_loop()
    greeted: asyncio.Future[None] = loop.create_future()
    commands = driver.handshake(address)
    missing = len(commands)

    def on_reply(reply: bytes | Exception) -> None:
        nonlocal missing
        missing -= 1
        if isinstance(reply, Exception):
            on_lost(reply)
        elif not missing and not greeted.done():
            greeted.set_result(None)

    def on_lost(error: BaseException) -> None:
        if not greeted.done():
            greeted.set_exception(error)
            greeted.exception()  # nobody waits for it, if there is no handshake

    reader = ReplyReader(lambda: None, on_reply, on_lost)
    host, port = await driver.find_server(address)
    transport, _ = await loop.create_connection(lambda: reader, host, port, ssl=driver.tls_context(address))
    try:
        if commands:
            transport.write(b"".join([pack_command(*command) for command in commands]))
            await greeted
    except BaseException:
        transport.abort()
        raise
    return OpenConnection(transport, reader)


def discard(connection: OpenConnection) -> None:
    """Abort a connection that is no longer needed."""
    connection.transport.abort()


def check_open(connection: OpenConnection) -> None:
    """Raise ConnectionError if the connection was closed before its callbacks were set."""
    if connection.transport.is_closing():
        raise ConnectionError("Connection closed by server.")
