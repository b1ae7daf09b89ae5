"""Runs the RESP port for tests: in this process on a manual clock, or as a process of `tidegate start`."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import hiredis

from tests.servers.process import free_port
from tests.service.harness import InProcessService, serving
from tidegate.service._http.connections import Connections
from tidegate.service._resp.server import RespServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from tests.service.harness import RunningService


def encode(*words: object) -> bytes:
    """Write a command."""
    parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


class RespClient:
    """A client without any retries: sends commands, and reads replies with hiredis, an independent parser."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._parser = hiredis.Reader(encoding="utf-8", notEnoughData=False)

    async def ask(self, *words: object) -> Any:
        """Send a command and return the reply; an error is returned, not raised."""
        return (await self.ask_all(words))[0]

    async def ask_all(self, *commands: tuple[object, ...]) -> list[Any]:
        """Send commands as one pipeline."""
        self.writer.write(b"".join(encode(*words) for words in commands))
        return [await self.read() for _ in commands]

    async def read(self) -> Any:
        """Read one reply; raise EOFError at the end."""
        while (reply := self._parser.gets()) is False:
            data = await asyncio.wait_for(self.reader.read(65_536), 20)
            if not data:
                raise EOFError
            self._parser.feed(data)
        return reply

    def close(self) -> None:
        self.writer.close()


class InProcessResp(InProcessService):
    """An app on a manual clock, with its RESP port on a real socket."""

    def __init__(self, store: Any = None, *, max_connections: int = 100, **settings: Any) -> None:
        super().__init__(store, **settings)
        self.connections = Connections(max_connections, 5.0, 75.0)
        self.resp = RespServer(self.app, self.connections)
        self.port = 0
        self._clients: list[RespClient] = []

    async def __aenter__(self):
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        await self.resp.start(listener)
        return self

    async def connect(self) -> RespClient:
        client = RespClient(*await asyncio.open_connection("127.0.0.1", self.port))
        self._clients.append(client)
        return client

    async def __aexit__(self, *more: object) -> None:
        self.resp.close()
        for client in self._clients:
            client.close()
        for connection in self.connections.snapshot():
            connection.drop()
        await super().__aexit__(*more)


@asynccontextmanager
async def connected(store: Any = None, **settings: Any) -> AsyncIterator[tuple[InProcessResp, RespClient]]:
    """Run the RESP port in this process, with one client."""
    async with InProcessResp(store, **settings) as service:
        yield service, await service.connect()


@contextmanager
def serving_resp(folder: Path, text: str, *flags: str) -> Iterator[tuple[RunningService, int]]:
    """Run `tidegate start` with a RESP port; give the service and the port."""
    port = free_port()
    with serving(folder, text, "--resp", f"127.0.0.1:{port}", *flags) as service:
        yield service, port
