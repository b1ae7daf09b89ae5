"""A temporary server process with its own folder and loopback port, which tests kill, freeze and restart."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STARTING = 20.0  # seconds after which starting a server fails
POLL_INTERVAL = 0.002
LOWEST_PORT, PORTS, SHARES = 12_000, 10_000, 8
CLUSTER_BUS_OFFSET = 10_000  # offset of the cluster bus port of a Redis node
given: set[int] = set()


def need(program: str | None, what: str, how: str) -> str:
    """Return the program; if it is missing, fail under CI and skip the test elsewhere."""
    if program is not None:
        return program
    message = f"{what} is not installed: {how}"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)  # not on this machine; CI has it


def free_port() -> int:
    """Return a free port whose cluster bus port is free, too.

    Both are below those that the system gives to connections, so until a server listens there, none takes it; and each
    process of a test run chooses from a share of its own.
    """
    share = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % SHARES
    while True:
        port = LOWEST_PORT + PORTS // SHARES * share + secrets.randbelow(PORTS // SHARES)
        with socket.socket() as probe, socket.socket() as bus, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            bus.bind(("127.0.0.1", port + CLUSTER_BUS_OFFSET))
            if port not in given:
                given.add(port)
                return port


def until(condition: Callable[[], object], what: str, seconds: float = STARTING) -> None:
    """Poll until a condition is true; fail after a timeout, naming `what`."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(OSError, RuntimeError):
            if condition():
                return
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {seconds} s")
        time.sleep(POLL_INTERVAL)  # a real process has no virtual time


class Started(ABC):
    """Base of servers that are started and closed: a context manager that cleans up even if starting fails."""

    @abstractmethod
    def start(self) -> Self:
        """Start, and wait until it answers."""

    @abstractmethod
    def close(self) -> None:
        """Stop it."""

    def __enter__(self) -> Self:
        """Start."""
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        """Stop it."""
        self.close()


class Server(Started):
    """One server with its own folder and port. A context manager that removes both."""

    def __init__(self, program: str, port: int | None = None) -> None:
        """Prepare a folder; `start` starts the server."""
        self.program = program
        self.port = port or free_port()
        self.folder = Path(tempfile.mkdtemp(prefix=f"tidegate-{Path(program).name}-"))
        self.process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> list[str]:
        """Return the command that starts it."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Return whether it answers a ping."""

    def start(self) -> Self:
        """Start, and wait until it answers."""
        self.launch(self.command())
        return self

    def launch(self, command: list[str]) -> None:
        """Run the program and wait until it answers."""
        self.process = subprocess.Popen(
            command,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            until(self.is_ready, f"the start of {self.program}")
        except AssertionError as error:
            raise AssertionError(f"{error}; its log: {self.log()!r}") from None

    def log(self) -> str:
        """Return the end of the log of the server."""
        path = self.folder / "log"
        return path.read_text(errors="replace")[-500:] if path.exists() else ""

    def signal(self, number: int) -> None:
        """Send a signal to the server and its child processes."""
        if self.process is not None:
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def restart(self) -> None:
        """Kill the server with SIGKILL and start it again with the same port and folder."""
        self.kill()
        self.start()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze the server: connections are accepted, nothing is answered."""
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill the server and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
