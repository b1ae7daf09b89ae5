"""The servers of network buses, started once for the tests that do not stop them."""

import pytest

from tests.servers.nats import NatsServer
from tests.servers.valkey import ValkeyServer

SERVERS = {"nats": NatsServer, "redis": ValkeyServer}


@pytest.fixture(scope="module", params=SERVERS)
def server(request):
    with SERVERS[request.param]() as server:
        yield server
