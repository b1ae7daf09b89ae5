"""Sends the requests for the hosts of language-model APIs to a server of this machine, over TLS.

The recipes use the SDKs unchanged, with the real host names. Only the connections of sockets are redirected, and the
certificate of the server is trusted (SSL_CERT_FILE). Every other host is refused.
"""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

HOSTS = (
    "api.openai.com",
    "api.anthropic.com",
    "generativelanguage.googleapis.com",
    "api.mistral.ai",
    "tools.example.com",
)
API_KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "MISTRAL_API_KEY")
PORT_VARIABLE = "TIDEGATE_RECIPES_PORT"
STAND_IN = "127.7.7.7"  # the address that HOSTS resolve to; its connections go to the port of the server


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate for all HOSTS that is its own authority; return its file and that of its key."""
    openssl = shutil.which("openssl")
    assert openssl, "openssl is missing: apt-get install openssl"
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    names = ",".join(f"DNS:{host}" for host in HOSTS)
    made = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    subject = ["-subj", "/CN=tidegate recipes", "-addext", f"subjectAltName={names}"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([openssl, "req", *made, *subject, *files], check=True, capture_output=True)
    return certificate, key


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return the TLS context of the server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


def environment(certificate: Path, port: int) -> dict[str, str]:
    """Return the variables for a process whose requests for HOSTS go to a port of this machine."""
    return {
        **dict.fromkeys(API_KEYS, "test-key"),
        "SSL_CERT_FILE": str(certificate),
        PORT_VARIABLE: str(port),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # litellm would download its table of prices
        "LITELLM_LOG": "ERROR",
    }


class RedirectedSocket:
    """Replaces how sockets connect and how names are resolved, until `restore`."""

    def __init__(self) -> None:
        """Remember the functions of the library."""
        self._getaddrinfo = socket.getaddrinfo
        self._connect = socket.socket.connect

    def install(self) -> None:
        """Send the connections to HOSTS to this machine from now on, and refuse those to others."""
        resolve, connect = self._getaddrinfo, self._connect

        def getaddrinfo(host: Any, port: Any, *arguments: Any, **named: Any) -> Any:
            name = host.decode() if isinstance(host, bytes) else host
            if name in HOSTS:
                return resolve(STAND_IN, port, *arguments, **named)
            if name in (STAND_IN, "127.0.0.1", "localhost"):
                return resolve(host, port, *arguments, **named)
            raise OSError(f"a recipe must not connect to {name}")

        def connect_here(sock: socket.socket, address: Any) -> None:
            is_host = address[0] == STAND_IN
            connect(sock, ("127.0.0.1", int(os.environ[PORT_VARIABLE])) if is_host else address)

        socket.getaddrinfo = getaddrinfo
        socket.socket.connect = connect_here  # type: ignore[method-assign]  # restored below

    def restore(self) -> None:
        """Resolve names and connect as before."""
        socket.getaddrinfo = self._getaddrinfo
        socket.socket.connect = self._connect  # type: ignore[method-assign]  # as it was
