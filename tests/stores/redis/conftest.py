"""Real servers for the Redis store, one per test process, emptied between tests."""

from __future__ import annotations

import shutil
from itertools import count
from typing import TYPE_CHECKING

import pytest

from tests.servers.process import need
from tests.servers.valkey import ValkeyServer
from tidegate.stores._redis import RedisStore
from tidegate.stores._redis.address import RedisAddress

if TYPE_CHECKING:
    from collections.abc import Iterator

numbers = count()


def address_of(server: ValkeyServer, **options: object) -> RedisAddress:
    """Return the address of a server, with long timeouts for a busy machine and a unique prefix."""
    values = {"hosts": (("127.0.0.1", server.port),), "timeout": 5.0, "connect_timeout": 5.0}
    return RedisAddress(**values | {"prefix": f"test{next(numbers)}"} | options)  # type: ignore[arg-type]  # named in tests


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="session")
def redis7() -> Iterator[ValkeyServer]:
    with ValkeyServer(need(shutil.which("redis-server"), "redis-server", "apt-get install redis-server")) as server:
        yield server


@pytest.fixture(params=["valkey", "redis7"])
def any_server(request: pytest.FixtureRequest) -> ValkeyServer:
    """Return a Valkey server, then a Redis server."""
    server: ValkeyServer = request.getfixturevalue(request.param)
    return server


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    """Start a server that the test may kill or freeze."""
    with ValkeyServer() as own:
        yield own


@pytest.fixture
def store(valkey: ValkeyServer) -> Iterator[RedisStore]:
    opened = RedisStore(address_of(valkey))
    yield opened
    opened.close()
