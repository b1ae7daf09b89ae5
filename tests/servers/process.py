"""A throw-away server of a test: a program with a folder and a loopback port of its own, killed, frozen, restarted."""

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

STARTING = 20.0  # seconds after which a server that does not answer is a failure
SHORT = 0.002
LOWEST_PORT, PORTS, SHARES = 12_000, 10_000, 8
BUS = 10_000  # a node of a Redis cluster also listens on the port that is so much higher
given: set[int] = set()


def need(program: str | None, what: str, how: str) -> str:
    """Give the program; where it is missing, fail under CI and skip elsewhere, loudly."""
    if program is not None:
        return program
    message = f"{what} is not installed: {how}"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)  # not on this machine; CI has it


def free_port() -> int:
    """Find a port that nobody listens on, and whose cluster bus port is free too.

    Both are below those that the system gives to connections, so until a server listens there, none takes it; and each
    process of a test run chooses from a share of its own.
    """
    share = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % SHARES
    while True:
        port = LOWEST_PORT + PORTS // SHARES * share + secrets.randbelow(PORTS // SHARES)
        with socket.socket() as probe, socket.socket() as bus, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            bus.bind(("127.0.0.1", port + BUS))
            if port not in given:
                given.add(port)
                return port


def until(condition: Callable[[], object], what: str, seconds: float = STARTING) -> None:
    """Poll until something is so, or fail with what was waited for."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(OSError, RuntimeError):
            if condition():
                return
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {seconds} s")
        time.sleep(SHORT)  # a real process has no virtual time


class Started(ABC):
    """What is started and closed: a context manager that leaves nothing behind, not even if starting fails."""

    @abstractmethod
    def start(self) -> Self:
        """Start, and wait until it answers."""

    @abstractmethod
    def close(self) -> None:
        """End it."""

    def __enter__(self) -> Self:
        """Start."""
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        """Leave nothing behind."""
        self.close()


class Server(Started):
    """One server with its own folder and port. A context manager that leaves nothing behind."""

    def __init__(self, program: str, port: int | None = None) -> None:
        """Prepare a folder; `start` starts the server."""
        self.program = program
        self.port = port or free_port()
        self.folder = Path(tempfile.mkdtemp(prefix=f"tidegate-{Path(program).name}-"))
        self.process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def words(self) -> list[str]:
        """Give the command that starts it."""

    @abstractmethod
    def answers(self) -> bool:
        """Tell whether it answers a ping."""

    def start(self) -> Self:
        """Start, and wait until it answers."""
        self.launch(self.words())
        return self

    def launch(self, words: list[str]) -> None:
        """Run the program and wait until it answers."""
        self.process = subprocess.Popen(
            words,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            until(self.answers, f"the start of {self.program}")
        except AssertionError as error:
            raise AssertionError(f"{error}; its log: {self.log()!r}") from None

    def log(self) -> str:
        """Give the end of what the server wrote."""
        path = self.folder / "log"
        return path.read_text(errors="replace")[-500:] if path.exists() else ""

    def signal(self, number: int) -> None:
        """Send a signal to the server and whatever it started."""
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
        """Let the server hang for a while: connections are accepted, nothing is answered."""
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill the server and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
