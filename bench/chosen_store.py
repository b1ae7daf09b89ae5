"""The store of a benchmark, by name: a server is started for it, on the loopback interface, and stopped afterwards."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def chosen_store(name: str, folder: str = "") -> Iterator[str]:
    """Yield the URL of the store: `memory`, `sqlite` (in a folder, or here), `valkey` or `postgres`."""
    if name == "valkey":
        from tests.servers.valkey import ValkeyServer  # noqa: PLC0415 - only for this store

        with ValkeyServer() as server:
            yield f"{server.url}?timeout=5"
    elif name == "postgres":
        from tests.servers.postgres import PostgresServer, find_binaries  # noqa: PLC0415 - only for this store

        binaries = find_binaries()
        if binaries is None:
            raise SystemExit("no PostgreSQL found: run make venv, which installs one")
        with PostgresServer(binaries) as database:
            yield f"{database.url}?timeout=5"
    else:
        yield "memory://" if name == "memory" else f"sqlite:///{folder and f'{folder}/'}quota.db"
