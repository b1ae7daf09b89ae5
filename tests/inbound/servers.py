"""Starts real web servers in subprocesses, on free loopback ports."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.servers.process import free_port, until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]


def command(server: str, site: str, port: int, *more: str) -> list[str]:
    """Return the command that starts a server with one of the test sites, `module:name`."""
    app = f"tests.inbound.sites.{site}"
    if server == "uvicorn":
        # By default it trusts X-Forwarded-For from the local host and replaces the peer address.
        place = () if "--uds" in more else ("--port", str(port))
        words = [app, "--no-proxy-headers", "--log-level", "warning", *place, *more]
    elif server == "granian":
        words = ["--interface", "wsgi" if "flask" in site else "asgi", "--port", str(port), "--no-log", app]
    else:
        words = [app, "--bind", f"127.0.0.1:{port}", "--threads", "4", "--log-level", "error", "--no-control-socket"]
        words += more
    return [sys.executable, "-m", server, *words]


@contextmanager
def serving(server: str, site: str, *more: str, socket_path: str | None = None, **env: str) -> Iterator[str]:
    """Serve a site on a port, or (uvicorn) on a Unix socket; yield its URL."""
    port = free_port()
    process = subprocess.Popen(
        command(server, site, port, *more, *(("--uds", socket_path) if socket_path else ())),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{ROOT}", **env},
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )
    try:
        until(lambda: listens(process, port, socket_path), f"the start of {server}")
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def listens(process: subprocess.Popen[bytes], port: int, path: str | None) -> bool:
    """Return whether the server accepts connections."""
    if process.poll() is not None:
        raise AssertionError(f"the server ended with {process.returncode}")
    with socket.socket(socket.AF_UNIX if path else socket.AF_INET) as probe:
        probe.settimeout(1)
        probe.connect(path or ("127.0.0.1", port))
        return True


def raw_status(url: str, target: str) -> int:
    """Request a target exactly as written, which HTTP libraries would normalize; return the status."""
    port = int(url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(f"GET {target} HTTP/1.1\r\nHost: site\r\nConnection: close\r\n\r\n".encode())
        return int(connection.makefile("rb").readline().split()[1])
