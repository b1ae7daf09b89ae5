"""A TCP proxy with faults on demand: it delays or drops data, resets connections, or drops only the replies."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class Faults:
    """The faults of the proxy; they can be changed at any time."""

    delay: float = 0.0  # seconds by which each reply is late
    blackhole: bool = False  # drop data in both directions; connections stay open
    drop_replies: bool = False  # requests reach the server, replies are dropped
    refuse: bool = False  # connections are accepted and closed at once


@dataclass
class TcpProxy:
    """Listens on a free loopback port and forwards everything to `target`. A context manager."""

    target: int
    faults: Faults = field(default_factory=Faults)
    port: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        """Listen."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._resetting: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()
        self._start(self._accept)

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            try:
                if self.faults.refuse:
                    raise ConnectionRefusedError
                server = socket.create_connection(("127.0.0.1", self.target), timeout=5)
                server.settimeout(None)
            except OSError:
                client.close()
                continue
            self._pairs.append((client, server))
            self._start(self._forward, client, server, False)
            self._start(self._forward, server, client, True)

    def _forward(self, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                if self.faults.blackhole or (is_reply and self.faults.drop_replies):
                    continue
                if is_reply and self.faults.delay:
                    self._closing.wait(self.faults.delay)
                sink.sendall(data)
        if source not in self._resetting:
            for end in (source, sink):  # wakes the thread of the other direction, which closes its socket
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        source.close()

    def reset(self) -> None:
        """Reset all connections: both ends get an error, not the end of the stream."""
        pairs, self._pairs = self._pairs, []
        self._resetting.update(end for pair in pairs for end in pair)
        for pair in pairs:
            for end in pair:
                with suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    end.shutdown(socket.SHUT_RD)  # wakes the thread that reads from it, which closes it

    def close(self) -> None:
        """Stop listening and close everything."""
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()
        for thread in self._threads:
            thread.join(5)

    def __enter__(self) -> Self:
        """Return the proxy, which is listening already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()
