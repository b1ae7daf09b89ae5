"""A server that sends any bytes, at any speed; and the memory and time of a process that fetches from it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from tests.servers.thread import ThreadServer

Script = Callable[[str, dict[str, str]], AsyncIterator[bytes]]  # of a path and headers: the bytes to send


class HostileServer(ThreadServer):
    """Answers each request by what its script gives, until the client has gone. A context manager."""

    def __init__(self, script: Script) -> None:
        """Answer by this script; `requests` holds what was received: paths and headers."""
        super().__init__()
        self.script = script
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.sent = 0

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line, *fields = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            path = line.split(" ")[1]
            pairs = (field.partition(":") for field in fields if field)
            headers = {name.lower(): value.strip() for name, _, value in pairs}
            self.requests.append((path, headers))
            async for piece in self.script(path, headers):
                writer.write(piece)
                await writer.drain()
                self.sent += len(piece)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


def head(status: int = 200, *lines: str) -> bytes:
    """Write the head of an answer."""
    return "\r\n".join([f"HTTP/1.1 {status} X", *lines, "Connection: close", "", ""]).encode()


async def slowly(piece: bytes, seconds: float = 0.02) -> AsyncIterator[bytes]:
    """Send a piece again and again, for ever."""
    while True:
        yield piece
        await asyncio.sleep(seconds)  # this server is slow: that is what is tested


async def endlessly(piece: bytes) -> AsyncIterator[bytes]:
    """Send a piece again and again, as fast as it is taken."""
    while True:
        yield piece
