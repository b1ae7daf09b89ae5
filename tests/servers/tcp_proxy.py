"""A TCP proxy that misbehaves on command: it delays, swallows or resets, or loses only the answers."""

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
    """What the proxy does to bytes that pass; change it at any time."""

    delay: float = 0.0  # seconds by which each answer is late
    blackhole: bool = False  # nothing passes in either direction, connections stay open
    drop_replies: bool = False  # questions reach the server, answers are lost
    refuse: bool = False  # connections are accepted and closed at once


@dataclass
class TcpProxy:
    """Listens on a free loopback port and passes everything on to `target`. A context manager."""

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
            self._start(self._pass, client, server, False)
            self._start(self._pass, server, client, True)

    def _pass(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                if self.faults.blackhole or (answers and self.faults.drop_replies):
                    continue
                if answers and self.faults.delay:
                    self._closing.wait(self.faults.delay)
                sink.sendall(data)
        if source not in self._resetting:
            for end in (source, sink):  # wakes the thread of the other direction, which closes its own
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        source.close()

    def reset(self) -> None:
        """Reset all connections: both ends see an error, not an end."""
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
        """Listen already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()
