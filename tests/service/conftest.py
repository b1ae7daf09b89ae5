"""Stores that several processes share: each test has its own prefix, schema or file."""

from itertools import count

import pytest

from tests.servers.valkey import ValkeyServer

numbers = count(1)


@pytest.fixture(scope="session")
def shared_valkey():
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="session")
def shared_postgres(running_postgres):
    return running_postgres


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
