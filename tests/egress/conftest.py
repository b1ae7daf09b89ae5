"""The provider that the gateway calls."""

import pytest

from tests.outbound.server import QuotaServer, as_json


@pytest.fixture(scope="module")
def server():
    with QuotaServer() as server:
        yield server


@pytest.fixture
def upstream(server):
    server.requests.clear()
    server.respond = lambda request: as_json({"path": request.path})
    return server
