"""TLS connections to a server with a trusted and with an unknown certificate."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.servers.process import free_port, need
from tests.servers.valkey import ValkeyServer
from tidegate import AsyncLimiter, Limiter, StoreUnavailable
from tidegate.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Start a server that also listens for TLS; return its URL and its certificate."""
    folder = tmp_path_factory.mktemp("tls")
    key, certificate, port = folder / "key.pem", folder / "certificate.pem", free_port()
    openssl = need(shutil.which("openssl"), "openssl", "apt-get install openssl")
    names = ["-subj", "/CN=tidegate", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    subprocess.run(
        [openssl, "req", *made, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True
    )
    files = ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-ca-cert-file", str(certificate)]
    program = shutil.which("redis-server")  # the server of the wheel has no TLS
    with ValkeyServer(
        need(program, "redis-server", "apt-get install redis-server"),
        "--tls-port",
        str(port),
        "--tls-auth-clients",
        "no",
        *files,
    ):
        yield f"rediss://127.0.0.1:{port}", certificate


def test_decisions_over_tls(encrypted: tuple[str, Path]) -> None:
    url, certificate = encrypted
    options = f"?ssl_ca_certs={certificate}&timeout=5&connect_timeout=5"

    async def ask() -> list[bool]:
        async with AsyncLimiter("5/1h", store=url + options) as limiter:
            return [bool(d) for d in await asyncio.gather(*(limiter.try_acquire("k") for _ in range(4)))]

    with Limiter("5/1h", store=url + options) as limiter:
        assert [bool(limiter.try_acquire("k")) for _ in range(3)] == [True] * 3
        assert asyncio.run(ask()) == [True, True, False, False]


def test_an_unknown_certificate_is_refused(encrypted: tuple[str, Path]) -> None:
    url, _ = encrypted
    store = open_store(f"{url}?timeout=5&connect_timeout=5")
    limiter = Limiter("5/1h", store=store)
    with pytest.raises(StoreUnavailable, match="ssl_ca_certs"):
        limiter.try_acquire("k")
    store.close()
