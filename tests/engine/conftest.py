"""Servers for the tests of forks and interrupts."""

import pytest

from tests.servers.valkey import ValkeyServer


@pytest.fixture(scope="module")
def valkey():
    with ValkeyServer() as server:
        yield server
